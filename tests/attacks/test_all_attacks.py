"""What every attack of this project promises alike: of its settings, candidates, rows, randomness and arguments."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.bpda_attack import BPDAAttack
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.native import NativeAttack, Step
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.settings import SettingInfo, declared, default_of, setting_types
from robust_ext.core.threat import NORMS
from robust_ext.models.defended import Defended
from robust_ext.registry import as_attack
from robust_ext.testing.defenses import Problem, small_defense
from tests.attacks.problems import MADE, attacked

every = pytest.mark.parametrize("made", MADE.values(), ids=MADE)
BLACK_BOX = [name for name, made in MADE.items() if not made.traits.gradients]


def changed(problem: Problem, classifier: nn.Module) -> Problem:
    defended = Defended(classifier, problem.defended.detector)
    target = replace(problem.target, module=classifier, defended=defended)
    return replace(problem, target=target, defended=defended)


def rows_of(problem: Problem, rows: Any) -> Problem:
    """Some rows of a problem, in that order."""
    references = problem.target.references
    assert references is not None
    target = replace(problem.target, references=references[rows])
    return replace(problem, inputs=problem.inputs[rows], labels=problem.labels[rows], target=target)


@every
@pytest.mark.parametrize("norm", NORMS)
def test_candidates_are_allowed_and_layouts_make_no_difference(made: NativeAttack, norm: str) -> None:
    if norm not in made.traits.norms:
        pytest.skip(f"not for {norm}")
    problem = small_defense(5, norm=norm, epsilon={"linf": 0.2, "l2": 0.6, "l1": 1.5}[norm], bounds=(-1.0, 2.0))
    out = attacked(made, problem)
    assert (out.shape, out.dtype, out.requires_grad) == (problem.inputs.shape, torch.float32, False)
    assert -1 <= float(out.min()) <= float(out.max()) <= 2
    if not made.traits.leaves_ball or isinstance(made, LogitMatching):
        assert bool(problem.threat_model.contains(out, problem.inputs).all())
    strided = problem.inputs.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous()
    before = strided.clone()
    assert torch.equal(attacked(made, problem, inputs=strided), out)
    assert torch.equal(strided, before)
    if not isinstance(made, ObjectivePGD):
        assert torch.equal(attacked(made, problem, inputs=problem.inputs.double()), out)


@pytest.mark.parametrize("name", MADE)
def test_a_row_gets_the_same_alone_and_in_any_batch(name: str) -> None:
    problem, made = small_defense(6), MADE[name]
    # Adam divides by roots of small numbers, in which other sums of a batch of another size would show.
    slack = 1e-4 if isinstance(made, CarliniWagnerLinf) else 0
    together = attacked(made, problem)
    for count in (1, 4):
        torch.testing.assert_close(attacked(made, rows_of(problem, slice(count))), together[:count], rtol=0, atol=slack)
    # The last row, among others.
    mixed = rows_of(problem, torch.tensor([4, 3, 2, 1, 0, 5]))
    torch.testing.assert_close(attacked(made, mixed)[5], together[5], rtol=0, atol=slack)
    assert torch.equal(attacked(made, problem), together)
    if made.traits.seeds == "generator" and name != "APGD from the input":
        assert not torch.equal(attacked(made, problem, seed=1), together)


@every
def test_global_randomness_and_arguments_are_left_alone(made: NativeAttack) -> None:
    problem = small_defense(3)
    inputs, references = problem.inputs.clone(), problem.target.references.clone()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    attacked(made, problem)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert torch.equal(problem.inputs, inputs)
    assert torch.equal(problem.target.references, references)


@every
def test_runs_as_other_attacks_do(made: NativeAttack) -> None:
    problem = small_defense(4)
    for parameter in problem.defended.parameters():
        parameter.requires_grad_(True)
    out = run_attack(
        made,
        problem.target,
        problem.inputs,
        problem.labels,
        threat_model=problem.threat_model,
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(out, attacked(made, problem))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in problem.defended.parameters())


@every
def test_watched_steps_are_numbered_and_of_the_batch(made: NativeAttack) -> None:
    problem, seen = small_defense(4), list[Step]()
    attacked(made, problem, watch=seen.append)
    assert [step.number for step in seen] == list(range(len(seen)))
    assert len(seen) <= seen[0].total == seen[-1].total
    assert all(step.points.shape == problem.inputs.shape and step.loss.shape == (4,) for step in seen)
    assert all(step.gradient is None or step.gradient.shape == problem.inputs.shape for step in seen)
    if not made.traits.leaves_ball:
        assert all(bool(problem.threat_model.contains(step.points, problem.inputs).all()) for step in seen)


@every
def test_no_rows(made: NativeAttack) -> None:
    queries: list[int] = []
    problem = rows_of(small_defense(2), slice(0, 0))
    problem.defended.classifier.register_forward_hook(lambda *_: queries.append(1))
    assert attacked(made, problem).shape == (0, 1, 3, 4)
    assert not queries


@every
def test_wrong_inputs_and_labels_are_refused(made: NativeAttack) -> None:
    problem = small_defense(2)
    if isinstance(made, ObjectivePGD):
        pytest.skip("takes inputs as they are, in any precision")
    with pytest.raises(InvalidArgumentError, match="labels"):
        attacked(made, problem, labels=problem.labels + 4)
    with pytest.raises(InvalidArgumentError, match="labels"):
        attacked(made, problem, labels=problem.labels[:1])
    with pytest.raises(InvalidArgumentError, match="bounds"):
        attacked(made, problem, inputs=problem.inputs + 1)


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_no_success(made: NativeAttack, bad: float) -> None:
    class Mute(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return problem.defended.classifier(x) * torch.tensor([1.0, bad, bad, 1.0])

    problem = small_defense(3)
    out = attacked(made, changed(problem, Mute()))
    if math.isnan(bad) and not isinstance(made, ObjectivePGD):
        assert torch.equal(out, problem.inputs)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", [name for name in MADE if name not in BLACK_BOX])
def test_classifiers_without_gradients_are_refused(name: str) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4].detach()

    with pytest.raises(AttackError, match=r"gives no gradients; .*BPDA"):
        attacked(MADE[name], changed(small_defense(3), Steps()))


@pytest.mark.parametrize("name", BLACK_BOX)
def test_modules_that_work_on_their_input_in_place(name: str) -> None:
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            logits: Tensor = problem.defended.classifier(x)
            x.zero_()
            return logits

    problem = small_defense(4)
    assert torch.equal(attacked(MADE[name], changed(problem, Shifts())), attacked(MADE[name], problem))


@pytest.mark.parametrize(("name", "instead"), [("Square", "RandomSearch"), ("Spatial grid", "notion of pixels")])
def test_inputs_that_are_no_images_are_refused_with_what_to_do(name: str, instead: str) -> None:
    problem = small_defense(2, shape=(12,))
    with pytest.raises(AttackRefusedError, match=rf"images \(N, C, H, W\).*\(2, 12\); reshape .*{instead}"):
        attacked(MADE[name], problem)


def test_each_is_built_by_name_and_named() -> None:
    for attack_class in ATTACKS:
        built = as_attack(f"robust_ext:{attack_class.__name__}()")
        assert isinstance(built, attack_class)
        assert built.named("mine").name == "mine"
        assert built.traits.minimum_norm == attack_class.traits.minimum_norm
        assert built.description == attack_class().description == repr(attack_class())


# ---- Settings.

REQUIRED: dict[type, dict[str, Any]] = {
    Transfer: {"surrogates": {"a": nn.Identity()}},
    BPDAAttack: {"attack": APGD()},
}
SETTINGS = [
    pytest.param(each, name, info, id=f"{each.__name__} {name}")
    for each in (*ATTACKS, Transfer, BPDAAttack)
    for name, info in declared(each).items()
]


def outside(kinds: set[Any], info: SettingInfo) -> list[Any]:
    """Values that are not accepted, those just outside of the range among them."""
    if bool in kinds:
        return [1, "yes"]
    if info.choices is not None:
        return ["nonsense", 3]
    numeric = kinds & {int, float}
    step: float = 1 if int in kinds else 1e-9
    values: list[Any] = [math.nan, math.inf, "8", True] if numeric else []
    if int in kinds:
        values += [1.5]
    for end, sign in ((info.minimum, -1), (info.maximum, 1)):
        values += [] if end is None else [end + sign * step]
    return values + [end for end in (info.above, info.below) if end is not None]


def kinds_of(attack_class: type, name: str) -> set[Any]:
    kind = setting_types(attack_class)[name]
    return set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}


@pytest.mark.parametrize(("attack_class", "name", "info"), SETTINGS)
def test_values_outside_what_is_declared_are_refused_by_name(attack_class: Any, name: str, info: SettingInfo) -> None:
    assert info.help
    required = REQUIRED.get(attack_class, {})
    for value in outside(kinds_of(attack_class, name), info):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*expected "):
            attack_class(**{**required, name: value})


@pytest.mark.parametrize(("attack_class", "name", "info"), SETTINGS)
def test_the_description_differs_for_all_settings(attack_class: Any, name: str, info: SettingInfo) -> None:
    kinds, default = kinds_of(attack_class, name), default_of(attack_class, name)
    if not kinds & {bool, int, float, str} or info.check is not None or default is dataclasses.MISSING:
        pytest.skip("no plain value")
    plain = attack_class(**REQUIRED.get(attack_class, {}))
    if info.choices is not None:
        other = next(choice for choice in info.choices if choice != getattr(plain, name))
    elif bool in kinds:
        other = not default
    else:
        # An even step, as some numbers have to be odd; the trial value of large ones may be below others.
        other = 7 if default is None else default + 2 if int in kinds else default * 0.9 if default else 1e-4
    made = attack_class(**{**REQUIRED.get(attack_class, {}), name: other})
    assert made.description != plain.description
    assert made.description == replace(plain, **{name: other}).description


@pytest.mark.parametrize(
    ("attack_class", "chosen", "message"),
    [
        (ObjectivePGD, {"algorithm": "fgsm", "steps": 2}, "steps: got 2, expected 1, or nothing, for FGSM"),
        (CarliniWagnerLinf, {"largest_const": 1e-6}, "largest_const: got 1e-06, expected at least initial_const"),
        (
            SpatialTransformation,
            {"translation_steps": 4},
            "translation_steps: got 4, expected an odd integer, as 3",
        ),
        (SpatialTransformation, {"rotation_steps": 30}, "rotation_steps: got 30, expected an odd integer"),
        (FeatureMatching, {"features": 3}, "features: got 3, expected names of layers"),
        (FeatureMatching, {"features": []}, "features: got "),
        (FeatureMatching, {"features": ["1", 2]}, "features: got "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(attack_class: Any, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        attack_class(**chosen)
