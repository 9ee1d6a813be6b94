"""What the tests of wrapped attacks share: small networks, images, runs, a recorder, and which libraries there are."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry.base import AttackListing, adapters

LIBRARIES = ("adv_lib", "art", "foolbox", "torchattacks")
UNIT = (0.0, 1.0)


def require(library: str) -> Any:
    """The library, as the adapter imports it; the module that calls this is skipped where it is not installed."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)
    return getattr(import_module(f"robust_ext.adapters.{library}.library"), library)


def usable(library: str) -> list[AttackListing]:
    """The attacks of a library that can be used; none where it is not installed."""
    if find_spec(library) is None:
        return []
    return [listing for listing in adapters()[library].list_attacks() if not listing.reason]


def cases(listings: Iterable[AttackListing], library: str) -> list[Any]:
    """Parameters of a test of every attack, skipped where its packages are missing."""
    params = []
    for listing in listings:
        missing = [package for package in listing.traits.packages if find_spec(package) is None]
        marks = [pytest.mark.skip(reason=f"{listing.name} needs {' and '.join(missing)}")] if missing else []
        params.append(pytest.param(library, listing, id=f"{library}:{listing.name}", marks=marks))
    return params


def conv_network(shape: tuple[int, int, int], classes: int = 5) -> nn.Sequential:
    """A small convolutional network, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = 4 * (shape[1] - 2) * (shape[2] - 2)
        layers = nn.Conv2d(shape[0], 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(values, classes)
        return nn.Sequential(*layers).eval()


def uniform(count: int, shape: tuple[int, ...], bounds: tuple[float, float] = UNIT) -> Tensor:
    """Inputs drawn from all of the bounds."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]


def predicted(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        labels: Tensor = module(x).argmax(1)
    return labels


def drawn_seed(seed: int = 3) -> int:
    """The seed that an attack of global randomness draws first."""
    return draw_seed(torch.Generator().manual_seed(seed))


def run(
    attack: Attack,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    threat_model: ThreatModel,
    *,
    classes: int = 5,
    seed: int = 3,
    direct: bool = True,
) -> Tensor:
    """Candidates of an attack, by its ``search`` or by :func:`run_attack`."""
    target = Target(
        module=module,
        bounds=threat_model.bounds,
        classes=classes,
        input_shape=tuple(x.shape[1:]),
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    if direct:
        return attack.search(target, x, y, threat_model=threat_model, generator=generator)
    return run_attack(attack, target, x, y, threat_model=threat_model, generator=generator)


class Recorder(nn.Module):
    """A module that records its queries."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.queries: list[Tensor] = []
        self.training = module.training

    @property
    def sizes(self) -> list[int]:
        return [len(x) for x in self.queries]

    def forward(self, x: Tensor) -> Tensor:
        self.queries.append(x.detach().clone())
        out: Tensor = self.module(x)
        return out


class Stretched(nn.Module):
    """A network of inputs in other bounds, as one of inputs in [0, 1]."""

    def __init__(self, module: nn.Module, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.module, self.low, self.width = module, bounds[0], bounds[1] - bounds[0]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x.float() * self.width + self.low)
        return out


class AsItIs:
    """In place of the unit space: nothing is stretched."""

    def __init__(self, target: Target, threat_model: ThreatModel) -> None:
        self.target, self.threat_model = target, threat_model

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        return candidates
