"""What the benchmarks share: the network, inputs, PGD by hand, and the times of bare passes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import resnet20

from robust_ext.datasets import load_dataset
from robust_ext.threat import ThreatModel

THREAT = ThreatModel(norm="linf", epsilon=8 / 255)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--weights", help="ResNet-20 state dict (.safetensors); random weights when left out")
    made.add_argument("--data-root", help="folder with CIFAR-10; uniform noise when left out")
    made.add_argument("--samples", type=int, default=32)
    return made


def load(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The network, and inputs (N, 3, 32, 32)."""
    torch.manual_seed(0)
    network = resnet20()
    if arguments.weights:
        network.load_state_dict(load_file(arguments.weights))
    if not arguments.data_root:
        return network, torch.rand(arguments.samples, 3, 32, 32)
    cifar = load_dataset("cifar10", root=arguments.data_root)
    return network, cifar.take(cifar.choose(arguments.samples, seed=0))[0]


def pgd(steps: int) -> Callable[..., Tensor]:
    """Sign-gradient PGD with steps of eps/8, no more than the passes it needs."""

    def attack(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
        adversarial = x.clone()
        for _ in range(steps):
            adversarial.requires_grad_(True)
            loss = nn.functional.cross_entropy(model(adversarial), y, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, adversarial)
            moved = adversarial.detach() + epsilon / 8 * gradient.sign()
            adversarial = (x + (moved - x).clamp(-epsilon, epsilon)).clamp(0, 1)
        return adversarial

    attack.__name__ = f"PGD-{steps} by hand"
    return attack


def seconds(function: Callable[[], object], *, repeats: int = 1) -> float:
    """Shortest time of a few calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_seconds(network: nn.Module, x: Tensor, *, rows: int = 512) -> float:
    """Seconds a row of a bare forward pass, at the best of several batch sizes."""
    rates = []
    for size in (16, 32, 64, 128, 256):
        batch = x[:1].expand(size, -1, -1, -1).contiguous()

        def some(batch: Tensor = batch, size: int = size) -> None:
            with torch.no_grad():
                for _ in range(max(1, rows // size)):
                    network(batch)

        rates.append(seconds(some, repeats=3) / (max(1, rows // size) * size))
    return min(rates)


def gradient_seconds(network: nn.Module, x: Tensor, *, rows: int = 256) -> float:
    """Seconds a row of a bare forward and backward pass to the inputs, weights frozen, at the best batch size."""
    asked = [(p, p.requires_grad) for p in network.parameters()]
    for parameter, _ in asked:
        parameter.requires_grad_(False)
    rates = []
    for size in (8, 16, 32, 64):
        batch = x[:1].expand(size, -1, -1, -1).contiguous().requires_grad_(True)

        def some(batch: Tensor = batch, size: int = size) -> None:
            for _ in range(max(1, rows // size)):
                torch.autograd.grad(network(batch).sum(), batch)

        rates.append(seconds(some, repeats=3) / (max(1, rows // size) * size))
    for parameter, before in asked:
        parameter.requires_grad_(before)
    return min(rates)
