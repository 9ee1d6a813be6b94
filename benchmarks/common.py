"""What the benchmarks share: options, the network, inputs, PGD by hand, and the times of bare passes."""

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

from robust_ext.core.guard import frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

THREAT = ThreatModel(norm="linf", epsilon=8 / 255)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--weights", help="ResNet-20 state dict (.safetensors); random weights when left out")
    made.add_argument("--data-root", help="folder with CIFAR-10; uniform noise when left out")
    made.add_argument("--samples", type=int, default=32)
    return made


def page_options(description: str | None, *, runs: str) -> argparse.Namespace:
    """Options of a benchmark that writes into a page of the documentation, run on one thread; ``runs`` is what it has.

    They are parsed from the command line.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help=f"words in the names of the {runs} to run")
    made.add_argument("--write", action="store_true", help="put what was found into the page")
    torch.set_num_threads(1)
    return made.parse_args()


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


def replay(network: nn.Module, x: Tensor, *, forwards: int, gradients: int, sizes: tuple[int, int]) -> float:
    """CPU seconds of bare passes: ``forwards`` rows without and ``gradients`` rows with gradients to the inputs.

    Args:
        network: The plain network; its weights are frozen meanwhile.
        x: Inputs, of which the first is repeated; in this layout.
        forwards: Rows that only go forward.
        gradients: Rows that go forward and backward.
        sizes: Rows of a batch of each kind.
    """
    only, both = (x[:1].repeat(size, *[1] * (x.dim() - 1)).contiguous(memory_format=_layout(x)) for size in sizes)
    both.requires_grad_(True)
    start = time.process_time()
    with frozen(network):
        with torch.no_grad():
            for _ in range(round(forwards / sizes[0])):
                network(only)
        for _ in range(round(gradients / sizes[1])):
            torch.autograd.grad(network(both).sum(), both)
    return time.process_time() - start


def _layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def best_sizes(network: nn.Module, x: Tensor) -> tuple[int, int]:
    """The fastest batch sizes a row, without and with gradients."""

    def rate(size: int, gradients: bool) -> float:
        rows = 256 if gradients else 512
        counts = {"forwards": 0, "gradients": rows} if gradients else {"forwards": rows, "gradients": 0}
        return min(replay(network, x, **counts, sizes=(size, size)) for _ in range(2))

    candidates = (16, 32, 64, 128, 256)
    return min(candidates, key=lambda s: rate(s, False)), min(candidates[:4], key=lambda s: rate(s, True))
