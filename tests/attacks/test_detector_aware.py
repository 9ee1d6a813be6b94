"""What the attacks that are aware of a detector promise alike: what they need, query, keep and reach."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, RobustExtWarning
from robust_ext.core.threat import NORMS
from robust_ext.detectors import Detector
from robust_ext.models.defended import Defended
from tests.attacks.defenses import linear_defense, small_defense
from tests.attacks.problems import MADE, attacked

AWARE = [name for name, made in MADE.items() if made.traits.detector]
SCORED = ("OrthogonalPGD", "SelectivePGD", "JointLoss")
every = pytest.mark.parametrize("made", [MADE[name] for name in AWARE], ids=AWARE)


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
    epsilon = {"linf": 0.15, "l2": 0.5, "l1": 1.2}[norm]
    problem = small_defense(8, norm=norm, epsilon=epsilon, bounds=(-1.0, 1.0), inverted=inverted)
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
    problem = small_defense(5)
    counted, gradients, real = [], [], torch.autograd.grad
    network = problem.defended.detector.classifier
    network.register_forward_hook(lambda _module, args, _out: counted.append(len(args[0])))

    def grad(value, x, **settings):
        gradients.append(len(x))
        return real(value, x, **settings)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    attacked(made, problem)
    assert counted == [5] * forward
    assert gradients == [5] * backward


LINEAR = [
    *((OrthogonalPGD(steps=200), norm) for norm in ("linf", "l2")),
    *((SelectivePGD(steps=200), norm) for norm in NORMS),
    *((JointLoss(steps=100, restarts=5), norm) for norm in NORMS),
]


@cache
def linear_problem(norm, values, likeness):
    """A problem, and what an attack solves of it that is not aware of the detector."""
    problem = linear_defense(80, values, norm=norm, likeness=likeness, bounds=(-1.0, 1.0))
    return problem, problem.successes(attacked(APGD(steps=50), problem))


@pytest.mark.parametrize(("made", "norm"), LINEAR)
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


class Rounded(Detector):
    """A score without gradients, declared so or not, or with gradients of zeros."""

    def __init__(self, classifier, how):
        super().__init__(classifier)
        self.how, self.differentiable = how, how != "declared"
        self.threshold = torch.tensor(-1.0)

    def score_of(self, seen):
        total = seen.inputs.flatten(1).sum(1)
        return total * 0 if self.how == "zeros" else total.detach() * 0


@pytest.mark.parametrize("name", AWARE)
@pytest.mark.parametrize(
    ("how", "words"),
    [("declared", "is declared useless"), ("undeclared", "is missing"), ("zeros", "is zero wherever it rejects")],
)
def test_detectors_without_gradients(name, how, words):
    problem = small_defense(3)
    defended = Defended(problem.defended.classifier, Rounded(problem.defended.classifier, how))
    changed = replace(problem, target=replace(problem.target, defended=defended))
    if name in SCORED:
        with pytest.raises(AttackRefusedError, match=rf"{name} follows .* {words}.*BPDA.*decisions only"):
            attacked(MADE[name], changed)
    else:
        assert attacked(MADE[name], changed).shape == problem.inputs.shape


class Noisy(Detector):
    """The first value, with noise of standard deviation 1."""

    random = True

    def score_of(self, seen):
        return seen.inputs.flatten(1)[:, 0] + torch.randn(len(seen.inputs))


@pytest.mark.parametrize("name", [*SCORED, "FeatureMatching"])
def test_scores_of_random_detectors_are_averaged(name, monkeypatch):
    problem = small_defense(3)
    detector = Noisy(problem.defended.classifier)
    detector.threshold = torch.tensor(0.5)
    defended = Defended(problem.defended.classifier, detector)
    changed = replace(problem, target=replace(problem.target, defended=defended), defended=defended)
    calls = recorded(changed, monkeypatch)
    made = replace(MADE[name], samples=100, steps=2, restarts=1)
    out = attacked(made, changed)
    assert len(calls) == 3 * 100
    # Each point is queried 100 times; the mean is off by 0.1 on average, where single scores are by 1.
    kept = torch.stack([points for points, _, _ in calls[::100]])
    means = torch.stack([score for _, _, score in calls]).view(3, 100, 3).mean(1)
    logits = torch.stack([logits for _, logits, _ in calls[::100]])
    wrong = logits.argmax(2) != problem.labels
    best = means.masked_fill(~wrong, torch.inf).argmin(0)
    some = wrong.any(0)
    assert torch.equal(out[some], kept[best, torch.arange(3)][some])
    assert torch.equal(attacked(made, changed), out)


@every
def test_absolute_step_sizes_go_before_relative_ones(made):
    problem = small_defense(3, epsilon=0.25)
    settings = ({"step_size": 0.0625, "rel_step_size": 9.0}, {"rel_step_size": 0.25}, {"step_size": 0.0625}, {})
    both, relative, absolute, plain = (attacked(replace(made, **chosen), problem) for chosen in settings)
    assert torch.equal(both, relative)
    assert not torch.equal(absolute, plain)


@pytest.mark.parametrize("reference", ["nearest", "mean"])
@pytest.mark.parametrize(
    "made",
    [FeatureMatching(steps=5), FeatureMatching(features="2", distance="cosine", steps=5), LogitMatching(steps=5)],
)
def test_references_of_the_inputs_own_class_are_not_imitated(made, reference):
    made, problem = replace(made, reference=reference), small_defense(6, references=2)
    own = problem.inputs[:, None]
    others = problem.target.references
    mixed = replace(problem, target=replace(problem.target, references=torch.cat([own, others, own + 1e-3], 1)))
    torch.testing.assert_close(attacked(made, mixed), attacked(made, problem), rtol=0, atol=1e-4)
    alone = replace(problem, target=replace(problem.target, references=own))
    with pytest.raises(AttackError, match="none of the references of another class"):
        attacked(made, alone)
    some = torch.cat([own[:2], others[2:, :1]])
    with pytest.warns(RobustExtWarning, match="for some inputs"):
        attacked(made, replace(problem, target=replace(problem.target, references=some)))
