"""How deep attacks go on a network, and whether that orders them as their robust accuracy at small budgets does.

    python benchmarks/depth.py --weights FILE --data-root FOLDER [--samples 32] [--network ripple] [--accuracy 48]

Networks: the ResNet-20 as it is (``plain``), and three that blur its gradient without killing it: a small ripple on the
input (``ripple``), noise in the backward pass (``noise``), steep sigmoids behind the first layer (``sigmoid``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from common import THREAT, load, parser, pgd
from torch import Tensor, nn

import robust_ext
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

ATTACKS = {
    "FGSM": "foolbox:FGSM()",
    "PGD-5": pgd(5),
    "PGD-20": pgd(20),
    "PGD-200": pgd(200),
    "APGD-50": "robust_ext:APGD(steps=50, loss='margin')",
    "Square-300": "robust_ext:Square(queries=300)",
}
BUDGETS = (0.25 / 255, 0.5 / 255, 1 / 255)


class Ripple(nn.Module):
    """Adds a sine of a small amplitude to its input; its slope is ``slope`` times the identity's at most."""

    def __init__(self, *, slope: float, period: float) -> None:
        super().__init__()
        self.slope, self.turns = slope, 2 * torch.pi / period

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (N, ...) of the same shape."""
        return x + self.slope / self.turns * torch.sin(self.turns * x)


class _NoisyGradient(torch.autograd.Function):
    """The identity, whose gradient comes back with noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        spread = gradient.flatten(1).std(1).view(-1, *[1] * (gradient.dim() - 1))
        return gradient + ctx.size * spread * torch.randn_like(gradient), None


class NoisyGradient(nn.Module):
    """The identity, with noise of ``size`` standard deviations added to the gradient."""

    def __init__(self, *, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (N, ...) as they are."""
        return _NoisyGradient.apply(x, self.size)


class SteepSigmoids(nn.Module):
    """Steps of a height, each a sigmoid: between them little of the gradient is left."""

    def __init__(self, *, height: float, steepness: float) -> None:
        super().__init__()
        self.height, self.steepness = height, steepness

    def forward(self, x: Tensor) -> Tensor:
        """Activations (N, ...) of the same shape."""
        steps = (x / self.height).detach().floor()
        rest = x / self.height - steps
        return self.height * (steps + torch.sigmoid(self.steepness * (rest - 0.5)))


def blurred(network: nn.Module, kind: str, strength: float | None) -> nn.Module:
    """The network with its gradient blurred."""
    if kind == "plain":
        return network
    if kind == "sigmoid":
        network.bn1 = nn.Sequential(network.bn1, SteepSigmoids(height=0.1, steepness=strength or 12.0))
        return network.eval()
    period = THREAT.epsilon / 5
    front = Ripple(slope=strength or 4.0, period=period) if kind == "ripple" else NoisyGradient(size=strength or 3.0)
    return nn.Sequential(front, network).eval()


def accuracies(network: nn.Module, attacks: Mapping[str, object], root: str, samples: int) -> Mapping[str, list[float]]:
    """Robust accuracy at each budget, of samples that are classified right, by attack."""
    cifar = load_dataset("cifar10", root=root)
    inputs, labels = cifar.take(cifar.choose(2 * samples, seed=1))
    with torch.no_grad():
        right = (network(inputs).argmax(1) == labels).nonzero().flatten()[:samples]
    found: dict[str, list[float]] = {name: [] for name in attacks}
    for epsilon in BUDGETS:
        ball = ThreatModel(norm="linf", epsilon=epsilon)
        for name, attack in attacks.items():
            result = robust_ext.robust_accuracy(network, {name: attack}, inputs[right], labels[right], ball)
            found[name].append(result.content["attacks"][0]["robust_accuracy"][0]["robust_accuracy"])
    return found


def main() -> None:
    """Print a table of scores by depth, and one of robust accuracies."""
    options = parser(__doc__)
    options.add_argument("--network", choices=("plain", "ripple", "noise", "sigmoid"), default="plain")
    options.add_argument("--strength", type=float, help="of the ripple's slope, the noise, or the sigmoids")
    options.add_argument("--depths", type=float, nargs="+", default=[1, 2, 4, 8, 16])
    options.add_argument("--attack", action="append", help="names of attacks instead of all")
    options.add_argument("--accuracy", type=int, default=0, help="samples for robust accuracy at small budgets")
    arguments = options.parse_args()
    network, inputs = load(arguments)
    network = blurred(network, arguments.network, arguments.strength)
    attacks = {name: attack for name, attack in ATTACKS.items() if not arguments.attack or name in arguments.attack}
    begun = time.perf_counter()
    result = robust_ext.binarization_test(network, attacks, inputs, THREAT, depths=tuple(arguments.depths))
    print(f"{arguments.network}, {arguments.samples} samples, {time.perf_counter() - begun:.0f} s")
    print(f"{'':<22}" + "".join(f"{depth:>9g}" for depth in arguments.depths))
    for entry in result.content["attacks"]:
        scores = [f"{row['found']}/{row['problems']}" for row in entry["depths"]]
        rates = entry["score"], entry["random_score"]
        print(f"{entry['name']:<22}" + "".join(f"{one:>9}" for one in scores), entry["verdict"], entry["depth"], *rates)
    for row in result.content["witnesses"]:
        print(f"depth {row['depth']:g}: proved {row['proved']} of {row['samples']}, by {row['by']}")
    for finding in result.content["findings"]:
        if finding["code"] == "falls_behind":
            print(f"{finding['attack']}: {finding['cause']} {finding['evidence'][0]}")
    if arguments.accuracy:
        for name, values in accuracies(network, attacks, arguments.data_root, arguments.accuracy).items():
            print(f"{name:<22}" + "".join(f"{value:>9.3f}" for value in values))


if __name__ == "__main__":
    main()
