"""The Foolbox and ART classes of detector-aware attacks, both from one table of cases."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.adapters.foolbox.models import Undetected
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from tests.adapters.common import art_classifier
from tests.adapters.hosts import (
    DETECTOR_AWARE,
    HOSTS,
    ORDERS,
    class_of,
    detected_by,
    foolbox,
    foolbox_model,
    in_words_of,
)
from tests.attacks.defenses import FarHidden, small_defense

EPSILON = {"linf": 0.3, "l2": 0.8, "l1": 2.4}
MATCHING = ("FeatureMatching", "LogitMatching")
EachName = pytest.mark.parametrize("name", list(DETECTOR_AWARE))
EachCase = pytest.mark.parametrize(
    ("norm", "name"),
    [(norm, name) for name in DETECTOR_AWARE for norm in ORDERS if (norm, name) != ("l1", "OrthogonalPGD")],
)


def build(host, name, problem, **settings):
    """The attack, with settings in the words of the core attack; ART's on a model of the problem."""
    model = settings.pop("model", None)
    kind = class_of(host, name, problem.threat_model.norm)
    chosen = in_words_of(kind, {**DETECTOR_AWARE[name], **settings})
    if host == "foolbox":
        return kind(**chosen)
    own = {"norm": ORDERS[problem.threat_model.norm], "eps": problem.threat_model.epsilon, "verbose": False}
    return kind(detected_by("art", problem) if model is None else model, **{**own, **chosen})


def run(host, name, problem, *, labels=None, references="own", **settings):
    """Candidates ``(N, ...)`` of an attack in a host."""
    targeted, model = settings.pop("targeted", False), settings.pop("model", None)
    y = problem.labels if labels is None else labels
    ways = {}
    if references is not None and (name in MATCHING or not isinstance(references, str)):
        ways["references"] = problem.target.references if isinstance(references, str) else references
    if host == "foolbox":
        criterion = foolbox.criteria.TargetedMisclassification(y) if targeted else Undetected(y)
        at = detected_by(host, problem) if model is None else model
        epsilon = problem.threat_model.epsilon
        return build(host, name, problem, **settings)(at, problem.inputs, criterion, epsilons=epsilon, **ways)[0]
    attack = build(host, name, problem, targeted=targeted, model=model, **settings)
    ways = {key: np.asarray(value) for key, value in ways.items()}
    return torch.from_numpy(attack.generate(problem.inputs.numpy(), np.asarray(y), **ways))


@EachCase
@pytest.mark.parametrize("inverted", [False, True])
def test_success_is_what_the_defended_classifier_decides(norm, name, inverted):
    problem = small_defense(12, norm=norm, epsilon=EPSILON[norm], inverted=inverted)
    ways = {"references": problem.target.references} if name in MATCHING else {}
    attack = build("foolbox", name, problem, seed=0)
    criterion, epsilon = Undetected(problem.labels), problem.threat_model.epsilon
    _, clipped, success = attack(detected_by("foolbox", problem), problem.inputs, criterion, epsilons=epsilon, **ways)
    assert torch.equal(success, problem.successes(clipped))
    assert bool(success.any())
    points = run("art", name, problem, seed=0)
    outcomes = detected_by("art", problem).outcomes(points.numpy(), problem.labels.numpy())
    fooled = np.array([outcome == "fooled" for outcome in outcomes])
    assert np.array_equal(fooled, problem.successes(points).numpy())
    assert fooled.any()


class Rounded(nn.Module):
    def forward(self, x):
        return (x * 255).round() / 255


class Shifted(nn.Module):
    def forward(self, x):
        return x + 0.1


class Twice(nn.Module):
    def __init__(self, defended):
        super().__init__()
        self.defended = defended

    def forward(self, x):
        return self.defended(x) + 0 * self.defended(x)


@pytest.mark.parametrize("around", ["mean", "rounding", "shift", "after", "twice"])
def test_what_lies_around_the_detector_is_refused(around):
    problem = small_defense(3)
    modules = {
        "mean": problem.defended,
        "rounding": nn.Sequential(Rounded(), problem.defended),
        "shift": nn.Sequential(Shifted(), problem.defended),
        "after": nn.Sequential(problem.defended, nn.Tanh()),
        "twice": Twice(problem.defended),
    }
    ways = {"preprocessing": {"mean": 0.1}} if around == "mean" else {}
    model = foolbox_model(modules[around].eval(), **ways)
    # These inputs are what rounding leaves as they are.
    object.__setattr__(problem, "inputs", Rounded()(problem.inputs))
    shown = "model: got one that changes inputs or logits around its detector"
    with pytest.raises(InvalidArgumentError, match=shown):
        run("foolbox", "SelectivePGD", problem, model=model)
    preprocessing = (0.1, 1) if around == "mean" else (0, 1)
    estimator = art_classifier(modules[around], (1, 3, 4), 4, preprocessing=preprocessing)
    with pytest.raises(InvalidArgumentError, match=shown):
        run("art", "SelectivePGD", problem, model=estimator)
    # A module that changes nothing is passed by.
    held = foolbox_model(nn.Sequential(nn.Identity(), problem.defended).eval())
    points = [run("foolbox", "SelectivePGD", problem, model=model, seed=1) for model in (held, None)]
    assert torch.equal(*points)


@HOSTS
def test_references_go_with_their_rows_and_may_be_shared(host):
    problem = small_defense(6)
    groups = problem.target.references
    assert groups is not None
    ways = {"start": "input", "seed": 2}
    whole = run(host, "FeatureMatching", problem, **ways)
    if host == "art":
        parts = run(host, "FeatureMatching", problem, batch_size=2, **ways)
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    turned = run(host, "FeatureMatching", problem, references=groups.flip(0), **ways)
    assert not torch.allclose(turned, whole, atol=1e-3)
    each = run(host, "FeatureMatching", problem, references=groups[:1].expand(6, *groups.shape[1:]), **ways)
    assert torch.equal(run(host, "FeatureMatching", problem, references=groups[0], **ways), each)


@EachName
def test_exposures_and_all_forms_of_labels_are_attacked_alike(name):
    problem = small_defense(6)
    y = problem.labels.numpy()
    expected = run("art", name, problem, seed=1)
    plain = detected_by("art", problem, exposure="classifier")
    whole, short = np.eye(5)[y], np.eye(4)[y]
    for labels, model in ((short, None), (whole, None), (y[:, None], None), (y, plain), (short, plain)):
        assert torch.equal(run("art", name, problem, labels=labels, model=model, seed=1), expected)
    references = {"references": np.asarray(problem.target.references)} if name in MATCHING else {}
    for model in (None, plain):
        made = build("art", name, problem, model=model, seed=1)
        assert np.array_equal(made.generate(problem.inputs.numpy(), **references), expected.numpy())


class Noisy(FarHidden):
    random = True

    def score_of(self, seen):
        return super().score_of(seen) + 0.1 * torch.randn(len(seen.inputs))


@HOSTS
def test_random_detectors_draw_what_the_seed_decides(host):
    problem = small_defense(6)
    detector = Noisy(problem.defended.classifier)
    detector.middle = problem.defended.detector.get_buffer("middle")
    detector.threshold = problem.defended.detector.threshold
    object.__setattr__(problem, "defended", Defended(problem.defended.classifier, detector, exposure="reject"))
    points = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        if host == "foolbox":  # A call of Foolbox queries the random detector once more, to judge.
            attack = build(host, "SelectivePGD", problem, seed=4)
            points.append(attack.run(detected_by(host, problem), problem.inputs, problem.labels, epsilon=0.3))
        else:
            points.append(run(host, "SelectivePGD", problem, seed=4))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*points)
    assert not torch.equal(points[0], run(host, "SelectivePGD", problem, seed=5))
