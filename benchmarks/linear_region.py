"""Norms, robust accuracy and CPU seconds of the linear-region attack, and of Foolbox's Brendel-Bethge beside it.

    python benchmarks/linear_region.py --weights FILE --data-root FOLDER [--samples 20 --norm l2 --peer-starts 0]

The network is that of Wong and Kolter for MNIST; the images are the first of the test set that it classifies
correctly. ``--set NAME=VALUE`` changes a setting of the attack. With ``--peer-starts N`` Foolbox's attack runs from N
blended-noise starts. Seconds are those of this process on one core.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import wong_kolter_mnist

from robust_ext.attacks.linear_region.attack import linear_region
from robust_ext.attacks.linear_region.settings import LinearRegionSettings
from robust_ext.datasets import load_dataset
from robust_ext.random_streams import stream
from robust_ext.target import Counted, PassCounter, Target, frozen
from robust_ext.threat import ThreatModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="state dict (.safetensors)")
    parser.add_argument("--data-root", required=True, help="folder with MNIST")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--norm", default="l2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-starts", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    network = wong_kolter_mnist()
    network.load_state_dict(load_file(given.weights))
    mnist = load_dataset("mnist", root=given.data_root)
    inputs, labels = mnist.take(list(range(2 * given.samples + 20)))
    with torch.no_grad():
        right = network(inputs).argmax(1) == labels
    inputs, labels = inputs[right][: given.samples], labels[right][: given.samples]
    threat_model = ThreatModel(norm=given.norm, epsilon=1.0)
    chosen = dict(one.split("=", 1) for one in given.set)
    values: dict[str, Any] = {name: _value(text) for name, text in chosen.items()}
    settings = LinearRegionSettings(**values)
    counter = PassCounter()
    target = Target(
        module=Counted(network, counter),
        bounds=(0.0, 1.0),
        classes=10,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
        counter=counter,
    )
    start = time.process_time()
    with frozen(network):
        found = linear_region(
            target, inputs, labels, threat_model=threat_model, generator=stream(given.seed), settings=settings
        )
    spent = time.process_time() - start
    show("LinearRegion", found.distance, spent)
    for moment in found.history[:: max(1, len(found.history) // 10)]:
        passes, regions = (float(count.double().mean()) for count in (moment.passes, moment.regions))
        print(
            f"  {passes:7.0f} passes and {regions:4.0f} regions an image, {moment.seconds:6.1f} s by the clock: "
            f"mean {float(moment.distance.mean()):.4f}"
        )
    if given.peer_starts:
        start = time.process_time()
        distances = peer(network, inputs, labels, threat_model, starts=given.peer_starts, seed=given.seed)
        show(f"Brendel-Bethge, {given.peer_starts} starts", distances, time.process_time() - start)


def peer(
    network: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, starts: int, seed: int
) -> Tensor:
    """The smallest distances of Foolbox's attack from repeated blended-noise starts."""
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
    best = torch.full((len(inputs),), torch.inf, dtype=torch.float64)
    for number in range(starts):
        torch.manual_seed(seed + number)
        begin = noise.run(model, inputs, foolbox.criteria.Misclassification(labels))
        _, candidates, wrong = attacks[threat_model.norm]()(model, inputs, labels, starting_points=begin, epsilons=None)
        best = torch.where(wrong, threat_model.distance(candidates, inputs).minimum(best), best)
    return best


def show(name: str, distances: Tensor, seconds: float) -> None:
    """One line of results."""
    accuracies = ", ".join(f"{float((distances > eps).double().mean()):.2f} at {eps}" for eps in (1.0, 1.5, 2.0))
    print(
        f"{name}: mean {float(distances.mean()):.4f}, median {float(distances.median()):.4f}, robust accuracy "
        f"{accuracies}, {seconds:.1f} CPU s ({seconds / len(distances):.2f} an image)"
    )


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
