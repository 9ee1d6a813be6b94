"""Through the adapter, ART's attacks return what they return when ART is called, and ask as often."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.base import draw_seed
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.registry.model import as_module

library = pytest.importorskip("robust_ext.adapters.art.library", reason="ART is not installed")
evasion = library.art.attacks.evasion
entries = importlib.import_module("robust_ext.adapters.art.entries")

CLASSES = 5
SHAPE = (1, 10, 10)
DESCENT = {"max_iter": 4, "eps_step": 0.05, "batch_size": 6}
AUTO = {"max_iter": 4, "eps_step": 0.2, "nb_random_init": 1, "batch_size": 6}
IN_ANY_BOUNDS = [
    ("FastGradientMethod", "linf", {"eps_step": 0.1, "batch_size": 6}),
    ("BasicIterativeMethod", "linf", DESCENT),
    ("MomentumIterativeMethod", "l2", DESCENT),
    ("ProjectedGradientDescent", "linf", {**DESCENT, "num_random_init": 2}),
    ("ProjectedGradientDescentNumpy", "l2", DESCENT),
    ("ProjectedGradientDescentPyTorch", "l1", DESCENT),
    ("AutoProjectedGradientDescent", "linf", AUTO),
    ("AutoConjugateGradient", "l2", AUTO),
    ("RescalingAutoConjugateGradient", "l2", AUTO),
    ("SquareAttack", "linf", {"max_iter": 10}),
]
IN_UNIT_BOUNDS = [
    ("DeepFool", "l2", {"max_iter": 10, "batch_size": 6}),
    ("CarliniL2Method", "l2", {"max_iter": 5, "binary_search_steps": 2, "initial_const": 10.0, "batch_size": 6}),
    ("CarliniL0Method", "l1", {"max_iter": 3, "binary_search_steps": 2, "initial_const": 10.0, "batch_size": 6}),
    ("ElasticNet", "l2", {"max_iter": 10, "binary_search_steps": 2, "initial_const": 1.0, "batch_size": 6}),
]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, CLASSES)).eval()


def classifier(bounds: tuple[float, float]) -> Any:
    return library.art.estimators.classification.PyTorchClassifier(
        model=network(),
        loss=nn.CrossEntropyLoss(),
        input_shape=SHAPE,
        nb_classes=CLASSES,
        clip_values=bounds,
        preprocessing=(np.array([0.3]), np.array([0.7])),
        device_type="cpu",
    )


def batch(bounds: tuple[float, float]) -> Tensor:
    return torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "norm", "settings", "bounds"),
    [(*case, bounds) for case in IN_ANY_BOUNDS for bounds in ((0.0, 1.0), (-1.0, 1.0))]
    + [(*case, (0.0, 1.0)) for case in IN_UNIT_BOUNDS],
)
def test_a_users_classifier_is_attacked_as_art_attacks_it(
    name: str, norm: str, settings: dict[str, Any], bounds: tuple[float, float]
) -> None:
    # ART runs the mean and deviation of its PyTorch classifiers in torch, as the module here does: bit for bit.
    epsilon = {"linf": 0.2, "l2": 1.0, "l1": 5.0}[norm]
    adapted, x = as_module(classifier(bounds)), batch(bounds)
    with torch.no_grad():
        y = adapted.module(x).argmax(1)
    assert adapted.bounds == bounds
    target = Target(
        module=adapted.module, bounds=bounds, classes=CLASSES, input_shape=SHAPE, device=torch.device("cpu")
    )
    candidates = as_attack((getattr(evasion, name), settings)).search(
        target,
        x,
        y,
        threat_model=ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds),
        generator=torch.Generator().manual_seed(3),
    )
    attack_class = getattr(evasion, name)
    wanted = {"eps": epsilon, "norm": {"linf": np.inf, "l2": 2, "l1": 1}[norm], "verbose": False}
    accepted = inspect.signature(attack_class).parameters
    given = {key: value for key, value in wanted.items() if key in accepted}
    with seeded_globals(draw_seed(torch.Generator().manual_seed(3))):
        expected = torch.from_numpy(
            attack_class(classifier(bounds), **given, **settings).generate(x.numpy(), y.numpy())
        )
    if entries.ENTRIES[name].traits.failure == "start":
        with torch.no_grad():
            failed = adapted.module(expected).argmax(1) == y
        assert not bool(failed.all())
        expected[failed] = x[failed]
    assert not torch.equal(candidates, x)
    assert torch.equal(candidates, expected)


@pytest.mark.parametrize(
    ("text", "norm", "forward", "backward"),
    [
        # One gradient a step; then ART looks at the inputs and at the candidates once, to log how many succeeded.
        ("art:ProjectedGradientDescent(max_iter=7)", "linf", 7 + 2, 7),
        # A look and the gradients of all classes at the inputs, and again after each step.
        ("art:DeepFool(max_iter=4)", "l2", 2 * (1 + 4), CLASSES * (1 + 4)),
        # Of the inputs: what is still robust, its loss, and the loss of the stripes; then the same three a step.
        ("art:SquareAttack(max_iter=6)", "linf", 3 + 3 * 6, 0),
    ],
)
def test_queries_are_counted_as_by_hand(text: str, norm: str, forward: int, backward: int) -> None:
    counter = PassCounter()
    module, x = Counted(network(), counter).eval(), batch((0.0, 1.0))
    y = network()(x).argmax(1)
    target = Target(module=module, bounds=(0.0, 1.0), classes=CLASSES, input_shape=SHAPE, device=torch.device("cpu"))
    # So small that nothing is found, and every row goes all the way.
    threat_model = ThreatModel(norm=norm, epsilon=1e-4)
    attack = as_attack(text)
    if text.startswith("art:DeepFool"):
        # One class far above all others: no step of a linear model of it arrives in four.
        module.module = nn.Sequential(network(), Top())
        y = torch.zeros(6, dtype=torch.int64)
    attack.search(target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(3))
    assert counter == PassCounter(6 * forward, 6 * backward)


class Top(nn.Module):
    """Class 0 is above all others by more than any step makes up for."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits + 1e3 * nn.functional.one_hot(torch.zeros(len(logits), dtype=torch.int64), CLASSES)
