"""Attacks that are aware of a detector: what they need, query, keep and reach; the geometry of their steps."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.attacks._common.objectives import cross_entropy, margin
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.feature_matching import FeatureMatching, feature_map
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD, without_component
from robust_ext.core.errors import AttackError, AttackRefusedError, RobustExtWarning
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.detectors import ScoreDetector
from robust_ext.models.defended import Defended
from tests.attacks.defenses import FarHidden, Rowwise, linear_defense, small_defense
from tests.attacks.problems import MADE, attacked, predicted, watched

AWARE = [name for name, made in MADE.items() if made.traits.detector]
SCORED = ("OrthogonalPGD", "SelectivePGD", "JointLoss")

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


@cache
def linear_problem(norm, values, likeness):
    problem = linear_defense(80, values, norm=norm, likeness=likeness, bounds=(-1.0, 1.0))
    return problem, problem.successes(attacked(APGD(steps=50), problem))


@pytest.mark.parametrize(
    ("made", "norm"),
    [
        *((OrthogonalPGD(steps=80), norm) for norm in ("linf", "l2")),
        *((made, norm) for made in (SelectivePGD(steps=200), JointLoss(steps=60, restarts=3)) for norm in NORMS),
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


def scored(problem, function, *, threshold, **settings):
    """The problem with a detector whose score is a function of the values ``(N, D)``."""
    detector = ScoreDetector(problem.defended.classifier, lambda x: function(x.flatten(1)), **settings)
    detector.threshold = torch.tensor(threshold)
    defended = Defended(problem.defended.classifier, detector)
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


in_references = pytest.mark.parametrize("reference", ["nearest", "mean"])


def wanted_of(known, own, reference):
    """What is imitated: of the references the nearest, or their mean."""
    return sum(known) / len(known) if reference == "mean" else min(known, key=lambda one: float((one - own).norm()))


def gained_of(z, label):
    z = z.tolist()
    return max(value for k, value in enumerate(z) if k != label) - z[label]


@in_references
@pytest.mark.parametrize(
    "made",
    [FeatureMatching(steps=5), FeatureMatching(features="2", distance="cosine", steps=5), LogitMatching(steps=5)],
)
def test_references_of_the_inputs_own_class_are_not_imitated(made, reference):
    made, problem = replace(made, reference=reference), small_defense(6, references=2)
    own, others = problem.inputs[:, None], problem.target.references

    def beside(references):
        return replace(problem, target=replace(problem.target, references=references))

    mixed = beside(torch.cat([own, others, own + 1e-3], 1))
    torch.testing.assert_close(attacked(made, mixed), attacked(made, problem), rtol=0, atol=1e-4)
    with pytest.raises(AttackError, match="none of the references of another class"):
        attacked(made, beside(own))
    with pytest.warns(RobustExtWarning, match="for some inputs"):
        attacked(made, beside(torch.cat([own[:2], others[2:, :1]])))


FAR = {
    "l2": lambda a, b: float((a - b).norm() ** 2),
    "linf": lambda a, b: float((a - b).abs().max()),
    "cosine": lambda a, b: 1 - float(a @ b / a.norm() / b.norm()),
}


def joined(x, scaled):
    return torch.cat([layer(x[None])[0] / scale for layer, scale in scaled])


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("weight", [0.0, 1.0])
@in_references
def test_the_loss_of_features_is_the_one_stated(distance, weight, reference):
    problem = small_defense(6, epsilon=0.3, references=3)
    network, references = problem.defended.classifier, problem.target.references
    chosen = {"features": ["1", "2"], "distance": distance, "weight": weight, "reference": reference}
    steps = watched(FeatureMatching(**chosen, confidence=0.2, steps=4), problem)
    for row, label in enumerate(problem.labels.tolist()):
        scaled = [(layer, layer(references[row]).norm(dim=1).mean()) for layer in (network[:2], network[:3])]
        known, own = [joined(x, scaled) for x in references[row]], joined(problem.inputs[row], scaled)
        wanted, logits = wanted_of(known, own, reference), network(problem.inputs[row][None])[0]
        for step in steps:
            here = joined(step.points[row], scaled)
            expected = -FAR[distance](here, wanted) / FAR[distance](own, wanted)
            gained = min(gained_of(network(step.points[row][None])[0], label), 0.2)
            expected += weight * gained / float(logits.max() - logits.min())
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_where_no_features_are_named_they_are_the_detectors_own_or_what_enters_the_last_layer():
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    x = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0))
    own = type("WithFeatures", (FarHidden,), {"features": lambda self, x: x.flatten(1)[:, :3] * 2})
    for detector, expected in ((own(network), x.flatten(1)[:, :3] * 2), (FarHidden(network), network[:3](x))):
        torch.testing.assert_close(feature_map(detector, None, x[:1])(x), [expected])


@pytest.mark.parametrize("logits", ["classifier", "detector", "both"])
@in_references
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_the_loss_of_logits_without_noise_is_the_one_stated(logits, reference, targeted, same):
    problem = small_defense(5, epsilon=0.3, references=3)
    if not same:
        weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
        other = nn.Sequential(nn.Flatten(), Rowwise(weight), nn.Tanh()).eval()
        defended = Defended(other, problem.defended.detector)
        target = replace(problem.target, defended=defended, classes=3)
        problem = replace(problem, target=target, labels=problem.labels % 3, defended=defended)
    chosen = {"logits": logits, "reference": reference, "margin_weight": 0.7, "confidence": 0.1}
    steps = watched(LogitMatching(**chosen, level=0, samples=1, steps=6), problem, targeted=targeted)
    classifier, network = problem.defended.classifier, problem.defended.detector.classifier
    both = {"classifier": [classifier], "detector": [network], "both": [classifier, network]}
    parts = [classifier] if same else both[logits]

    def matched(x):
        return torch.cat([part(x[None])[0] for part in parts])

    for row, label in enumerate(problem.labels.tolist()):
        references = problem.target.references[row]
        right = (predicted(classifier, references) == label) == targeted
        known = [matched(point) for point in references[right if bool(right.any()) else slice(None)]]
        wanted = wanted_of(known, matched(problem.inputs[row]), reference)
        for step in steps:
            gained = gained_of(classifier(step.points[row][None])[0], label)
            expected = 0.7 * min(-gained if targeted else gained, 0.1)
            expected -= float((matched(step.points[row]) - wanted).square().sum()) / 2
            assert float(step.loss[row]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize(("noise", "variance"), [("normal", 1.0), ("uniform", 1 / 3), ("sign", 1.0)])
def test_the_loss_is_averaged_over_the_noise(bounds, noise, variance):
    """With a linear network, noise of variance v adds v times the squared weights to the squared distance."""
    problem, width = small_defense(16, bounds=bounds), bounds[1] - bounds[0]
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    linear = nn.Sequential(nn.Flatten(), Rowwise(weight)).eval()
    detector = type(problem.defended.detector)(nn.Sequential(linear, nn.Identity(), nn.Identity()).eval())
    detector.threshold = torch.tensor(1e9)
    defended, middle = Defended(linear, detector), torch.full_like(problem.inputs, sum(bounds) / 2)
    target = replace(problem.target, defended=defended, classes=3, references=middle[:, None] + 0.1)
    parts = {"target": target, "defended": defended, "inputs": middle, "labels": torch.zeros(16, dtype=torch.int64)}
    changed = replace(problem, **parts, threat_model=ThreatModel(norm="linf", epsilon=0.05, bounds=bounds))
    chosen = {"logits": "classifier", "samples": 250, "steps": 1, "margin_weight": 0, "start": "input"}
    (step,) = watched(LogitMatching(**chosen, noise=noise, level=0.05), changed)
    plain = (torch.full((16, 12), -0.1) @ weight.T).square().sum(1)
    expected = -(plain + variance * (0.05 * width) ** 2 * weight.square().sum()) / 2
    # The rows are the same and draw each its own noise.
    torch.testing.assert_close(step.loss.mean(), expected.mean(), rtol=0.03, atol=1e-4)
    torch.testing.assert_close(step.loss, expected, rtol=0.15, atol=1e-4)
