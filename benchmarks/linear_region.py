"""The linear-region attack against Foolbox's Brendel-Bethge at equal CPU time, with other attacks beside them.

    python benchmarks/linear_region.py --weights FILE --data-root FOLDER [--norm l2] [--samples 100] [--skip 2000]
        [--seeds 0,1,2] [--others] [--polish]

The network is that of Wong and Kolter for MNIST; the images are the first of the test set, after those to skip, that it
classifies correctly. ``--set NAME=VALUE`` changes a setting of the attack. Brendel-Bethge runs again and again from
new blended noise until it has had as much CPU time. ``--polish`` starts the linear-region attack from its points, and
from nothing else. ``--others`` runs further attacks once, through ``robust_ext.robust_accuracy``. One thread; seconds
are CPU seconds of this process, those of the other attacks wall-clock time.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import wong_kolter_mnist

from robust_ext import robust_accuracy
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.results import LinearRegionResult
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target, frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

EPSILONS = {"linf": (0.1, 0.15, 0.2), "l2": (1.0, 1.5, 2.0), "l1": (2.5, 5.0, 10.0)}
OTHERS: dict[str, dict[str, object]] = {
    "l2": {
        "DDN, 1,000 steps": "foolbox:DDNAttack(steps=1000)",
        "FMN, 1,000 steps": "foolbox:L2FMNAttack(steps=1000)",
        "DeepFool": "foolbox:L2DeepFoolAttack()",
        "C&W, 9 x 1,000 steps": "foolbox:L2CarliniWagnerAttack(steps=1000)",
        "APGD, 100 steps, 5 restarts": "robust_ext:APGD(steps=100, restarts=5)",
    },
    "linf": {
        "FMN, 1,000 steps": "foolbox:LInfFMNAttack(steps=1000)",
        "DeepFool": "foolbox:LinfDeepFoolAttack()",
        "Basic iterative, 200 steps": "foolbox:LinfBasicIterativeAttack(steps=200)",
        "PGD, 200 steps": "foolbox:LinfPGD(steps=200)",
        "APGD, 100 steps, 5 restarts": "robust_ext:APGD(steps=100, restarts=5)",
    },
    "l1": {
        "FMN, 1,000 steps": "foolbox:L1FMNAttack(steps=1000)",
        "EAD, 9 x 1,000 steps": "foolbox:EADAttack(steps=1000, decision_rule='L1')",
        "PGD, 200 steps": "foolbox:L1PGD(steps=200)",
        "APGD, 100 steps, 5 restarts": "robust_ext:APGD(steps=100, restarts=5)",
    },
}


def main() -> None:
    """Measure and print."""
    given = _parser().parse_args()
    torch.set_num_threads(1)
    network = wong_kolter_mnist()
    network.load_state_dict(load_file(given.weights))
    network.eval()
    inputs, labels = images(network, given.data_root, skip=given.skip, count=given.samples)
    threat_model = ThreatModel(norm=given.norm, epsilon=1.0)
    values: dict[str, Any] = {name: _value(text) for name, text in (one.split("=", 1) for one in given.set)}
    attack = LinearRegion(**values)
    rows: list[dict[str, Any]] = []

    def note(name: str, distances: Tensor, seconds: float, **more: Any) -> None:
        rows.append(summary(name, distances, seconds, threat_model.norm) | more)
        show(rows[-1])

    for seed in given.seeds:
        found, spent, passes = attacked(network, inputs, labels, threat_model, seed, attack)
        regions = float(found.regions.double().mean())
        curve = [(float(m.passes.double().mean()), float(m.distances.mean())) for m in found.history]
        note(f"LinearRegion, seed {seed}", found.distances, spent, regions=regions, passes=passes, curve=curve)
        peer, points, starts, took = brendel_bethge(network, inputs, labels, threat_model, seed=seed, seconds=spent)
        note(f"Brendel-Bethge x {starts}, seed {seed}", peer, took)
        if given.polish:
            polish = LinearRegion(**values | {"start": "given"})
            better, spent, _ = attacked(network, inputs, labels, threat_model, seed, polish, points)
            note(f"LinearRegion from these, seed {seed}", better.distances, spent)
            if bool((better.distances > peer + 1e-6).any()):
                raise SystemExit("a point ended farther than it began")
    if given.others:
        others = OTHERS[given.norm] | {"PGD, 40 steps, 100 restarts": repeated_pgd(given.norm)}
        epsilons = EPSILONS[given.norm]
        budget = ThreatModel(norm=given.norm, epsilon=epsilons[0])
        result = robust_accuracy(network, others, inputs, labels, budget, epsilons=epsilons)
        for one in result.content["attacks"]:
            accuracies = {row["epsilon"]: row["robust_accuracy"] for row in one["robust_accuracy"]}
            known = [d for d in one["distances"] or [] if d is not None]
            complete = len(known) == len(labels)
            rows.append(
                {
                    "name": one["name"],
                    "mean": sum(known) / len(known) if complete else None,
                    "accuracies": accuracies,
                    "seconds": one["seconds"] / len(labels),
                }
            )
            show(rows[-1])
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def images(network: nn.Module, root: str, *, skip: int, count: int) -> tuple[Tensor, Tensor]:
    """The first test images from ``skip`` on that the network classifies correctly."""
    inputs, labels = load_dataset("mnist", root=root).take(list(range(skip, skip + 2 * count + 20)))
    with torch.no_grad():
        right = network(inputs).argmax(1) == labels
    return inputs[right][:count], labels[right][:count]


def attacked(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    seed: int,
    attack: LinearRegion,
    points: Tensor | None = None,
) -> tuple[LinearRegionResult, float, float]:
    """The linear-region attack, its CPU seconds, and rows sent forward and backward an image."""
    counter = PassCounter()
    target = Target(
        module=Counted(network, counter),
        bounds=(0.0, 1.0),
        classes=10,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
        counter=counter,
        starting_points=None if points is None else points.unsqueeze(1),
    )
    begin = time.process_time()
    with frozen(network):
        found = attack.run(target, inputs, labels, threat_model=threat_model, generator=stream(seed))
    passes = float(found.history[-1].passes.double().mean())
    return found, time.process_time() - begin, passes


def brendel_bethge(
    network: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int, seconds: float
) -> tuple[Tensor, Tensor, int, float]:
    """Smallest distances and points of Foolbox's attack from noise again and again, the starts and the CPU seconds."""
    import foolbox
    from foolbox.attacks import (
        L1BrendelBethgeAttack,
        L2BrendelBethgeAttack,
        LinearSearchBlendedUniformNoiseAttack,
        LinfinityBrendelBethgeAttack,
    )

    attacks = {"linf": LinfinityBrendelBethgeAttack, "l2": L2BrendelBethgeAttack, "l1": L1BrendelBethgeAttack}
    model = foolbox.PyTorchModel(network, bounds=(0, 1))
    noise = LinearSearchBlendedUniformNoiseAttack(distance=None, directions=20)
    best, points = torch.full((len(inputs),), torch.inf, dtype=torch.float64), inputs.clone()
    # What numba compiles is not counted.
    attacks[threat_model.norm](steps=2).run(model, inputs[:1], foolbox.criteria.Misclassification(labels[:1]))
    starts, begin = 0, time.process_time()
    while time.process_time() - begin < seconds:
        torch.manual_seed(1000 * seed + starts)
        drawn = noise.run(model, inputs, foolbox.criteria.Misclassification(labels))
        _, found, wrong = attacks[threat_model.norm]()(model, inputs, labels, starting_points=drawn, epsilons=None)
        distance = torch.where(wrong, threat_model.distance(found, inputs), torch.inf)
        nearer = distance < best
        best, points[nearer] = distance.minimum(best), found[nearer]
        starts += 1
    return best, points, starts, time.process_time() - begin


def repeated_pgd(norm: str) -> object:
    """Foolbox's PGD, run 100 times from random points of the ball."""
    import foolbox

    attacks = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD, "l1": foolbox.attacks.L1PGD}
    return attacks[norm](steps=40).repeat(100)


def summary(name: str, distances: Tensor, seconds: float, norm: str) -> dict[str, Any]:
    """What is shown of an attack."""
    return {
        "name": name,
        "mean": float(distances.mean()),
        "median": float(distances.median()),
        "accuracies": {eps: float((distances > eps).double().mean()) for eps in EPSILONS[norm]},
        "seconds": seconds / len(distances),
    }


def show(row: dict[str, Any]) -> None:
    """One line of results."""
    mean = "" if row["mean"] is None else f"mean {row['mean']:.4f}, "
    accuracies = ", ".join(f"{value:.2f} at {eps}" for eps, value in row["accuracies"].items())
    more = f", {row['regions']:.0f} regions and {row['passes']:.0f} passes an image" if "regions" in row else ""
    print(f"{row['name']}: {mean}robust accuracy {accuracies}, {row['seconds']:.2f} s an image{more}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="state dict (.safetensors)")
    parser.add_argument("--data-root", required=True, help="folder with MNIST")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0, help="test images to leave out")
    parser.add_argument("--norm", default="l2", choices=list(EPSILONS))
    parser.add_argument("--seeds", type=_numbers, default=(0,))
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--polish", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
