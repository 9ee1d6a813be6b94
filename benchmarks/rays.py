"""RayS against the HopSkipJump attacks of Foolbox and ART on a CIFAR-10 ResNet-20, at equal numbers of queries.

    python benchmarks/rays.py --weights cifar10_resnet20.safetensors --data-root FOLDER [--samples 32] [--queries 1000]

All three see labels alone. Each HopSkipJump is given the least number of iterations with which it uses at least
``--queries`` queries a sample, all of them counted, those for its starting point included; RayS is then given as many.
The labels are the network's own decisions, distances are in linf, and each point is checked here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Callable

import numpy as np
import torch
from common import load, parser
from torch import Tensor, nn

from robust_ext.attacks.rays import RaysSettings, rays
from robust_ext.random_streams import seeded_globals
from robust_ext.target import Counted, PassCounter, Target, frozen
from robust_ext.threat import ThreatModel

Run = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


class _Single(nn.Module):
    """In single precision, whatever is sent: ART's attack sends doubles."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.float())
        return logits


def by_foolbox(module: nn.Module, x: Tensor, y: Tensor, iterations: int) -> Tensor:
    """Foolbox's HopSkipJump for linf."""
    import foolbox

    attack = foolbox.attacks.HopSkipJumpAttack(steps=iterations, constraint="linf")
    points: Tensor = attack(foolbox.PyTorchModel(module, bounds=(0, 1), device="cpu"), x, y, epsilons=None)[0]
    return points


def by_art(module: nn.Module, x: Tensor, y: Tensor, iterations: int) -> Tensor:
    """ART's HopSkipJump for linf."""
    from art.attacks.evasion import HopSkipJump
    from art.estimators.classification import PyTorchClassifier

    estimator = PyTorchClassifier(
        module,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=10,
        clip_values=(0, 1),
        device_type="cpu",
    )
    attack = HopSkipJump(estimator, norm=np.inf, max_iter=iterations, verbose=False)
    return torch.from_numpy(attack.generate(x.numpy(), np.eye(10)[y.numpy()]))


def hop_skip_jump(run: Run, network: nn.Module, x: Tensor, y: Tensor, queries: int) -> tuple[Tensor, int]:
    """Points, and the queries a sample that they took."""
    iterations = 1
    while True:
        counter = PassCounter()
        with frozen(network), seeded_globals(0), contextlib.redirect_stdout(io.StringIO()):
            points = run(Counted(_Single(network), counter), x.clone(), y.clone(), iterations)
        if counter.forward >= queries * len(x):
            return points.float(), counter.forward // len(x)
        iterations += 1


def show(name: str, network: nn.Module, points: Tensor, x: Tensor, y: Tensor, queries: int) -> None:
    """Print the median distance; a point that is not misclassified counts as infinitely far."""
    with torch.no_grad():
        wrong = network(points).argmax(1) != y
    distances = (points - x).flatten(1).abs().amax(1).where(wrong, torch.inf)
    solved = f"{int(wrong.sum())} of {len(x)} misclassified"
    print(
        f"{name:<20} {queries:>6} queries a sample, median linf {float(distances.median()):.4f}, {solved}", flush=True
    )


def compare(network: nn.Module, x: Tensor, arguments: argparse.Namespace) -> None:
    """Print each HopSkipJump, and RayS with as many queries."""
    with torch.no_grad():
        y = network(x).argmax(1)
    target = Target(module=network, bounds=(0.0, 1.0), classes=10, input_shape=tuple(x.shape[1:]), device=x.device)
    for name, run in (("Foolbox", by_foolbox), ("ART", by_art)):
        points, queries = hop_skip_jump(run, network, x, y, arguments.queries)
        show(f"{name} HopSkipJump", network, points, x, y, queries)
        # An epsilon no row comes within, and none stops.
        settings = RaysSettings(queries=queries, stop=False)
        found = rays(target, x, y, threat_model=ThreatModel(norm="linf", epsilon=1e-9), settings=settings)
        used = int(found.queries.max())
        show("RayS", network, found.candidates, x, y, used)


def main() -> None:
    """Print two pairs of lines."""
    options = parser(__doc__)
    options.add_argument("--queries", type=int, default=1000, help="a sample")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    network, inputs = load(arguments)
    compare(network.eval(), inputs, arguments)


if __name__ == "__main__":
    main()
