"""Other criteria, alone and with a detector and a test-time defense: linear programs, and brute force on grids."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import nn

import robust_ext
from robust_ext import MultiLabel, Targeted, ThreatModel, TopK, robust_accuracy
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from robust_ext.detectors import Detector
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK
from tests.evaluations.subjects import spread

# Bounds that no nearest point reaches.
WIDE = (-20.0, 21.0)
DRAW = torch.Generator().manual_seed(5)
LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).eval().requires_grad_(False)
LINEAR[1].weight.copy_(torch.randn(4, 9, generator=DRAW))
LINEAR[1].bias.copy_(torch.randn(4, generator=DRAW) / 4)
X = torch.rand(12, 1, 3, 3, generator=DRAW.manual_seed(6))
FLAT = X.flatten(1).double().numpy()
SCORE = torch.randn(9, generator=DRAW)
BLUR = 0.7 * np.eye(9) + 0.3 / 9
QUICK = {"budget": "quick", "planted": 0, "accept_setup": True}


class Along(Detector):
    """Flags what lies far along a direction; accepts all clean inputs, some only just."""

    def __init__(self, classifier):
        super().__init__(classifier)
        self.threshold = (X.flatten(1) @ SCORE).max() + 0.05

    def score_of(self, seen):
        return seen.inputs.flatten(1) @ SCORE


def orders(criterion, label, z):
    """Of the four logits, which have to lie above which others, in one of several ways; -1 is a logit of zero."""
    if isinstance(criterion, MultiLabel):
        chosen = range(4) if criterion.labels is None else criterion.labels
        return [[(-1, one)] if label[one] else [(one, -1)] for one in chosen]
    if isinstance(criterion, Targeted):
        # Of two the target is the third class, the likeliest that is not among them.
        target = (label + 1) % 4 if criterion.k == 1 else int(np.argsort(z)[1])
        return [[(target, one) for one in some] for some in combinations({*range(4)} - {target}, 4 - criterion.k)]
    count = 1 if criterion is None else criterion.k
    return [[(one, label) for one in some] for some in combinations({*range(4)} - {label}, count)]


def nearest(x, ways, weight, bias, *, norm="linf", watched=False):
    """The size of the smallest perturbation that one of the ways holds for, and that the detector accepts."""
    w, b, found = np.vstack([weight, np.zeros(9)]), np.append(bias, 0), []
    for way in ways:
        high, low = np.array(way).T
        rows, gaps = w[high] - w[low], (w[low] - w[high]) @ x + b[low] - b[high]
        if watched:
            limit = float(Along(LINEAR).threshold)
            rows, gaps = np.vstack([rows, -SCORE]), np.append(gaps, SCORE.double().numpy() @ x - limit)
        if norm == "l2":
            limits = {"type": "ineq", "fun": lambda d, rows=rows, gaps=gaps: rows @ d - gaps}
            start, options = np.linalg.pinv(rows) @ gaps, {"ftol": 1e-14}
            found.append(minimize(lambda d: d @ d, start, constraints=limits, options=options).fun ** 0.5)
        else:
            limits = [[*-row, 0.0] for row in rows] + [[*sign, -1.0] for sign in (*np.eye(9), *-np.eye(9))]
            size = linprog([0.0] * 9 + [1.0], A_ub=limits, b_ub=[*-gaps, *[0.0] * 18], bounds=(None, None))
            found.append(size.fun)
    return min(found)


CRITERIA = {
    "top 2": TopK(2),
    "targeted": Targeted("next"),
    "targeted top 2": Targeted("likeliest", k=2),
    "labels": MultiLabel(),
    "two labels": MultiLabel((1, 3)),
}


def exact(criterion, norm="linf", *, blurred=False, watched=False):
    """Labels as the linear model gives them, and the exact distances."""
    weight, bias = LINEAR[1].weight.double().numpy(), LINEAR[1].bias.double().numpy()
    weight = weight @ BLUR if blurred else weight
    z = torch.from_numpy(FLAT @ weight.T + bias)
    labels = (z > 0).long() if isinstance(criterion, MultiLabel) else z.argmax(1)
    ways = [orders(criterion, *each) for each in zip(labels.tolist(), z.tolist(), strict=True)]
    given = {"norm": norm, "watched": watched}
    return labels, np.array([nearest(x, way, weight, bias, **given) for x, way in zip(FLAT, ways, strict=True)])


# Attacks that look for the nearest example: how much farther out theirs is, in the middle and at most.
NEAREST = [
    *((name, norm, BoundarySearch(budget=1500, hops=20), 1.01, 1.1) for norm in ("linf", "l2") for name in CRITERIA),
    # Made for bounds as wide as an image's: its steps are in their units.
    *((name, "linf", CarliniWagnerLinf(steps=150), 1.35, np.inf) for name in [*CRITERIA][:3]),
    *((name, "linf", RayS(queries=2000, stop=False, tolerance=1e-5), 1.1, np.inf) for name in ("top 2", "labels")),
]


@pytest.mark.parametrize(("name", "norm", "attack", "middle", "most"), NEAREST)
def test_the_nearest_example_is_found_and_none_that_is_nearer(name, norm, attack, middle, most):
    labels, sizes = exact(CRITERIA[name], norm)
    model = ThreatModel(norm=norm, epsilon=20.0, bounds=WIDE)
    result = robust_accuracy(LINEAR, attack, X, labels, model, criterion=CRITERIA[name])
    assert result.content["clean_accuracy"] == 1
    farther = np.array(result.content["attacks"][0]["distances"], dtype=float) / sizes
    assert farther.min() >= 1 - 1e-4
    assert np.median(farther) < middle
    assert farther.max() <= most


@pytest.mark.parametrize("attack", [APGD(steps=100, restarts=3, loss="margin"), Square(queries=2000)])
@pytest.mark.parametrize("name", CRITERIA)
def test_success_begins_at_the_exact_distance(name, attack):
    labels, sizes = exact(CRITERIA[name])
    sizes = np.sort(sizes)
    budgets = [float(sizes[3] + sizes[4]) / 2, float(sizes[8] + sizes[9]) / 2, float(sizes[-1] * 1.2)]
    model = ThreatModel(norm="linf", epsilon=budgets[-1], bounds=WIDE)
    result = robust_accuracy(LINEAR, attack, X, labels, model, criterion=CRITERIA[name], epsilons=budgets)
    robust = [round(12 * result.robust_accuracy(one)) for one in budgets]
    # The attack misses two samples at most.
    assert all(true <= one <= true + 2 for one, true in zip(robust, [8, 3, 0], strict=True)), robust


@pytest.mark.parametrize("sides", [(), ("detector",), ("defense",), ("detector", "defense")], ids=str)
@pytest.mark.parametrize("criterion", [None, TopK(2), Targeted("next"), MultiLabel()], ids=repr)
def test_evaluations_break_samples_at_the_size_that_a_linear_program_states(criterion, sides):
    """Behind a linear purifier, and watched by a linear detector."""
    labels, sizes = exact(criterion, blurred="defense" in sides, watched="detector" in sides)
    middle = np.sort(sizes)
    place = 3 + int(np.argmax(middle[4:10] / middle[3:9]))
    epsilon = float(middle[place : place + 2].mean())
    possible = {"detector": Along, "defense": lambda x: 0.7 * x + 0.3 * x.mean((1, 2, 3), keepdim=True)}
    keywords = {"criterion": criterion, **{side: possible[side] for side in sides}, **QUICK}
    result = robust_ext.evaluate(LINEAR, X, labels, ThreatModel(norm="linf", epsilon=epsilon, bounds=WIDE), **keywords)
    stands = np.array([one == "1" for one in result.content["worst_case"]["robust"]])
    # Which samples are right by the static model too decides nothing.
    assert result.content["clean_accuracy"] == 1
    assert not (~stands & (sizes > epsilon)).any()
    assert (stands & (sizes < epsilon)).sum() <= 1
    if criterion is not None:
        assert result.content["criterion"] == criterion.words


HOSTS = {
    "foolbox": "foolbox:LinfPGD(steps=20)",
    "art": "art:ProjectedGradientDescent(max_iter=20)",
    "torchattacks": "torchattacks:PGD(steps=20)",
    "adv_lib": "adv_lib:apgd(n_iter=20, loss_function='ce')",
}


@pytest.mark.parametrize("host", HOSTS)
def test_attacks_of_libraries_aim_or_say_that_they_search_for_misclassification(host):
    pytest.importorskip(host)
    given = INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.4)
    for targets in ((LABELS + 1) % 3, (LABELS + 2) % 3):
        aimed = robust_accuracy(NETWORK, HOSTS[host], *given, criterion=Targeted(targets))
        # A targeted point is misclassified too; untargeted runs end in one of the two classes for each sample.
        assert aimed.robust_accuracy(0.4) < 0.7
        assert not aimed.content["warnings"]
    for criterion in (TopK(2), Targeted("likeliest", k=2)):
        with pytest.warns(robust_ext.RobustExtWarning, match="searches for"):
            result = robust_accuracy(NETWORK, HOSTS[host], *given, criterion=criterion)
        assert criterion.words in result.content["warnings"][0]
        own = robust_accuracy(NETWORK, APGD(), *given, criterion=criterion)
        assert not own.content["warnings"]
        assert own.robust_accuracy(0.4) <= result.robust_accuracy(0.4)


def test_a_run_folder_belongs_to_its_criterion(tmp_path):
    def run(criterion):
        return robust_accuracy(NETWORK, APGD(steps=5), INPUTS, LABELS, LINF, criterion=criterion, out=tmp_path)

    first = run(Targeted((LABELS + 1) % 3))
    assert robust_ext.load_result(tmp_path).content["criterion"] == "the sample's target is predicted"
    assert run(Targeted((LABELS + 1) % 3)) == first
    for other, what in ((Targeted((LABELS + 2) % 3), "other targets"), (TopK(2), "criterion"), (None, "criterion")):
        with pytest.raises(robust_ext.RunFolderError, match=what):
            run(other)


def test_mead_counts_by_the_criterion():
    """Success of an arm is that of its run by itself, judged by sorting the logits of its candidates."""
    given = NETWORK, APGD(), INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.2)
    result = robust_ext.mead(*given, detectors={"spread": spread}, criterion=TopK(2), resamples=0)
    alone = robust_accuracy(*given, criterion=TopK(2)).content["worst_case"][0]["robust"]
    assert result.content["arms"][0]["outcomes"]["found"] == alone.count("0")
    assert 0 < alone.count("0") < len(LABELS)


@pytest.mark.parametrize("criterion", [None, TopK(2), Targeted("next"), Targeted("next", k=2)], ids=repr)
def test_a_tiny_network_by_brute_force(criterion):
    """Of a grid, which points break and are accepted by a detector that sees them before they are rounded, by numpy."""
    draw = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)
    nn.utils.vector_to_parameters(2 * torch.randn(51, generator=draw), network.parameters())
    x, epsilon, limit = torch.rand(20, 2, generator=draw), 0.2, 0.25

    def rounded(x):
        return (x * 8).round() / 8

    def apart(x):
        return (x[..., 0] - x[..., 1]).abs()

    y = network(rounded(x)).argmax(1)
    steps = torch.linspace(-epsilon, epsilon, 81)
    grid = (x[:, None] + torch.cartesian_prod(steps, steps)).clamp(0, 1)

    def adversarial(points):
        order = np.argsort(-network(rounded(points)).numpy(), axis=-1)
        true, target = y.numpy()[:, None], ((y + 1) % 3).numpy()[:, None]
        if criterion is None:
            return order[..., 0] != true
        if isinstance(criterion, TopK):
            return order[..., 2] == true
        return (order[..., : criterion.k] == target[..., None]).any(-1)

    right, broken = ~adversarial(x[:, None])[:, 0], adversarial(grid)
    there = right & (broken & (apart(grid).numpy() <= limit)).any(1)
    model = ThreatModel(norm="linf", epsilon=epsilon)
    detector = robust_ext.as_detector(apart, network)
    detector.threshold = torch.tensor(limit)
    given = {"defense": rounded, "detector": detector, "criterion": criterion, **QUICK}
    content = robust_ext.evaluate(network, x, y, model, **given).content
    flagged = (apart(x) > limit).numpy()
    # The detector saves some of them.
    assert there.sum() < (right & broken.any(1)).sum()
    assert content["detector"]["false_positive_rate"] == flagged.mean()
    assert content["detector"]["accepted_accuracy"] == (right & ~flagged).mean()
    stands = np.array([one == "1" for one in content["worst_case"]["robust"]])
    assert content["clean_accuracy"] == right.mean()
    # What the grid holds is found, up to points that only just are there, and nothing else.
    assert not (~stands & right & ~there).any()
    assert (stands & there).sum() <= 1
