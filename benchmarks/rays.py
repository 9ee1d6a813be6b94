"""RayS against the HopSkipJump attacks of Foolbox and ART on a CIFAR-10 ResNet-20, at equal numbers of queries.

    python benchmarks/rays.py --weights cifar10_resnet20.safetensors --data-root FOLDER [--samples 32]
        [--queries 500 1000 2000]

All three see labels alone, and ask one oracle, which counts every point that is asked about for each sample, those for
a starting point included, and stops an attack at the last of the budgets. An attack's distance at a budget is that of
the nearest misclassified point in bounds among the first so many that it asked about, in linf. The labels are the
network's own decisions.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from common import load, parser
from torch import Tensor, nn

from robust_ext.attacks.rays import RayS
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# More than any of the budgets lets them make.
ITERATIONS = 1000


class OutOfQueriesError(Exception):
    """Every sample has had its budget."""


class Oracle(nn.Module):
    """A network that notes how near to each sample it was asked about a misclassified point, and after how many points.

    Args:
        network: From inputs to logits.
        x: Samples ``(N, ...)``; either every batch has one point for each, in order, or N is 1.
        y: Their labels.
        budgets: Numbers of points a sample, ascending.
    """

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, budgets: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.x, self.y = x, y
        self.asked = 0
        self.nearest = torch.full((len(x),), torch.inf)
        self.at: dict[int, Tensor] = {}
        self.budgets = budgets
        self.eval()

    def forward(self, points: Tensor) -> Tensor:
        """Logits, in single precision whatever is sent: ART's attack sends doubles."""
        points = points.float()
        logits: Tensor = self.network(points)
        if len(self.x) > 1:
            assert len(points) == len(self.x)
        wrong = (logits.argmax(1) != self.y) & ((points >= 0) & (points <= 1)).flatten(1).all(1)
        distances = (points - self.x).flatten(1).abs().amax(1).where(wrong, torch.inf)
        for found in distances[None] if len(self.x) > 1 else distances[:, None]:
            self.nearest = self.nearest.minimum(found.detach())
            self.asked += 1
            if self.asked in self.budgets:
                self.at[self.asked] = self.nearest
            if self.asked == self.budgets[-1]:
                raise OutOfQueriesError
        return logits

    def distances(self) -> dict[int, Tensor]:
        """By budget, ``(N,)``; what an attack did not use up changes nothing any more."""
        return {budget: self.at.get(budget, self.nearest) for budget in self.budgets}


Run = Callable[[nn.Module, Tensor, Tensor], object]


def by_rays(module: nn.Module, x: Tensor, y: Tensor) -> object:
    """RayS with no epsilon that would stop it."""
    target = Target(module=module, bounds=(0.0, 1.0), classes=10, input_shape=tuple(x.shape[1:]), device=x.device)
    attack = RayS(queries=100_000, stop=False)
    return attack.run(target, x, y, threat_model=ThreatModel(norm="linf", epsilon=1e-9))


def by_foolbox(module: nn.Module, x: Tensor, y: Tensor) -> object:
    """Foolbox's HopSkipJump for linf."""
    import foolbox

    attack = foolbox.attacks.HopSkipJumpAttack(steps=ITERATIONS, constraint="linf")
    return attack(foolbox.PyTorchModel(module, bounds=(0, 1), device="cpu"), x, y, epsilons=None)


def by_art(module: nn.Module, x: Tensor, y: Tensor) -> object:
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
    attack = HopSkipJump(estimator, norm=np.inf, max_iter=ITERATIONS, verbose=False)
    return attack.generate(x.numpy(), np.eye(10)[y.numpy()])


def measured(run: Run, network: nn.Module, x: Tensor, y: Tensor, budgets: Sequence[int]) -> dict[int, Tensor]:
    """Distances ``(N,)`` by budget, of samples that are attacked together."""
    oracle = Oracle(network, x, y, budgets)
    with (
        frozen(network),
        seeded_globals(0),
        torch.no_grad(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(OutOfQueriesError),
    ):
        run(oracle, x.clone(), y.clone())
    return oracle.distances()


def one_by_one(run: Run, network: nn.Module, x: Tensor, y: Tensor, budgets: Sequence[int]) -> dict[int, Tensor]:
    """Likewise, of samples that are attacked one at a time."""
    parts = [measured(run, network, x[row : row + 1], y[row : row + 1], budgets) for row in range(len(x))]
    return {budget: torch.cat([part[budget] for part in parts]) for budget in budgets}


def compare(network: nn.Module, x: Tensor, budgets: Sequence[int]) -> None:
    """Print RayS and each HopSkipJump at every budget."""
    with torch.no_grad():
        y = network(x).argmax(1)
    ours = measured(by_rays, network, x, y, budgets)
    for budget, found in ours.items():
        print(f"{'RayS':<20} {budget:>6} queries a sample, median linf {float(found.median()):.4f}", flush=True)
    for name, run, way in (("ART", by_art, one_by_one), ("Foolbox", by_foolbox, measured)):
        for budget, found in way(run, network, x, y, budgets).items():
            nearer = int((ours[budget] < found).sum())
            median = f"median linf {float(found.median()):.4f}"
            title = f"{name} HopSkipJump"
            print(
                f"{title:<20} {budget:>6} queries a sample, {median}, RayS nearer on {nearer} of {len(x)}", flush=True
            )


def main() -> None:
    """Print a line for each attack and budget."""
    options = parser(__doc__)
    options.add_argument("--queries", type=int, nargs="+", default=[500, 1000, 2000], help="budgets a sample")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    network, inputs = load(arguments)
    compare(network.eval(), inputs, sorted(arguments.queries))


if __name__ == "__main__":
    main()
