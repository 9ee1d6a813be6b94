"""At 224 x 224: a binarization test to its verdict, a whole evaluation, or how soon minimum-norm attacks get near.

    python benchmarks/large_inputs.py --network resnet18
    python benchmarks/large_inputs.py --network vit_tiny_patch16_224
    python benchmarks/large_inputs.py --evaluate --epsilon .004
    python benchmarks/large_inputs.py --nearest LinearRegion BoundarySearch --samples 4

Inputs are crops of the two photographs that ship with scikit-learn. With ``--evaluate`` and ``--nearest`` the network
is a ResNet-18 of this project's own blocks, trained for 60 steps of 8 crops to tell which photograph and which fifth of
its width they are of. With ``--nearest`` each input is attacked by itself, with a budget in CPU seconds and one thread.
By what ``watch`` shows, these are printed: the CPU seconds until the first point that a float64 copy of the network
confirms, and until one nearer than that of Foolbox's DDN (100 steps).

Else it is a binarization test, on torchvision's ResNet-18 or timm's ViT-tiny with random weights: rows forward and
backward, memory and CPU time, beside the bare passes. Settings are the defaults but for ``proven_rate``: 16 samples
cannot show a rate above 0.9, so that with the default one that all find would be "inconclusive". The floor is what the
counted rows take as bare passes of the network, weights frozen, at the rate of a few batches of the fastest size.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from common import replay
from linear_region import target_of
from networks import Block
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.native import Step
from robust_ext.attacks.running import run_attack, undisturbed
from robust_ext.core.random import stream
from robust_ext.registry import as_attack

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.libraries import library

SIZE = 224
SIZES = (2, 4, 8, 16, 32)
CLASSES = 10


def make_network(name: str) -> nn.Module:
    """A network with random weights, in eval mode."""
    torch.manual_seed(0)
    if name == "resnet18":
        made: nn.Module = library("torchvision").models.resnet18(weights=None)
    else:
        made = library("timm").create_model(name)
    return made.eval()


def resnet18_blocks(steps: int) -> nn.Module:
    """A ResNet-18 whose shortcuts have no parameters, trained to tell parts of photographs apart, in eval mode."""
    torch.manual_seed(0)
    widths = (64, 64, 128, 256, 512)
    stages = [
        block
        for inside, outside in pairwise(widths)
        for block in (Block(inside, outside, 1 if outside == 64 else 2), Block(outside, outside, 1))
    ]
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    network = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
    inputs, classes = crops(64)
    optimizer = torch.optim.Adam(network.parameters())
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.3
    for _ in range(max(1, steps)):
        rows = torch.randperm(len(inputs))[:8]
        loss = nn.functional.cross_entropy(network(inputs[rows]), classes[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if steps:
            optimizer.step()
    return network.eval()


def crops(count: int) -> tuple[Tensor, Tensor]:
    """Parts of photographs, ``(count, 3, 224, 224)`` in [0, 1], and of which and how far to the right they are."""
    photographs = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    drawn = torch.Generator().manual_seed(0)
    found, classes = [], []
    for number in range(count):
        image = photographs[number % len(photographs)]
        free = [size - SIZE + 1 for size in image.shape[1:]]
        top, left = (int(torch.randint(size, (1,), generator=drawn)) for size in free)
        found.append(image[:, top : top + SIZE, left : left + SIZE])
        classes.append(number % len(photographs) + len(photographs) * (left * CLASSES // len(photographs) // free[1]))
    return torch.stack(found), torch.tensor(classes)


def row_seconds(network: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """CPU seconds of a row forward, and of one forward and backward, in batches of the fastest size."""
    only, both = [], []
    for size in SIZES:
        rows = max(size, 16)
        start = time.process_time()
        replay(network, inputs, forwards=rows, gradients=0, sizes=(size, size))
        middle = time.process_time()
        replay(network, inputs, forwards=0, gradients=rows, sizes=(size, size))
        only.append((middle - start) / rows)
        both.append((time.process_time() - middle) / rows)
    return min(only), min(both)


def nearest(network: nn.Module, names: list[str], inputs: Tensor, *, norm: str, budget: float) -> None:
    """Print how soon attacks have a point of each input, and one nearer than DDN's."""
    threat_model = ThreatModel(norm=norm, epsilon=100.0)
    target, exact = target_of(network, inputs), copy.deepcopy(network).double()
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    for number, (image, label) in enumerate(zip(inputs.split(1), labels.split(1), strict=True)):
        ddn, start = as_attack("foolbox:DDNAttack(steps=100)"), time.process_time()
        given = {"threat_model": threat_model, "generator": stream(0, number)}
        points = run_attack(ddn, target, image, label, **given)
        took = time.process_time() - start
        beaten = float(threat_model.distance(points, image)) if _fooled(exact, points, label) else math.inf
        print(f"input {number}: DDN {beaten:.4f} ({took:.1f} CPU s)", flush=True)
        for name in names:
            attack = as_attack(f"robust_ext:{name}(budget={budget}, budget_unit='seconds')")
            assert isinstance(attack, BoundarySearch)
            began, seen = time.process_time(), _Seen(exact, label)
            with undisturbed(attack, target, stream(0, number)) as shown:
                result = attack.run(shown, image, label, threat_model=threat_model, generator=stream(0), watch=seen)
            took = time.process_time() - began - seen.lost
            entries = [(seconds - began, distance) for seconds, distance in seen.entries]
            first = next((entry for entry in entries), (math.inf, math.inf))
            nearer = next((entry for entry in entries if entry[1] < beaten), (math.inf, math.inf))
            last = entries[-1][1] if entries else math.inf
            print(
                f"  {name}: first point {first[1]:.4f} after {first[0]:.1f} s, nearer than DDN after {nearer[0]:.1f}, "
                f"{last:.4f} after {took:.1f}; {seen.steps} steps shown, {int(result.regions)} regions",
                flush=True,
            )


class _Seen:
    """The confirmed points of one input that a search shows, each nearer than those before: CPU time and distance."""

    def __init__(self, exact: nn.Module, label: Tensor) -> None:
        self.exact, self.label = exact, label
        self.entries: list[tuple[float, float]] = []
        self.steps, self.lost = 0, 0.0

    def __call__(self, step: Step) -> None:
        """Look at what is shown; the time that this takes is not counted."""
        began, distance = time.process_time(), -float(step.loss)
        self.steps += 1
        before = self.entries[-1][1] if self.entries else math.inf
        if distance < before and _fooled(self.exact, step.points, self.label):
            self.entries.append((began - self.lost, distance))
        self.lost += time.process_time() - began


def _fooled(exact: nn.Module, point: Tensor, label: Tensor) -> bool:
    with torch.no_grad():
        return bool(exact(point.double()).argmax(1) != label)


def peak() -> float:
    """Most memory of the process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--network", default="resnet18", help="resnet18 (torchvision), or a name of timm's")
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--attack", default="robust_ext:APGD")
    options.add_argument("--epsilon", type=float, default=4 / 255)
    options.add_argument("--evaluate", action="store_true", help="robust_ext.evaluate, one thread")
    options.add_argument("--nearest", nargs="+", metavar="ATTACK", help="minimum-norm attacks of this project")
    options.add_argument("--training", type=int, default=60, help="steps of their network; 0 for random weights")
    options.add_argument("--norm", default="l2", help="that they minimise; DDN minimises l2")
    options.add_argument("--budget", type=float, default=40.0, help="their CPU seconds for each input")
    arguments = options.parse_args()
    logging.basicConfig(level=logging.INFO)
    inputs = crops(arguments.samples)[0]
    if arguments.nearest:
        torch.set_num_threads(1)
        network = resnet18_blocks(arguments.training)
        nearest(network, arguments.nearest, inputs, norm=arguments.norm, budget=arguments.budget)
    elif arguments.evaluate:
        torch.set_num_threads(1)
        evaluate(resnet18_blocks(arguments.training), inputs, arguments)
    else:
        binarize(make_network(arguments.network), inputs, arguments)


def evaluate(network: nn.Module, inputs: Tensor, arguments: argparse.Namespace) -> None:
    """Print a whole evaluation and what it took."""
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    before, start = peak(), time.process_time()
    result = robust_ext.evaluate(network, inputs, labels, ThreatModel(norm="linf", epsilon=arguments.epsilon))
    took, total = time.process_time() - start, result.content["time"]["total"]
    print(result, flush=True)
    print(
        f"ResNet-18, {len(inputs)} samples: {total['forward'] / len(inputs):.0f} rows forward and "
        f"{total['backward'] / len(inputs):.0f} back a sample, {took / 60:.1f} CPU minutes; memory {before:.0f} MiB "
        f"before, {peak():.0f} MiB at most"
    )


def binarize(network: nn.Module, inputs: Tensor, arguments: argparse.Namespace) -> None:
    """Print the verdict of a binarization test and what it took."""
    before, start = peak(), time.process_time()
    began = time.perf_counter()
    threat_model = ThreatModel(norm="linf", epsilon=arguments.epsilon)
    result = robust_ext.binarization_test(network, arguments.attack, inputs, threat_model, proven_rate=0.0)
    took, wall, after = time.process_time() - start, time.perf_counter() - began, peak()
    print(result, flush=True)
    (entry,) = result.content["attacks"]
    forward, backward = (entry["passes"][kind] / len(inputs) for kind in ("forward", "backward"))
    only, both = row_seconds(network, inputs)
    floor = len(inputs) * ((forward - backward) * only + backward * both)
    print(
        f"{arguments.network}, {len(inputs)} samples: {result.verdict}; rows a sample: {forward:.0f} forward, "
        f"{backward:.0f} backward; {took:.0f} CPU s, {wall / 60:.1f} min; floor {floor:.0f} CPU s, ratio "
        f"{took / floor:.2f}; memory {before:.0f} MiB before, {after:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
