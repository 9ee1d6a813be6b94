"""Every attack of ART that takes an image classifier: it runs, repeats itself, and is what its entry says."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry.base import AttackListing, adapters

library = pytest.importorskip("robust_ext.adapters.art.library", reason="ART is not installed")
evasion = library.art.attacks.evasion
entries = importlib.import_module("robust_ext.adapters.art.entries")
catalogue = importlib.import_module("robust_ext.adapters.art.catalogue")

pytestmark = pytest.mark.usefixtures("uncompiled_brendel_bethge")

EPSILON = {"linf": 0.1, "l2": 0.5, "l1": 3.0}
UNIT = (0.0, 1.0)


def usable() -> list[Any]:
    marked = []
    for name in entries.ENTRIES:
        missing = [p for p in entries.ENTRIES[name].traits.packages if importlib.util.find_spec(p) is None]
        marks = [pytest.mark.skip(reason=f"{name} needs {' and '.join(missing)}")] if missing else []
        marked.append(pytest.param(name, marks=marks))
    return marked


EachUsable = pytest.mark.parametrize("name", usable())


class Inner(nn.Module):
    """A small network of images in any bounds: the same problem, stretched."""

    def __init__(self, channels: int, classes: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.bounds = bounds
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 6 * 6, classes)
            )

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        out: Tensor = self.layers((x - low) / (high - low))
        return out


class Recorded(nn.Module):
    """Notes for each query how many rows it has, which input each row is nearest to, and how far away."""

    def __init__(self, module: nn.Module, inputs: Tensor, threat_model: ThreatModel) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs
        self.threat_model = threat_model
        self.nearest: list[Tensor] = []
        self.distances: list[Tensor] = []
        self.clear: list[Tensor] = []
        self.asked_gradient = False
        flat = inputs.flatten(1).double()
        self.half = torch.cdist(flat, flat).fill_diagonal_(torch.inf).min() / 2

    def forward(self, x: Tensor) -> Tensor:
        points = x.detach().flatten(1).double()
        apart = torch.cdist(points.nan_to_num(), self.inputs.flatten(1).double())
        nearest = apart.argmin(1)
        # Square in l2 sends NaN, which is near to nothing.
        self.clear.append((apart.amin(1) < self.half) & torch.isfinite(points).all(1))
        self.nearest.append(nearest)
        self.distances.append(self.threat_model.distance(x, self.inputs[nearest]).nan_to_num())
        self.asked_gradient |= x.requires_grad
        out: Tensor = self.module(x)
        return out


@dataclass
class Outcome:
    candidates: Tensor
    inputs: Tensor
    labels: Tensor
    module: Recorded
    threat_model: ThreatModel
    found: Tensor = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self.found = self.module.module(self.candidates).argmax(1) != self.labels


def setting(name: str, classes: int, bounds: tuple[float, float]) -> tuple[nn.Module, Tensor, Tensor, ThreatModel]:
    channels = max(entries.ENTRIES[name].channels, 1)
    network = Inner(channels, classes, bounds).eval()
    x = torch.rand(4, channels, 8, 8, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]
    norms = entries.ENTRIES[name].traits.norms
    norm = "l2" if "l2" in norms else norms[0]
    epsilon = EPSILON[norm] * (bounds[1] - bounds[0])
    with torch.no_grad():
        labels = network(x).argmax(1)
    return network, x, labels, ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)


def attacked(name: str, classes: int = 3, bounds: tuple[float, float] = UNIT) -> Outcome:
    network, x, y, threat_model = setting(name, classes, bounds)
    module = Recorded(network, x, threat_model).eval()
    attack = adapters()["art"].build_attack(name, entries.ENTRIES[name].trial, name=name)
    attack.check(threat_model=threat_model)
    target = Target(
        module=module, bounds=bounds, classes=classes, input_shape=tuple(x.shape[1:]), device=torch.device("cpu")
    )
    before = x.clone()
    candidates = run_attack(attack, target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(5))
    assert torch.equal(x, before)
    return Outcome(candidates, x, y, module, threat_model)


once = cache(attacked)


def assert_valid(outcome: Outcome) -> None:
    low, high = outcome.threat_model.bounds
    assert outcome.candidates.shape == outcome.inputs.shape
    assert outcome.candidates.dtype == torch.float32
    assert bool(torch.isfinite(outcome.candidates).all())
    assert low <= float(outcome.candidates.min())
    assert float(outcome.candidates.max()) <= high


def test_every_class_of_art_is_listed_and_used_or_refused_with_a_reason() -> None:
    listed = {entry.name: entry for entry in adapters()["art"].list_attacks()}
    classes = {
        name
        for name, member in inspect.getmembers(evasion, inspect.isclass)
        if issubclass(member, library.art.attacks.EvasionAttack) and member.__name__ == name
    }
    assert set(listed) == classes
    assert set(entries.ENTRIES) | set(catalogue.UNUSABLE) >= classes
    assert not set(entries.ENTRIES) & set(catalogue.UNUSABLE)
    for entry in listed.values():
        assert bool(entry.reason) == (entry.name in catalogue.UNUSABLE)
        assert not entry.reason or "use " in entry.reason


def test_what_is_refused_takes_no_image_classifier_in_pytorch() -> None:
    classifier = library.art.estimators.classification.PyTorchClassifier
    foreign = ("TensorFlow", "video", "object detector", "speech", "tables", "decision trees", "GPy", "programs")

    def accepts(name: str) -> bool:
        requirements = getattr(evasion, name)._estimator_requirements
        options = [part if isinstance(part, tuple) else (part,) for part in requirements]
        return all(any(issubclass(classifier, option) for option in part) for part in options)

    names = [name for name in (*entries.ENTRIES, *catalogue.UNUSABLE) if hasattr(evasion, name)]
    applicable = [name for name in names if accepts(name)]
    assert {name for name in entries.ENTRIES if hasattr(evasion, name)} <= set(applicable)
    for name in set(applicable) - set(entries.ENTRIES):
        assert any(word in catalogue.UNUSABLE[name] for word in foreign), name


@EachUsable
def test_runs_and_repeats_itself_and_leaves_the_global_generators_alone(name: str) -> None:
    first = once(name)
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    random_state = np.random.RandomState
    random.random(), np.random.rand(), torch.rand(1)
    moved = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    second = attacked(name)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    assert_valid(first)
    assert torch.equal(first.candidates, second.candidates)
    assert moved[:2] == after[:2]
    assert torch.equal(moved[2], after[2])
    assert not torch.equal(state[2], after[2])
    assert np.random.RandomState is random_state


@EachUsable
def test_runs_on_two_classes(name: str) -> None:
    assert_valid(attacked(name, classes=2))


@EachUsable
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 255.0)])
def test_the_same_problem_in_other_bounds_is_as_hard(name: str, bounds: tuple[float, float]) -> None:
    # Upstream: DeepFool multiplies its steps by the width of the bounds, Laser and Composite clip to [0, 1], APGD, C&W,
    # ElasticNet, SignOPT, VAT and SimBA take steps of a fixed size, which do nothing in (0, 255).
    unit, outcome = once(name), attacked(name, bounds=bounds)
    assert_valid(outcome)
    width = bounds[1] - bounds[0]
    assert abs(int(unit.found.sum()) - int(outcome.found.sum())) <= 1
    there = float(unit.threat_model.distance(unit.candidates, unit.inputs).mean())
    here = float(outcome.threat_model.distance(outcome.candidates, outcome.inputs).mean()) / width
    assert here == pytest.approx(there, rel=0.5, abs=1e-6)


@EachUsable
def test_queries_are_what_the_entry_says_of_rows_and_gradients(name: str) -> None:
    traits, module = entries.ENTRIES[name].traits, once(name).module
    order = torch.arange(4)
    if traits.batching == "full":
        for nearest, clear in zip(module.nearest, module.clear, strict=True):
            assert len(nearest) == 4
            assert bool((nearest == order)[clear].all())
    elif traits.batching == "single":
        sequence = torch.cat([n[c] for n, c in zip(module.nearest, module.clear, strict=True)])
        assert bool((sequence.diff() >= 0).all())
        assert all(len(set(n[c].tolist())) <= 1 for n, c in zip(module.nearest, module.clear, strict=True))
    else:
        # Readouts are found from the nearest input: each row has to be nearest to the one it belongs to.
        sizes = {len(nearest) for nearest in module.nearest}
        assert sizes <= {1, 2, 3, 4}
        assert all(
            bool((n == order)[c].all()) for n, c in zip(module.nearest, module.clear, strict=True) if len(n) == 4
        )
    if not traits.leaves_ball:
        threat_model = once(name).threat_model
        limit = threat_model.epsilon + threat_model.tolerance(module.inputs[:1].numel())
        assert max(float(distances.max()) for distances in module.distances) <= limit
    assert module.asked_gradient == traits.gradients


class Stubborn(nn.Module):
    """A classifier that always says class 0, by far."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x)
        return logits + 50 * nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 3)


@pytest.mark.parametrize(
    "name", [n for n in entries.ENTRIES if entries.ENTRIES[n].traits.failure in ("input", "start")]
)
def test_rows_on_which_it_fails_come_back_as_they_were(name: str) -> None:
    packages = entries.ENTRIES[name].traits.packages
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip(f"{name} needs {' and '.join(packages)}")
    network, x, _, threat_model = setting(name, 3, UNIT)
    attack = adapters()["art"].build_attack(name, entries.ENTRIES[name].trial, name=name)
    module = Stubborn(network).eval()
    target = Target(module=module, bounds=UNIT, classes=3, input_shape=tuple(x.shape[1:]), device=torch.device("cpu"))
    candidates = run_attack(
        attack,
        target,
        x,
        torch.zeros(4, dtype=torch.int64),
        threat_model=threat_model,
        generator=torch.Generator().manual_seed(5),
    )
    # Threshold and Pixel give the input back by way of 0..255.
    torch.testing.assert_close(candidates, x, rtol=0, atol=1e-6 if name in ("PixelAttack", "ThresholdAttack") else 0)


def test_attacks_for_colours_refuse_grey_images() -> None:
    network, x, y, threat_model = setting("SquareAttack", 3, UNIT)
    target = Target(module=network, bounds=UNIT, classes=3, input_shape=(1, 8, 8), device=torch.device("cpu"))
    attack = adapters()["art"].build_attack("LaserAttack", {}, name="laser")
    with pytest.raises(AttackRefusedError, match=r"shape \(3, height, width\)"):
        run_attack(attack, target, x, y, threat_model=threat_model, generator=torch.Generator())


def test_listings_carry_trial_settings_and_defects() -> None:
    listed: dict[str, AttackListing] = {entry.name: entry for entry in adapters()["art"].list_attacks()}
    assert listed["AutoConjugateGradient"].defect
    assert listed["DeepFool"].defect
    assert {entry.name for entry in listed.values() if entry.channels == 3} == {"LaserAttack"}
    assert listed["ProjectedGradientDescent"].trial == {"max_iter": 5}
