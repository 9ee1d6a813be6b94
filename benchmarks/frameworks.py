"""One network in torch, JAX, Keras and TensorFlow: results that have to agree, and the cost of the bridge.

    python benchmarks/frameworks.py [--samples 32] [--frameworks torch,jax,keras,tensorflow]

Frameworks that are not installed are left out. The table of docs/evidence/frameworks.md is its output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

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


def main() -> None:
    """Print both tables."""
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


if __name__ == "__main__":
    main()
