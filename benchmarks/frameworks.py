"""One network in torch, JAX, Keras and TensorFlow: results that have to agree, and the cost of the bridge.

Attacks of Foolbox on its JAXModel and TensorFlowModel: by Foolbox alone, by this project, and in torch by the bridge.

    python benchmarks/frameworks.py [--samples 32] [--frameworks torch,jax,keras,tensorflow]

Frameworks that are not installed are left out. The table of docs/evidence/frameworks.md is its output.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext import ThreatModel, as_module, binarization_test, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.adapters.frameworks import FRAMEWORKS

ATTACKS = {
    "APGD": "robust_ext:APGD(steps=20)",
    "foolbox PGD": "foolbox:LinfPGD(steps=20)",
    "one weak step": "foolbox:LinfPGD(steps=1, rel_stepsize=0.1, random_start=False)",
    "Square": "robust_ext:Square(queries=200)",
}
# Without random starts: the frameworks draw other numbers.
FOOLBOX: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "FGSM": ("LinfFastGradientAttack", {}, "linf", 0.1),
    "PGD": ("LinfPGD", {"steps": 20, "random_start": False}, "linf", 0.1),
    "l2 PGD": ("L2PGD", {"steps": 20, "random_start": False}, "l2", 0.5),
    "DeepFool": ("L2DeepFoolAttack", {"steps": 20}, "l2", 0.5),
    "Carlini and Wagner": ("L2CarliniWagnerAttack", {"binary_search_steps": 3, "steps": 50}, "l2", 0.5),
    "DDN": ("DDNAttack", {"steps": 20}, "l2", 0.5),
}


def found(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return what the evaluations of a model come to, by attack and evaluation."""
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    test = binarization_test(model, dict(ATTACKS), inputs, threat_model)
    entries = {one["name"]: one for one in test.content["attacks"]}
    scores = {f"{name}: test": (one["verdict"], one["score"], one["depth"]) for name, one in entries.items()}
    accuracy = robust_accuracy(model, dict(ATTACKS), inputs, labels, threat_model)
    rows = accuracy.content["attacks"]
    robust = {f"{one['name']}: robust": one["robust_accuracy"][0]["robust_accuracy"] for one in rows}
    findings = {f"findings: {one['attack']} {one['code']}": True for one in test.content["findings"]}
    return {**scores, **robust, **findings}


def seconds(call: Callable[[], object], *, repeats: int = 60) -> float:
    """Return the least time of a call that ran before: other work on the machine only adds to it."""
    call()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def pass_times(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Return milliseconds of a forward pass, and of one forward and back, of a batch."""

    def both() -> object:
        x = inputs.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x)

    with torch.no_grad():
        forward = seconds(lambda: model(inputs))
    return 1000 * forward, 1000 * seconds(both)


def native_times(name: str, model: Any, inputs: Tensor) -> tuple[float, float]:
    """Return the same without the bridge: both functions on the framework's own arrays, compiled as they are there."""
    features, head = (part.function.function for part in model)
    images = inputs.permute(0, 2, 3, 1).contiguous().numpy()
    if name == "jax":
        import jax

        x = jax.numpy.array(images)
        run = jax.jit(lambda x: head(features(x)))
        differentiate = jax.jit(jax.grad(lambda x: head(features(x)).sum()))
        forward = seconds(lambda: run(x).block_until_ready())
        return 1000 * forward, 1000 * seconds(lambda: differentiate(x).block_until_ready())
    import tensorflow as tf

    x = tf.constant(images)
    whole = tf.function(lambda x: head(features(x))) if name == "keras" else lambda x: head(features(x))

    def both() -> object:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            out = tf.reduce_sum(whole(x))
        return tape.gradient(out, x).numpy()

    return 1000 * seconds(lambda: whole(x).numpy()), 1000 * seconds(both)


def foolbox_models(name: str, module: Any) -> tuple[Any, nn.Module, Callable[[Any], Any]]:
    """Return a framework's Foolbox model of a pair of functions, a module of the same, and what makes its arrays."""
    foolbox = importlib.import_module("foolbox")
    features, head = (part.function.function for part in module)

    def whole(x: Any) -> Any:
        return head(features(x))

    if name == "jax":
        from robust_ext.adapters.jax import jax_model

        return foolbox.JAXModel(whole, bounds=(0, 1)), jax_model(whole), importlib.import_module("jax").numpy.asarray
    from robust_ext.adapters.tensorflow import tensorflow_model

    model = foolbox.TensorFlowModel(whole, bounds=(0, 1), device="/CPU:0")
    return model, tensorflow_model(whole), importlib.import_module("tensorflow").constant


def in_three_ways(name: str, module: Any, inputs: Tensor, labels: Tensor) -> None:
    """Print robust accuracy, largest difference to Foolbox's own points, and CPU time of a second run."""
    foolbox = importlib.import_module("foolbox")
    model, bridge, array = foolbox_models(name, module)
    # Compiled once for all runs, as the bridge is.
    here = as_module(model).module
    inputs = inputs.permute(0, 2, 3, 1).contiguous()
    x, y = array(inputs.numpy()), array(labels.numpy())
    right = np.array(model(x)).argmax(1) == labels.numpy()
    for title, (attack, settings, norm, epsilon) in FOOLBOX.items():
        threat_model, made = ThreatModel(norm=norm, epsilon=epsilon), getattr(foolbox.attacks, attack)(**settings)
        minimum = isinstance(made, foolbox.attacks.base.MinimizationAttack)
        times = []
        for _ in range(2):
            begun = time.process_time()
            points = np.array(made(model, x, y, epsilons=None if minimum else epsilon)[1])
            times.append(time.process_time() - begun)
        away = torch.from_numpy(points - inputs.numpy()).flatten(1).norm(p=np.inf if norm == "linf" else 2, dim=1)
        broken = right & (np.array(model(array(points))).argmax(1) != labels.numpy()) & (away <= epsilon + 1e-6).numpy()
        cells, taken = [f"{(right & ~broken).mean():.3f}"], [times[-1]]
        for one in (here, bridge):
            for _ in range(2):
                begun = time.process_time()
                result = robust_accuracy(one, made, inputs, labels, threat_model, keep_candidates=True)
                times.append(time.process_time() - begun)
            same = broken & np.array([row["outcome"] == "found" for row in result.records])
            moved = np.abs(np.asarray(result.candidates) - points)[same].max(initial=0)
            cells.append(f"{result.robust_accuracy(epsilon):.3f}, {moved:.1g}")
            taken.append(times[-1])
        print("|", " | ".join([f"{name}, {title}", *cells, *(f"{one:.2f}" for one in taken)]), "|", flush=True)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    given = parser.parse_args()
    network = digits_network()
    inputs, labels = load_dataset("digits").take(range(given.samples))
    models: dict[str, nn.Module] = {}
    for name in given.frameworks.split(","):
        try:
            models[name] = as_module(FRAMEWORKS[name](network)).module
        except ImportError:
            print(f"{name}: not installed")
    results = {name: found(model, inputs, labels) for name, model in models.items()}
    keys = list(dict.fromkeys(key for one in results.values() for key in one))
    print("|", " | ".join(["", *models]), "|")
    for key in keys:
        print("|", " | ".join([key, *(str(one.get(key, "none")) for one in results.values())]), "|")
    print("| ms a batch | forward | forward and back | native forward | native forward and back |")
    for rows in (32, 256):
        batch = load_dataset("digits").take(range(rows))[0]
        for name, model in models.items():
            forward, both = pass_times(model, batch)
            own = ("", "") if name == "torch" else (f"{one:.2f}" for one in native_times(name, model, batch))
            print("|", " | ".join([f"{rows} rows, {name}", f"{forward:.2f}", f"{both:.2f}", *own]), "|")
    print("| | Foolbox alone | here | in torch | CPU s: Foolbox alone | here | in torch |")
    for name in ("jax", "tensorflow"):
        if name in models:
            in_three_ways(name, models[name], inputs, labels)


if __name__ == "__main__":
    main()
