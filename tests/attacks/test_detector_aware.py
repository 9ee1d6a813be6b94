"""Attacks that are aware of a detector: what they need, query, keep and reach; the geometry of their steps."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_ext.attacks._common.objectives import cross_entropy, margin
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD, without_component
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.threat import NORMS
from robust_ext.detectors import Detector
from robust_ext.models.defended import Defended
from tests.attacks.defenses import linear_defense, small_defense
from tests.attacks.problems import MADE, attacked, watched

AWARE = [name for name, made in MADE.items() if made.traits.detector]
SCORED = ("OrthogonalPGD", "SelectivePGD", "JointLoss")
every = pytest.mark.parametrize("made", [MADE[name] for name in AWARE], ids=AWARE)


EPSILON = {"linf": 0.2, "l2": 0.5, "l1": 1.5}


def recorded(problem, monkeypatch):
    """Every query of classifier and detector together, with what they returned."""
    calls = []
    both_of = problem.defended.both

    def both(x):
        logits, score = both_of(x)
        calls.append((x.detach().clone(), logits.detach(), score.detach()))
        return logits, score

    monkeypatch.setattr(problem.defended, "both", both)
    return calls


@pytest.mark.parametrize(("made", "norm"), [(MADE[name], norm) for name in AWARE for norm in MADE[name].traits.norms])
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_the_point_kept_is_the_one_that_a_loop_over_all_points_keeps(made, norm, targeted, inverted, monkeypatch):
    problem = small_defense(8, norm=norm, epsilon=0.8 * EPSILON[norm], bounds=(-1.0, 1.0), inverted=inverted)
    labels = (problem.labels + 1) % 4 if targeted else problem.labels
    calls = recorded(problem, monkeypatch)
    out = attacked(made, problem, labels=labels, targeted=targeted)
    monkeypatch.undo()
    assert bool(problem.threat_model.contains(out, problem.inputs).all())
    assert -1 <= float(out.min()) <= float(out.max()) <= 1
    successes = 0
    for row in range(8):
        kept, ranking = problem.inputs[row], (-1, -float("inf"))
        for points, logits, score in calls:
            own = float(logits[row, labels[row]])
            other = max(float(z) for k, z in enumerate(logits[row]) if k != int(labels[row]))
            gained = own - other if targeted else other - own
            score = float(score[row])
            lets_pass = score < 0 if inverted else score <= 0
            level = 0 if gained <= 0 else 1 + lets_pass + (lets_pass and gained > 1e-5 * float(logits[row].abs().max()))
            merit = (level, -score if gained > 0 else gained)
            if merit > ranking:
                kept, ranking = points[row], merit
        assert torch.equal(out[row], kept)
        successes += ranking[0] >= 2
    predicted, rejected = problem.defended.decide(out)
    assert int((((predicted == labels) == targeted) & ~rejected).sum()) == successes


@pytest.mark.parametrize(("name", "inverted"), [*((name, False) for name in AWARE), *((name, True) for name in SCORED)])
def test_succeeds_where_an_attack_on_the_classifier_alone_does_not(name, inverted):
    # To match points that are detected means little of what else is, so the inverted test is for the others.
    problem = small_defense(40, epsilon=0.2 if inverted else 0.3, inverted=inverted)
    blind = attacked(APGD(steps=60), problem)
    assert int((problem.defended.classifier(blind).argmax(1) != problem.labels).sum()) >= 36
    aware, unaware = (int(problem.successes(points).sum()) for points in (attacked(MADE[name], problem), blind))
    assert aware >= unaware + 8


@pytest.mark.parametrize(
    ("made", "forward", "backward"),
    [
        (OrthogonalPGD(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        (SelectivePGD(steps=7, restarts=2), 2 * 8, 2 * 7 * 2),
        (JointLoss(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        # Features: 7 steps, the input, 2 references. Classifier: 7 steps, twice the input, the references. Judged: 8.
        (FeatureMatching(features="2", steps=7), (7 + 1 + 2) + (7 + 2 + 2) + 8, 2 * 7),
        (FeatureMatching(features="2", steps=7, weight=0, samples=3, check_every=4), 21 + 2 * (1 + 2) + 3 * 3, 21),
        # Judged: points 0, 5 and 7.
        (LogitMatching(steps=7, samples=3, check_every=5), 7 * 3 + 2 * (1 + 2) + 3, 7 * 3),
    ],
)
def test_passes_are_as_many_as_stated(made, forward, backward, monkeypatch):
    problem, counted, gradients, real = small_defense(5), [], [], torch.autograd.grad
    problem.defended.detector.classifier.register_forward_hook(lambda _, args, out: counted.append(len(args[0])))
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **more: gradients.append(len(args[1])) or real(*args, **more)
    )
    attacked(made, problem)
    assert (counted, gradients) == ([5] * forward, [5] * backward)


@cache
def linear_problem(norm, values, likeness):
    """A problem, and what an attack solves of it that is not aware of the detector."""
    problem = linear_defense(80, values, norm=norm, likeness=likeness, bounds=(-1.0, 1.0))
    return problem, problem.successes(attacked(APGD(steps=50), problem))


@pytest.mark.parametrize(
    ("made", "norm"),
    [
        *((OrthogonalPGD(steps=200), norm) for norm in ("linf", "l2")),
        *((made, norm) for made in (SelectivePGD(steps=200), JointLoss(steps=100, restarts=5)) for norm in NORMS),
    ],
)
@pytest.mark.parametrize(("values", "likeness"), [(5, 0.0), pytest.param(10, 0.7, marks=pytest.mark.exhaustive)])
def test_finds_what_linear_programming_finds(made, norm, values, likeness):
    problem, blind = linear_problem(norm, values, likeness)
    found = problem.successes(attacked(made, problem))
    hard = (problem.room > 0.01 * problem.threat_model.epsilon) & ~blind
    assert int(hard.sum()) >= 15
    assert int((found & hard).sum()) >= 0.95 * int(hard.sum())
    # Nor does it claim what cannot be.
    assert not bool((found & (problem.room < -1e-5)).any())


@every
def test_what_is_missing_is_named(made):
    problem = small_defense(2)
    bare = replace(problem, target=replace(problem.target, defended=None))
    assert made.refusal(threat_model=problem.threat_model) is not None
    with pytest.raises(AttackRefusedError, match="this target has none"):
        attacked(made, bare)
    alone = replace(problem, target=replace(problem.target, references=None))
    if made.traits.references:
        with pytest.raises(AttackRefusedError, match="imitates reference points"):
            attacked(made, alone)
        wrong = replace(problem, target=replace(problem.target, references=problem.inputs))
        with pytest.raises(InvalidArgumentError, match="groups of at least one point"):
            attacked(made, wrong)
    else:
        attacked(made, alone)


class Scored(Detector):
    """A score made of the values ``(N, D)`` by a function."""

    def __init__(self, classifier, function, *, threshold, differentiable=True, random=False):
        super().__init__(classifier)
        self.function, self.differentiable, self.random = function, differentiable, random
        self.threshold = torch.tensor(threshold)

    def score_of(self, seen):
        return self.function(seen.inputs.flatten(1))


def scored(problem, function, **settings):
    """The problem with another detector."""
    defended = Defended(problem.defended.classifier, Scored(problem.defended.classifier, function, **settings))
    return replace(problem, target=replace(problem.target, defended=defended), defended=defended)


@pytest.mark.parametrize("name", AWARE)
@pytest.mark.parametrize(
    ("function", "differentiable", "words"),
    [
        (lambda x: x.sum(1).detach() * 0, False, "is declared useless"),
        (lambda x: x.sum(1).detach() * 0, True, "is missing"),
        (lambda x: x.sum(1) * 0, True, "is zero wherever it rejects"),
    ],
)
def test_detectors_without_gradients(name, function, differentiable, words):
    problem = scored(small_defense(3), function, threshold=-1.0, differentiable=differentiable)
    if name in SCORED:
        with pytest.raises(AttackRefusedError, match=rf"{name} follows .* {words}.*BPDA.*decisions only"):
            attacked(MADE[name], problem)
    else:
        assert attacked(MADE[name], problem).shape == problem.inputs.shape


@pytest.mark.parametrize("name", [*SCORED, "FeatureMatching"])
def test_scores_of_random_detectors_are_averaged(name, monkeypatch):
    problem = scored(small_defense(3), lambda x: x[:, 0] + torch.randn(len(x)), threshold=0.5, random=True)
    calls = recorded(problem, monkeypatch)
    made = replace(MADE[name], samples=100, steps=2, restarts=1)
    out = attacked(made, problem)
    assert len(calls) == 3 * 100
    # Each point is queried 100 times; the mean is off by 0.1 on average, where single scores are by 1.
    kept, logits = (torch.stack(part[::100]) for part in list(zip(*calls, strict=True))[:2])
    means = torch.stack([score for _, _, score in calls]).view(3, 100, 3).mean(1)
    wrong = logits.argmax(2) != problem.labels
    best, some = means.masked_fill(~wrong, torch.inf).argmin(0), wrong.any(0)
    assert torch.equal(out[some], kept[best, torch.arange(3)][some])
    assert torch.equal(attacked(made, problem), out)


def gradients(problem, points, loss):
    """The margin, and the gradients of loss and score, ``(N, D)``."""
    x = points.clone().requires_grad_(True)
    logits, score = problem.defended.both(x)
    (of_loss,) = torch.autograd.grad(loss(logits, problem.labels).sum(), x, retain_graph=True)
    (of_score,) = torch.autograd.grad(score.sum(), x)
    return margin(logits, problem.labels).detach(), of_loss.flatten(1), of_score.flatten(1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("confidence", [0.0, 0.3])
@pytest.mark.parametrize(("loss", "function"), [("margin", margin), ("ce", cross_entropy)])
def test_steps_leave_the_other_gradient_alone(norm, confidence, loss, function):
    problem = small_defense(12, norm=norm, epsilon=EPSILON[norm])
    sides, orthogonal = set(), 0
    for step in watched(OrthogonalPGD(steps=40, loss=loss, confidence=confidence), problem):
        gained, of_loss, of_score = gradients(problem, step.points, function)
        way = step.gradient.flatten(1).double()
        done = (gained > 0) & (gained >= confidence)
        aim = torch.where(done[:, None], -of_score, of_loss).double()
        other = torch.where(done[:, None], of_loss, of_score).double()
        along = (way * other).sum(1).abs() / (way.norm(dim=1) * other.norm(dim=1))
        # Where nothing can move but along both at once, the step is the selective one.
        selective = (way == aim).all(1)
        assert bool(((along < 1e-5) | selective).all())
        assert bool(((way * aim).sum(1) > 0).all())
        sides |= set(done[~selective].tolist())
        orthogonal += int((~selective).sum())
    assert sides == {False, True}
    assert orthogonal >= 12 * 40 * 0.7


@pytest.mark.parametrize(("norm", "kind"), [*((norm, "l2") for norm in NORMS), ("linf", "sign")])
def test_selective_steps_at_the_detector_never_raise_its_score(norm, kind):
    problem, aimed = small_defense(12, norm=norm, epsilon=EPSILON[norm]), 0
    for step, after in pairwise(watched(SelectivePGD(steps=60, step=kind), problem)):
        gained, of_loss, of_score = gradients(problem, step.points, margin)
        way = torch.where(gained[:, None] > 0, -of_score, of_loss)
        rise = ((after.points - step.points).flatten(1).double() * way).sum(1)
        # What was moved has been projected onto the ball and the bounds.
        assert bool((rise >= -1e-6 * problem.threat_model.epsilon * way.norm(dim=1)).all())
        aimed += int((gained > 0).sum())
    assert aimed > 100


@settings(max_examples=80)
@given(st.integers(1, 6), st.integers(2, 40), st.integers(0, 10**6), st.floats(-15, 15), st.floats(0, 5))
def test_what_is_left_of_a_gradient_is_orthogonal(count, values, seed, power, near):
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(count, values, generator=generator) * 10.0**power
    own = torch.randn(count, values, generator=generator) * 10.0 ** (-near)
    own = own + other / other.norm(dim=1, keepdim=True)
    a, b, c = own.double(), other.double(), without_component(own, other).double()
    assert bool(((c * b).sum(1).abs() <= 1e-5 * c.norm(dim=1) * b.norm(dim=1)).all())
    # By Gram-Schmidt in float64.
    expected = a - b * ((a * b).sum(1) / b.square().sum(1))[:, None]
    kept = c.norm(dim=1) > 0
    assert bool(((c - expected).norm(dim=1) <= 2e-3 * expected.norm(dim=1))[kept].all())
    # Up to near = 5 what is left is ten times longer than what counts as parallel, short of chance.
    assert bool((kept | (expected.norm(dim=1) < 1e-5 * a.norm(dim=1))).all())
    for nothing in (without_component(own, -3 * own), without_component(0 * own, other)):
        assert not nothing.any()
    torch.testing.assert_close(without_component(own, 0 * own), own)


@pytest.mark.parametrize("unit", [2.0**-10, 2.0**10])
def test_steps_do_not_depend_on_the_units_of_the_gradients(unit):
    """Only where little is left of a gradient is the step the selective one, not where gradients are large."""
    own, other = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0)).unbind()
    nothing = torch.zeros_like(own)
    limits = {"above": nothing.bool(), "below": nothing.bool(), "normal": nothing}
    way = OrthogonalPGD().direction(own, other, **limits)
    assert torch.equal(OrthogonalPGD().direction(own * unit, other * unit, **limits), way * unit)
    assert bool(((way * other).sum(1).abs() < 1e-5).all())


@pytest.mark.parametrize("attack_class", [OrthogonalPGD, SelectivePGD])
@pytest.mark.parametrize(("kind", "decay"), [("l2", True), ("l2", False), ("sign", False)])
def test_step_lengths(attack_class, kind, decay):
    problem = small_defense(6, epsilon=5.0)
    made = attack_class(steps=10, rel_step_size=0.002, step=kind, decay=decay, start="input")
    for step, after in pairwise(watched(made, problem)):
        free = ((after.points > 0) & (after.points < 1)).flatten(1).all(1)
        length = (after.points - step.points).flatten(1).norm(dim=1)[free]
        expected = 0.002 * problem.threat_model.epsilon * 12**0.5 * (1 - step.number / 10 if decay else 1)
        torch.testing.assert_close(length, torch.full_like(length, expected), rtol=1e-4, atol=1e-7)
        assert bool(free.any())


@pytest.mark.parametrize("norm", NORMS)
def test_the_joint_loss_shown_has_the_gradient_shown(norm):
    problem, generator = small_defense(6, norm=norm, epsilon=EPSILON[norm]), torch.Generator().manual_seed(1)
    steps = watched(JointLoss(steps=8, restarts=1, loss="ce"), problem)
    problem.defended.double()

    def parts(x):
        logits, score = problem.defended.both(x)
        return cross_entropy(logits, problem.labels), score

    for step in steps:
        x, way = step.points.double(), torch.randn(step.points.shape, generator=generator).double()
        (loss, score), above, below = (parts(x + sign * 1e-4 * way) for sign in (0, 1, -1))
        # The weight follows from the loss that is shown.
        alpha = ((loss - step.loss) / score).where(score > 0, 0)
        slope = (above[0] - below[0] - alpha * (above[1] - below[1])) / 2e-4
        # float32 leaves a weight in doubt where the score is next to nothing.
        clear = (score > 0.05) | (score < 0)
        shown = (step.gradient.double() * way).flatten(1).sum(1)
        torch.testing.assert_close(shown[clear], slope[clear], rtol=1e-2, atol=1e-3)
        assert bool(clear.any())
