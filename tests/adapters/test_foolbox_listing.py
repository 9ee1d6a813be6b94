"""Every class of Foolbox that is listed as usable, run, and what the listing says of it measured anew."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.running import run_attack
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry.base import AttackListing, adapters

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
# Foolbox warns when it is imported; the adapter's import keeps that warning away, which is narrower than a filter here.
import eagerpy as ep

from robust_ext.adapters.foolbox.library import foolbox

EPSILONS = {"linf": 0.1, "l2": 0.8, "l1": 4.0}
SHAPE = (1, 8, 8)
POOL = torch.rand(22, *SHAPE, generator=torch.Generator().manual_seed(5))
LISTED = [entry for entry in adapters()["foolbox"].list_attacks() if not entry.reason]
Uncompiled = pytest.mark.usefixtures("uncompiled_brendel_bethge")


def cases(entries: Sequence[AttackListing]) -> list[Any]:
    return [pytest.param(entry, id=entry.name) for entry in entries]


class Heads(nn.Module):
    """Two classes, with a head of its own for each position of a batch; records what it is asked."""

    def __init__(self, positions: Sequence[int] = range(4)) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8))
            self.heads = nn.Parameter(torch.randn(len(POOL), 8)[list(positions)])
        with torch.no_grad():
            self.offsets = (self.network(POOL[list(positions)]) * self.heads).sum(1) + 0.1
        self.asked: list[Tensor] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        assert len(x) == len(self.heads)
        along = (self.network(x) * self.heads).sum(1) - self.offsets
        return torch.stack([-along, along], 1)


class Never(nn.Module):
    """Class 0 everywhere, with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1).mean(1)
        return torch.stack([score + 5, score * 0.5], 1)


def images(bounds: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    return POOL[:4] * (bounds[1] - bounds[0]) + bounds[0]


def ordinary(classes: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, classes)).eval()


def attack(
    entry: AttackListing,
    module: nn.Module,
    x: Tensor,
    labels: Tensor,
    *,
    classes: int = 2,
    bounds: tuple[float, float] = (0.0, 1.0),
    seed: int = 7,
) -> Tensor:
    norm = entry.traits.norms[0]
    return run_attack(
        adapters()["foolbox"].build_attack(entry.name, dict(entry.trial), name=entry.name),
        Target(module=module, bounds=bounds, classes=classes, input_shape=SHAPE, device=torch.device("cpu")),
        x,
        labels,
        threat_model=ThreatModel(norm=norm, epsilon=EPSILONS[norm] * (bounds[1] - bounds[0]), bounds=bounds),
        generator=torch.Generator().manual_seed(seed),
    )


def zeros(rows: int = 4) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


@contextmanager
def same_noise_for_all_rows() -> Iterator[None]:
    """Draw noise for one row and repeat it, so that a row's noise does not depend on how many rows there are."""
    originals = {name: getattr(ep.PyTorchTensor, name) for name in ("uniform", "normal")}

    def repeated(original: Any) -> Any:
        def draw(self: Any, shape: Any, *args: Any, **settings: Any) -> Any:
            if not isinstance(shape, (tuple, list)) or len(shape) < 2 or shape[0] != len(self):
                return original(self, shape, *args, **settings)
            one = original(self, (1, *shape[1:]), *args, **settings)
            return ep.astensor(one.raw.expand(*shape).clone())

        return draw

    with pytest.MonkeyPatch.context() as patched:
        for name, original in originals.items():
            patched.setattr(ep.PyTorchTensor, name, repeated(original))
        yield


def test_at_least_56_of_58_classes_run() -> None:
    classes = {
        member.__name__
        for _, member in inspect.getmembers(foolbox.attacks, inspect.isclass)
        if issubclass(member, foolbox.attacks.base.Attack) and member is not foolbox.attacks.base.Attack
    }
    listed = adapters()["foolbox"].list_attacks()
    assert {entry.name for entry in listed} == classes
    assert len(LISTED) >= 56
    assert len(classes) == 58
    assert {entry.name: entry.reason for entry in listed if entry.reason}.keys() == {"DatasetAttack"}
    aliases = {alias for entry in listed for alias in entry.aliases}
    assert {"PGD", "LinfPGD", "FGSM", "FGM", "MIFGSM"} <= aliases


@pytest.mark.parametrize("entry", cases(LISTED))
def test_the_listing_agrees_with_foolbox_and_with_what_is_built(
    entry: AttackListing, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = getattr(foolbox.attacks, entry.name)
    if entry.traits.packages:
        monkeypatch.setattr(cls, "instantiate_optimizer", lambda self: None)
    built = adapters()["foolbox"].build_attack(entry.name, dict(entry.trial), name="x")
    assert built.traits == entry.traits
    fixed = issubclass(cls, foolbox.attacks.base.FixedEpsilonAttack)
    assert entry.traits.minimum_norm != fixed
    distance = getattr(built.attack, "distance", None) if "Flexible" not in str(cls.__mro__) else None  # type: ignore[attr-defined]
    if distance is not None and entry.name != "HopSkipJumpAttack":
        assert entry.traits.norms == ({0: "l1", 1: "l1", 2: "l2"}.get(distance.p, "linf"),)
    assert entry.traits.batching == "full"
    assert "at 0x" not in built.description


@Uncompiled
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)], ids=str)
@pytest.mark.parametrize("entry", cases(LISTED))
def test_every_class_runs_on_an_ordinary_classifier(entry: AttackListing, bounds: tuple[float, float]) -> None:
    """The same seed gives the same candidates; the caller's random state and the network are left as they were."""
    x, module = images(bounds), ordinary()
    labels = module(x).argmax(1)
    sentinels = [torch.full_like(parameter, 3.0) for parameter in module.parameters()]
    for parameter, sentinel in zip(module.parameters(), sentinels, strict=True):
        parameter.grad = sentinel.clone()
    before, states = x.clone(), (torch.random.get_rng_state(), np.random.get_state()[1].copy())  # type: ignore[index,union-attr]
    first = attack(entry, module, x, labels, classes=3, bounds=bounds)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]
    assert torch.equal(x, before)
    for parameter, sentinel in zip(module.parameters(), sentinels, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, sentinel)
        assert parameter.requires_grad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(attack(entry, module, x, labels, classes=3, bounds=bounds), first)
    assert (first.shape, first.dtype) == (x.shape, torch.float32)
    slack = 1e-5 * (bounds[1] - bounds[0])
    assert bool(((first >= bounds[0] - slack) & (first <= bounds[1] + slack)).all())
    if entry.traits.failure in ("last", "best"):
        assert not torch.equal(first, x)


@Uncompiled
@pytest.mark.parametrize("entry", cases([entry for entry in LISTED if entry.traits.seeds == "none"]))
def test_what_draws_nothing_is_the_same_under_any_seed(entry: AttackListing) -> None:
    first, second = (attack(entry, Heads(), images(), zeros(), seed=seed) for seed in (1, 2))
    assert torch.equal(first, second)


@Uncompiled
@pytest.mark.parametrize("entry", cases(LISTED))
def test_ordered_means_whole_batches_in_row_order(entry: AttackListing) -> None:
    """With a head for each position, rows attacked alone get what they get together, where they do not interact."""
    together = Heads()
    with same_noise_for_all_rows():
        candidates = attack(entry, together, images(), zeros())
        assert {len(asked) for asked in together.asked} == {4}
        if entry.traits.batch_dependent:
            return
        for row in range(4):
            alone = attack(entry, Heads([row]), images()[[row]], zeros(1))
            torch.testing.assert_close(alone[0], candidates[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "entry",
    cases([e for e in LISTED if e.name in ("BoundaryAttack", "HopSkipJumpAttack", "L2CarliniWagnerAttack")]),
)
def test_coupled_means_that_other_rows_change_a_result(entry: AttackListing) -> None:
    if entry.name == "L2CarliniWagnerAttack":
        # It shows once the summed loss stops a search early.
        entry = replace(entry, trial={**entry.trial, "steps": 80, "binary_search_steps": 6})

    def first_row(others: Sequence[int]) -> Tensor:
        positions = [0, *others]
        return attack(entry, Heads(positions), POOL[positions], zeros())[0]

    results = [first_row(range(start, start + 3)) for start in range(1, 19, 3)]
    assert not all(torch.equal(result, results[0]) for result in results)


@Uncompiled
@pytest.mark.parametrize("entry", cases([entry for entry in LISTED if not entry.traits.leaves_ball]))
def test_what_stays_inside_queries_no_point_outside(entry: AttackListing) -> None:
    """Fixed epsilon: beyond epsilon. Minimum norm: beyond the distance of the result."""
    norm = entry.traits.norms[0]
    threat_model, module, x = ThreatModel(norm=norm, epsilon=EPSILONS[norm]), Heads(), images()
    candidates = attack(entry, module, x, zeros())
    limits = torch.full((4,), EPSILONS[norm], dtype=torch.float64)
    if entry.traits.minimum_norm:
        limits = threat_model.distance(candidates, x)
    for asked in module.asked:
        assert bool((threat_model.distance(asked, x) <= limits * (1 + 1e-5) + 1e-6).all())


@Uncompiled
@pytest.mark.parametrize(
    "entry", cases([entry for entry in LISTED if entry.traits.failure in ("input", "zeros", "raises")])
)
def test_rows_that_fail_come_back_as_their_inputs(entry: AttackListing) -> None:
    assert torch.equal(attack(entry, Never().eval(), images(), zeros()), images())


class _Downhill:
    """Stands in for Brendel-Bethge's compiled optimizer: a step along the boundary's normal, in the ball and box."""

    def solve(self, x0: Any, x: Any, b: Any, low: float, high: float, c: float, r: float) -> Any:
        step = b * c / (b @ b + 1e-12)
        return np.clip(x + step * min(1.0, r / (np.linalg.norm(step) + 1e-12)), low, high) - x


@pytest.mark.parametrize("entry", cases([e for e in LISTED if e.traits.packages]))
def test_brendel_bethge_without_its_compiler(entry: AttackListing, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the optimizer itself: rows that cannot be started do not lose the others, and runs repeat."""
    cls = getattr(foolbox.attacks, entry.name)
    monkeypatch.setattr(cls, "instantiate_optimizer", lambda self: _Downhill())
    module = Heads()
    module.offsets[0] += 1000.0
    first = attack(entry, module, images(), zeros())
    assert torch.equal(first[0], images()[0])
    assert module(first).argmax(1).tolist() == [0, 1, 1, 1]
    assert torch.equal(attack(entry, module, images(), zeros()), first)
    assert {len(asked) for asked in module.asked} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("entry", cases([entry for entry in LISTED if entry.name == "L2BrendelBethgeAttack"]))
def test_brendel_bethge_compiled_is_what_its_python_is(entry: AttackListing, request: pytest.FixtureRequest) -> None:
    """The optimizer that numba compiles and the one that the other tests run find the same points."""
    x, module = images(), ordinary()
    compiled = attack(entry, module, x, module(x).argmax(1), classes=3)
    request.getfixturevalue("uncompiled_brendel_bethge")
    assert not torch.equal(compiled, x)
    torch.testing.assert_close(attack(entry, module, x, module(x).argmax(1), classes=3), compiled, rtol=0, atol=1e-5)
