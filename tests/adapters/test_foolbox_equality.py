"""On an ordinary classifier the adapter returns what Foolbox returns, to the bit, and asks as often as it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.base import draw_seed
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.registry.model import as_module

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
# Foolbox warns when it is imported; the adapter's import keeps that warning away, which is narrower than a filter here.
from robust_ext.adapters.foolbox.library import foolbox

SHAPE = (1, 8, 8)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("linf", "LinfPGD", {"steps": 5}),
    ("l2", "L2PGD", {"steps": 5}),
    ("l1", "L1PGD", {"steps": 5}),
    ("linf", "LinfAdamPGD", {"steps": 5}),
    ("linf", "MIFGSM", {"steps": 5}),
    ("linf", "FGSM", {}),
    ("l1", "SparseL1DescentAttack", {"steps": 5}),
    ("l2", "VirtualAdversarialAttack", {"steps": 2, "xi": 0.01}),
    ("l2", "L2ClippingAwareRepeatedAdditiveGaussianNoiseAttack", {"repeats": 10}),
    ("l2", "DDNAttack", {"steps": 10}),
    ("l2", "L2DeepFoolAttack", {"steps": 10}),
    ("linf", "LinfDeepFoolAttack", {"steps": 10}),
    ("l2", "NewtonFoolAttack", {"steps": 20}),
    ("linf", "LInfFMNAttack", {"steps": 20}),
    ("l1", "L0FMNAttack", {"steps": 20}),
    ("l2", "L2CarliniWagnerAttack", {"steps": 40, "binary_search_steps": 3, "initial_const": 10.0}),
    ("l1", "EADAttack", {"steps": 40, "binary_search_steps": 3, "initial_const": 10.0}),
    ("l2", "BoundaryAttack", {"steps": 20}),
    ("linf", "PointwiseAttack", {"l2_binary_search": False}),
    ("l2", "SaltAndPepperNoiseAttack", {"steps": 50}),
    ("linf", "LinearSearchBlendedUniformNoiseAttack", {"steps": 20}),
    ("l1", "GaussianBlurAttack", {"steps": 10}),
    ("l2", "SpatialAttack", {"num_translations": 2, "num_rotations": 3}),
]


class Balanced(nn.Module):
    """Three classes by one score, so that noise and inputs fall on either side."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        score = self.network(x)[:, 0]
        return torch.stack([score, -score, score * 0.1 - 0.3], 1)


def foolbox_model(bounds: tuple[float, float]) -> Any:
    """A model with preprocessing, and its threshold in the middle of what it says of noise."""
    module = Balanced()
    preprocessing = {"mean": [0.4], "std": [0.6], "axis": -3}
    model = foolbox.PyTorchModel(module, bounds=bounds, device="cpu", preprocessing=preprocessing)
    noise = torch.rand(200, *SHAPE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        scores = module.network((noise * (bounds[1] - bounds[0]) + bounds[0] - 0.4) / 0.6)
        module.network[3].bias -= scores.median()  # type: ignore[operator,union-attr]
    return model


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)], ids=str)
@pytest.mark.parametrize(("norm", "name", "settings"), CASES, ids=[name for _, name, _ in CASES])
def test_results_are_foolboxs_own(bounds: tuple[float, float], norm: str, name: str, settings: dict[str, Any]) -> None:
    drawn = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    x = drawn * (bounds[1] - bounds[0]) + bounds[0]
    model = foolbox_model(bounds)
    labels = model(x).argmax(1)
    threat_model = ThreatModel(norm=norm, epsilon={"linf": 0.125, "l2": 1.0, "l1": 4.0}[norm], bounds=bounds)
    attack = as_attack((getattr(foolbox.attacks, name), settings))
    module = as_module(model).module
    target = Target(module=module, bounds=bounds, classes=3, input_shape=SHAPE, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    candidates = attack.search(target, x, labels, threat_model=threat_model, generator=generator)
    with seeded_globals(draw_seed(torch.Generator().manual_seed(3))):
        own = getattr(foolbox.attacks, name)(**settings)
        if getattr(own, "_distance", 0) is None or name == "PointwiseAttack":
            own._distance = getattr(foolbox.distances, norm)
        epsilons = None if attack.traits.minimum_norm else threat_model.epsilon
        with pytest.MonkeyPatch.context() as patched:
            # It warns once a process, whoever comes first.
            original = torch.meshgrid
            patched.setattr(torch, "meshgrid", lambda *a, **k: original(*a, **{"indexing": "ij", **k}))
            expected = own(model, x, labels, epsilons=epsilons)[1]
    assert torch.equal(candidates, expected)
    assert not torch.equal(candidates, x)


class Mean(nn.Module):
    """Class 0 where the mean is below .3."""

    def forward(self, x: Tensor) -> Tensor:
        along = 10 * (x.flatten(1).mean(1) - 0.3)
        return torch.stack([-along, along], 1)


def count(name: str, settings: dict[str, Any], norm: str, x: Tensor) -> PassCounter:
    counter = PassCounter()
    module = Counted(Mean(), counter).eval()
    target = Target(
        module=module, bounds=(0.0, 1.0), classes=2, input_shape=SHAPE, device=torch.device("cpu"), counter=counter
    )
    as_attack((getattr(foolbox.attacks, name), settings)).search(
        target,
        x,
        torch.zeros(len(x), dtype=torch.int64),
        threat_model=ThreatModel(norm=norm, epsilon=0.1),
        generator=torch.Generator().manual_seed(3),
    )
    return counter


def test_pgd_asks_once_a_step_and_once_for_its_success() -> None:
    spent = count("LinfPGD", {"steps": 7}, "linf", torch.full((3, *SHAPE), 0.1))
    assert (spent.forward, spent.backward) == (3 * (7 + 1), 3 * 7)


def test_ddn_asks_once_a_step_and_once_for_its_success() -> None:
    spent = count("DDNAttack", {"steps": 5}, "l2", torch.full((3, *SHAPE), 0.1))
    assert (spent.forward, spent.backward) == (3 * (5 + 1), 3 * 5)


def test_deepfool_asks_for_candidates_then_once_a_step() -> None:
    """A linear model of two classes: one step crosses the boundary, the next sees that all rows are through."""
    spent = count("L2DeepFoolAttack", {"steps": 10}, "l2", torch.full((3, *SHAPE), 0.1))
    assert (spent.forward, spent.backward) == (3 * (1 + 2 + 1), 3 * 2)


def test_boundary_asks_for_its_start_then_once_a_step() -> None:
    x = torch.full((3, *SHAPE), 0.1)
    with seeded_globals(draw_seed(torch.Generator().manual_seed(3))):
        noise = torch.rand(x.shape)
    # The first noise is of class 1 in all rows; it is blended in by steps of 1/50 until all rows cross .3.
    assert bool((noise.flatten(1).mean(1) > 0.3).all())
    shares = torch.arange(51) / 50
    crossed = ((1 - shares) * 0.1 + shares * noise.flatten(1).mean(1)[:, None] > 0.3).all(0)
    blends = int(crossed.int().argmax()) + 1
    # Then the adapter and Foolbox each check the start, and every tenth of 20 steps asks twice.
    spent = count("BoundaryAttack", {"steps": 20}, "l2", x)
    assert (spent.forward, spent.backward) == (3 * (1 + blends + 1 + 1 + 20 + 2 + 1), 0)
