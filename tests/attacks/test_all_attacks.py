"""What every attack of this project promises alike: of its settings, candidates, rows, randomness and arguments."""

import math
import random
import types
import typing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.attacks._common.objectives import DIVERGENCES, OBJECTIVES
from robust_ext.attacks._common.rows import STARTS
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.objective_pgd import ALGORITHMS, PROJECTIONS, ObjectivePGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.running import run_attack
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.settings import declared, setting_types
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.models.defended import Defended
from tests.attacks.defenses import small_defense
from tests.attacks.problems import MADE, Lambda, attacked, in_every_norm, predicted, rowwise_problem, watched

every = pytest.mark.parametrize("made", MADE.values(), ids=MADE)
BLACK_BOX = [name for name, made in MADE.items() if not made.traits.gradients]


def changed(problem, classifier):
    defended = Defended(classifier, problem.defended.detector)
    target = replace(problem.target, module=classifier, defended=defended)
    return replace(problem, target=target, defended=defended)


def rows_of(problem, rows):
    """Some rows of a problem, in that order."""
    target = replace(problem.target, references=problem.target.references[rows])
    return replace(problem, inputs=problem.inputs[rows], labels=problem.labels[rows], target=target)


@in_every_norm
def test_candidates_are_allowed_and_layouts_make_no_difference(name, norm):
    made = MADE[name]
    problem = small_defense(5, norm=norm, epsilon={"linf": 0.2, "l2": 0.6, "l1": 1.5}[norm], bounds=(-1.0, 2.0))
    out = attacked(made, problem)
    assert (out.shape, out.dtype, out.requires_grad) == (problem.inputs.shape, torch.float32, False)
    assert -1 <= float(out.min()) <= float(out.max()) <= 2
    if not made.traits.leaves_ball or isinstance(made, LogitMatching):
        assert bool(problem.threat_model.contains(out, problem.inputs).all())
    strided = problem.inputs.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attacked(made, problem, inputs=strided), out)
    assert torch.equal(strided, problem.inputs)
    if not isinstance(made, ObjectivePGD):
        assert torch.equal(attacked(made, problem, inputs=problem.inputs.double()), out)


@in_every_norm
def test_a_row_gets_the_same_alone_and_in_any_batch(name, norm):
    made = MADE[name]
    problem = small_defense(6, norm=norm, epsilon={"linf": 0.3, "l2": 0.6, "l1": 1.5}[norm])
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
def test_nothing_is_left_changed_and_it_runs_as_other_attacks_do(made):
    problem = small_defense(3)
    for parameter in problem.defended.parameters():
        parameter.requires_grad_(True)
    inputs, references = problem.inputs.clone(), problem.target.references.clone()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    parts, generator = (problem.target, problem.inputs, problem.labels), torch.Generator().manual_seed(0)
    out = run_attack(made, *parts, threat_model=problem.threat_model, generator=generator)
    assert torch.equal(out, attacked(made, problem))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in problem.defended.parameters())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert torch.equal(problem.inputs, inputs)
    assert torch.equal(problem.target.references, references)


@every
def test_watched_steps_are_numbered_and_of_the_batch(made):
    problem = small_defense(4)
    seen = watched(made, problem)
    assert [step.number for step in seen] == list(range(len(seen)))
    assert len(seen) <= seen[0].total == seen[-1].total
    assert all(step.points.shape == problem.inputs.shape and step.loss.shape == (4,) for step in seen)
    assert all(step.gradient is None or step.gradient.shape == problem.inputs.shape for step in seen)
    if not made.traits.leaves_ball:
        assert all(bool(problem.threat_model.contains(step.points, problem.inputs).all()) for step in seen)


def drawn(kind, **settings):
    """Attacks with any of these values."""
    return st.builds(kind, **{name: st.sampled_from(list(values)) for name, values in settings.items()})


ASCENTS = {"objective": DIVERGENCES, "algorithm": ALGORITHMS, "start": [None, *STARTS], "projection": PROJECTIONS}
DRAWN = [
    drawn(APGD, loss=OBJECTIVES, steps=[1, 2, 12], start=STARTS),
    drawn(ObjectivePGD, rel_step_size=[None, 0.3], best=[False, True], **ASCENTS),
    drawn(Square, queries=[20], p=[0.01, 0.3, 1], stop_early=[False]),
    drawn(RandomSearch, points=[20]),
]


@settings(max_examples=60)
@given(
    made=st.one_of(DRAWN),
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from([(0.0, 1.0), (-3.0, 1.5), (0.0, 255.0)]),
    epsilon=st.sampled_from([1e-7, 0.01, 0.5, 100.0]) | st.floats(0.01, 3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    rows=st.integers(0, 4),
    targeted=st.booleans(),
)
def test_every_point_lies_in_ball_and_bounds_and_nothing_is_touched(made, norm, bounds, epsilon, shape, rows, targeted):
    target, inputs, labels = rowwise_problem(rows=rows, shape=shape, bounds=bounds)
    targeted = targeted and getattr(made, "objective", "ace") == "ace"
    labels = (labels + targeted) % 5
    inputs[:1, :, 0], inputs[1:2, :, :, -1] = bounds
    before, state, seen = inputs.clone(), torch.get_rng_state(), []
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    given = {"threat_model": threat_model, "targeted": targeted, "watch": seen.append}
    out = made.search(target, inputs, labels, generator=stream(0), **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, before)
    assert all(parameter.grad is None for parameter in target.module.parameters())
    tried = [step.points for step in seen]
    assert not isinstance(made, Square) or len(seen) == (20 if rows else 0)
    if isinstance(made, APGD):
        result = made.run(target, inputs, labels, generator=stream(0), **given)
        assert torch.equal(result.candidates, out)
        assert torch.equal(result.found, (predicted(target.module, out) == labels) == targeted)
        tried.append(result.best_points)
    for points in (out, *tried):
        assert (points.shape, points.dtype, points.requires_grad) == (inputs.shape, torch.float32, False)
        assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
        assert bool(threat_model.contains(points, inputs).all())


@every
def test_other_norms_and_aims_are_refused(made):
    made.check(threat_model=ThreatModel(norm="linf", epsilon=1), detector=True)
    for norm in set(NORMS) - set(made.traits.norms):
        with pytest.raises(AttackRefusedError, match=f"works for linf.*, not for {norm}"):
            made.check(threat_model=ThreatModel(norm=norm, epsilon=1), detector=True)
    if isinstance(made, RayS):
        with pytest.raises(AttackRefusedError, match=r"RayS: .*aim"):
            attacked(made, small_defense(2), targeted=True)


@every
def test_no_rows_and_wrong_inputs_and_labels(made):
    queries, problem = [], small_defense(2)
    problem.defended.classifier.register_forward_hook(lambda *_: queries.append(1))
    assert attacked(made, rows_of(problem, slice(0, 0))).shape == (0, 1, 3, 4)
    assert not queries
    x, y = problem.inputs, problem.labels
    # ObjectivePGD takes inputs as they are, in any precision.
    for match, wrong in (("labels", {"labels": y + 4}), ("labels", {"labels": y[:1]}), ("bounds", {"inputs": x + 1})):
        if not isinstance(made, ObjectivePGD):
            with pytest.raises(InvalidArgumentError, match=match):
                attacked(made, problem, **wrong)


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_leave_points_finite(made, bad):
    problem, seen = small_defense(3), []
    mute = Lambda(lambda x: problem.defended.classifier(x) * torch.tensor([1.0, bad, bad, 1.0]))
    out = attacked(made, changed(problem, mute), watch=seen.append)
    assert all(bool(step.points.isfinite().all()) for step in seen)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", [name for name in MADE if name not in BLACK_BOX])
def test_classifiers_without_gradients_are_refused(name):
    steps = Lambda(lambda x: x.flatten(1)[:, :4].detach())
    with pytest.raises(AttackError, match=r"gives no gradients; .*BPDA"):
        attacked(MADE[name], changed(small_defense(3), steps))


@pytest.mark.parametrize("name", BLACK_BOX)
def test_modules_that_work_on_their_input_in_place(name):
    def shift(x):
        assert not torch.is_grad_enabled()
        logits = problem.defended.classifier(x)
        x.zero_()
        return logits

    problem = small_defense(4)
    assert torch.equal(attacked(MADE[name], changed(problem, Lambda(shift))), attacked(MADE[name], problem))


@every
def test_points_with_logits_that_are_not_finite_are_kept_and_harm_no_other_row(made):
    """What fools a network is where the same network that returns NaN there breaks down; other rows stay the same."""
    if isinstance(made, LogitMatching):
        # Noise may meet such points where its row does not, and references have other labels.
        made = replace(made, level=0.0, samples=1, logits="detector")
    problem = small_defense(12, epsilon=0.3)
    plain, network = attacked(made, problem), problem.target.module
    fooled = predicted(network, plain) != problem.labels
    assert bool(fooled.any())

    def breaking(x):
        """NaN wherever the class is not the label of the row, in other batches of the nearest."""
        logits, near = network(x), torch.cdist(x.detach().flatten(1), problem.inputs.flatten(1)).argmin(1)
        rows = torch.arange(12) if len(x) == 12 else near
        return torch.where((logits.argmax(1) != problem.labels[rows])[:, None], torch.nan, logits)

    out = attacked(made, changed(problem, Lambda(breaking)))
    assert torch.equal(breaking(out).isnan().any(1), fooled)
    assert torch.equal(out[~fooled], plain[~fooled])


# Settings.

REQUIRED = {Transfer: {"surrogates": {"a": nn.Identity()}}, AdaptedAttack: {"attack": APGD()}}


def outside(kinds, info):
    """Values that are not accepted, those just outside of the range among them."""
    if bool in kinds:
        return [1, "yes"]
    if info.choices is not None:
        return ["nonsense", 3]
    numeric = kinds & {int, float}
    step = 1 if int in kinds else 1e-9
    values = [math.nan, math.inf, "8", True] if numeric else []
    if int in kinds:
        values += [1.5]
    for end, sign in ((info.minimum, -1), (info.maximum, 1)):
        values += [] if end is None else [end + sign * step]
    return values + [end for end in (info.above, info.below) if end is not None]


@pytest.mark.parametrize("attack_class", [*ATTACKS, Transfer, AdaptedAttack])
def test_values_outside_what_is_declared_are_refused_by_name(attack_class):
    for name, info in declared(attack_class).items():
        assert info.help
        kind = setting_types(attack_class)[name]
        kinds = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
        for value in outside(kinds, info):
            with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*expected "):
                attack_class(**{**REQUIRED.get(attack_class, {}), name: value})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (APGD(stop_early=True), {"batching": "any"}),
        (APGD(loss="targeted-dlr"), {"minimum_classes": 4}),
        (ObjectivePGD(algorithm="bim"), {"seeds": "none", "batching": "full", "failure": "last"}),
        (ObjectivePGD(objective="fisher-rao", algorithm="bim", best=True), {"seeds": "generator", "failure": "best"}),
        (RayS(keep_rows=False), {"batching": "any", "gradients": False}),
        (SpatialTransformation(mode="random"), {"seeds": "generator", "batching": "full"}),
        (LogitMatching(level=0), {"leaves_ball": False}),
    ],
)
def test_traits_follow_the_settings(made, expected):
    assert {name: getattr(made.traits, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("attack_class", "chosen", "message"),
    [
        (ObjectivePGD, {"algorithm": "fgsm", "steps": 2}, "steps: got 2, expected 1, or nothing, for FGSM"),
        (CarliniWagnerLinf, {"largest_const": 1e-6}, "largest_const: got 1e-06, expected at least initial_const"),
        (SpatialTransformation, {"translation_steps": 4}, "translation_steps: got 4, expected an odd integer, as 3"),
        (SpatialTransformation, {"rotation_steps": 30}, "rotation_steps: got 30, expected an odd integer"),
        (FeatureMatching, {"features": 3}, "features: got 3, expected names of layers"),
        (FeatureMatching, {"features": []}, "features: got "),
        (FeatureMatching, {"features": ["1", 2]}, "features: got "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(attack_class, chosen, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        attack_class(**chosen)
