"""A criterion, a detector and a test-time defense in one evaluation: linear programs, and brute force on a grid."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

import robust_ext
from robust_ext import InvalidArgumentError, MultiLabel, Targeted, ThreatModel, TopK
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.registry.defense import as_defense

DRAW = torch.Generator().manual_seed(5)
LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).eval().requires_grad_(False)
LINEAR[1].weight.copy_(torch.randn(4, 9, generator=DRAW))
LINEAR[1].bias.copy_(torch.randn(4, generator=DRAW) / 4)
X = torch.rand(12, 1, 3, 3, generator=DRAW)
FLAT = X.flatten(1).double().numpy()
SCORE = torch.randn(9, generator=DRAW)
BLUR = 0.7 * np.eye(9) + 0.3 / 9
QUICK = {"budget": "quick", "planted": 0}


def blurred(x):
    return 0.7 * x + 0.3 * x.mean((1, 2, 3), keepdim=True)


class Along(Detector):
    """Flags what lies far along a direction."""

    def score_of(self, seen):
        return seen.inputs.flatten(1) @ SCORE


def along(classifier):
    """Accept all clean inputs, some only just."""
    found = Along(classifier)
    found.threshold = (X.flatten(1) @ SCORE).max() + 0.05
    return found


def orders(criterion, label):
    """Of the four logits, which have to lie above which others, in one of several ways; -1 is a logit of zero."""
    others = [one for one in range(4) if one != label]
    if criterion is None:
        return [[(one, label)] for one in others]
    if isinstance(criterion, TopK):
        return [[(one, label) for one in some] for some in itertools.combinations(others, criterion.k)]
    if isinstance(criterion, Targeted):
        target = (label + 1) % 4
        return [[(target, one) for one in range(4) if one != target]]
    return [[(-1, one)] if present else [(one, -1)] for one, present in enumerate(label)]


def least(x, ways, weight, bias, *, watched):
    """The smallest linf size of a perturbation that one of the ways holds for, and that the detector accepts."""
    w, b, found = np.vstack([weight, np.zeros(9)]), np.append(bias, 0), []
    for way in ways:
        rows = [w[low] - w[high] for high, low in way]
        gaps = [w[high] @ x + b[high] - w[low] @ x - b[low] for high, low in way]
        if watched:
            rows, gaps = [*rows, SCORE.numpy()], [*gaps, float(along(LINEAR).threshold) - SCORE.double().numpy() @ x]
        limits = [[*row, 0.0] for row in rows] + [[*sign, -1.0] for sign in (*np.eye(9), *-np.eye(9))]
        result = linprog([0.0] * 9 + [1.0], A_ub=limits, b_ub=[*gaps, *[0.0] * 18], bounds=(None, None))
        found.append(result.fun)
    return min(found)


@pytest.mark.parametrize("sides", ["detector", "defense", "both"])
@pytest.mark.parametrize("criterion", [None, TopK(2), Targeted("next"), MultiLabel()], ids=repr)
def test_samples_break_at_the_size_that_a_linear_program_states(criterion, sides):
    """Of a linear model, a linear purifier and a linear detector the nearest example is known."""
    weight, bias = LINEAR[1].weight.double().numpy(), LINEAR[1].bias.double().numpy()
    defended, watched = sides != "detector", sides != "defense"
    seen = weight @ BLUR if defended else weight
    z = torch.from_numpy(FLAT @ seen.T + bias)
    labels = (z > 0).long() if isinstance(criterion, MultiLabel) else z.argmax(1)
    ways = [orders(criterion, label) for label in labels.tolist()]
    sizes = np.array([least(x, way, seen, bias, watched=watched) for x, way in zip(FLAT, ways, strict=True)])
    middle = np.sort(sizes)
    place = 3 + int(np.argmax(middle[4:10] / middle[3:9]))
    epsilon = float(middle[place : place + 2].mean())
    keywords = {"defense": blurred} if defended else {}
    keywords |= {"detector": along} if watched else {}
    model = ThreatModel(norm="linf", epsilon=epsilon, bounds=(-20.0, 21.0))
    result = robust_ext.evaluate(LINEAR, X, labels, model, criterion=criterion, accept_setup=True, **keywords, **QUICK)
    stands = np.array([one == "1" for one in result.content["worst_case"]["robust"]])
    # Which samples are right by the static model too decides nothing.
    assert result.content["clean_accuracy"] == 1
    assert not (~stands & (sizes > epsilon)).any()
    assert (stands & (sizes < epsilon)).sum() <= 1
    if criterion is not None:
        assert result.content["criterion"] == criterion.words


@pytest.mark.parametrize("criterion", [TopK(2), Targeted("next"), None], ids=repr)
def test_a_tiny_network_behind_a_rounding_defense_and_a_detector_by_brute_force(criterion):
    """The detector sees a point before it is rounded; of a grid, which points break and are accepted, by numpy."""
    draw = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)
    nn.utils.vector_to_parameters(2 * torch.randn(51, generator=draw), network.parameters())
    x, epsilon, limit = torch.rand(20, 2, generator=draw), 0.2, 0.25

    def rounded(x):
        return (x * 8).round() / 8

    def apart(x):
        return (x[:, 0] - x[:, 1]).abs()

    detector = robust_ext.as_detector(apart, network)
    detector.threshold = torch.tensor(limit)
    y = network(rounded(x)).argmax(1)
    steps = torch.linspace(-epsilon, epsilon, 81)
    grid = (x[:, None] + torch.cartesian_prod(steps, steps)).clamp(0, 1)
    order = np.argsort(-network(rounded(grid)).numpy(), axis=2)
    accepted = (grid[..., 0] - grid[..., 1]).abs().numpy() <= limit
    true, target = y.numpy()[:, None], ((y + 1) % 3).numpy()[:, None]
    if criterion is None:
        adversarial = order[:, :, 0] != true
    else:
        adversarial = order[:, :, 2] == true if isinstance(criterion, TopK) else order[:, :, 0] == target
    there = (adversarial & accepted).any(1)
    keywords = {"defense": rounded, "detector": detector, "criterion": criterion, "accept_setup": True}
    model = ThreatModel(norm="linf", epsilon=epsilon)
    result = robust_ext.evaluate(network, x, y, model, **keywords, **QUICK)
    stands = np.array([one == "1" for one in result.content["worst_case"]["robust"]])
    # The detector saves some of them, and what breaks is found up to points that only just are there.
    assert there.sum() < adversarial.any(1).sum()
    assert not (~stands & ~there).any()
    assert (stands & there).sum() <= 1
    flagged = (x[:, 0] - x[:, 1]).abs().numpy() > limit
    assert result.content["detector"]["false_positive_rate"] == flagged.mean()
    assert result.content["detector"]["accepted_accuracy"] == (~flagged).mean()


NETWORK = digits_network().requires_grad_(False)
INPUTS, LABELS = load_dataset("digits").take(range(8))
WIDE = ThreatModel(norm="linf", epsilon=0.25)


class Border(Detector):
    """How bright the left and right columns are, which are dark in every digit."""

    def score_of(self, seen):
        return seen.inputs[..., [0, 7]].flatten(1).mean(1)


def rounded(x):
    return (x * 8).round() / 8


def test_a_defense_behind_a_detector_is_certified_in_both_directions():
    clean = load_dataset("digits").take(range(100, 200))[0]
    keywords = {"detector": Border, "detector_data": clean, "budget": "quick", "planted": 8}
    result = robust_ext.evaluate(NETWORK, INPUTS, LABELS, WIDE, defense=rounded, **keywords)
    content, certificate = result.content, result.content["certificate"]
    broke = {one["name"] for one in content["steps"] if one["broken"]}
    assert content["worst_case"]["broken"] >= 5
    # What ignores the detector is flagged.
    assert all(one.startswith(("OrthogonalPGD", "SelectivePGD", "JointLoss", "FeatureMatching")) for one in broke)
    assert "gradient_mode='identity'" in certificate["text"]
    # Of the sum over both tests.
    assert certificate["found"] == certificate["planted"] >= 8
    assert "Border accepts it" in result.paragraph


def test_evaluate_defense_takes_a_criterion():
    targets = (LABELS + 3) % 10
    attack = robust_ext.evaluate_defense(
        rounded,
        None,
        INPUTS,
        LABELS,
        ThreatModel(norm="linf", epsilon=0.1),
        classifier=NETWORK,
        criterion=Targeted(targets),
        only=("transfer",),
        full=True,
    )
    blind = robust_ext.robust_accuracy(
        NETWORK, "robust_ext:APGD(steps=50)", INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.1)
    )
    # A sample that no point of the ball is misclassified near has no targeted one either.
    assert attack.static >= blind.robust_accuracy(0.1)
    assert attack.content["criterion"] == "the sample's target is predicted"


def test_a_defense_of_its_own_classifier_has_no_label_sets():
    model = as_defense(rounded, NETWORK, INPUTS[:2])
    labels = (NETWORK(INPUTS) > 0).long()
    with pytest.raises(InvalidArgumentError, match="a class or function that makes the defense"):
        robust_ext.evaluate(model, INPUTS, labels, WIDE, criterion=MultiLabel(), **QUICK)
