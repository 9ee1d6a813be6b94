"""Evaluations by other criteria: exact distances of linear models, a tiny network by brute force, refusals."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import nn

from robust_ext import (
    AttackRefusedError,
    MultiLabel,
    RobustExtWarning,
    RunFolderError,
    Targeted,
    ThreatModel,
    TopK,
    evaluate,
    load_result,
    mead,
    robust_accuracy,
)
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK

# Bounds that no nearest point reaches.
WIDE = (-20.0, 21.0)


DRAW = torch.Generator().manual_seed(5)
LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).eval().requires_grad_(False)
LINEAR[1].weight.copy_(torch.randn(4, 9, generator=DRAW))
LINEAR[1].bias.copy_(torch.randn(4, generator=DRAW) / 4)
X = torch.rand(12, 1, 3, 3, generator=torch.Generator().manual_seed(6))
Z = LINEAR(X)
Y = Z.argmax(1)
W = LINEAR[1].weight.double().numpy()


def nearest(z, pairs, norm):
    """The size of the least d with ``(w_a - w_b) d >= z_b - z_a`` for all pairs (a, b)."""
    rows = np.array([W[a] - W[b] for a, b in pairs])
    gaps = np.array([z[b] - z[a] for a, b in pairs])
    if norm == "linf":
        size = rows.shape[1]
        ones = np.ones((size, 1))
        inside = [[-rows, np.zeros((len(rows), 1))], [np.eye(size), -ones], [-np.eye(size), -ones]]
        limits = np.r_[-gaps, np.zeros(2 * size)]
        found = linprog(np.r_[np.zeros(size), 1], A_ub=np.block(inside), b_ub=limits, bounds=(None, None))
        return found.fun
    start = np.linalg.pinv(rows) @ gaps
    limits = {"type": "ineq", "fun": lambda d: rows @ d - gaps, "jac": lambda d: rows}
    found = minimize(lambda d: d @ d, start, jac=lambda d: 2 * d, constraints=limits, options={"ftol": 1e-14})
    return found.fun**0.5


def exact_targeted(norm):
    goals = (Y + 1) % 4
    rows = zip(Z.double().numpy(), goals.tolist(), strict=True)
    return np.array([nearest(z, [(t, i) for i in range(4) if i != t], norm) for z, t in rows])


def exact_top_2(norm):
    """Two other classes have to lie above the true one: the nearest of all choices of two."""
    rows = zip(Z.double().numpy(), Y.tolist(), strict=True)
    return np.array(
        [
            min(nearest(z, [(a, y), (b, y)], norm) for a, b in itertools.combinations({*range(4)} - {y}, 2))
            for z, y in rows
        ]
    )


def exact_targeted_top_2(norm):
    """Here the target is the third class, which has to come above two of the three others."""
    rows = zip(Z.double().numpy(), Z.argsort(1)[:, 1].tolist(), strict=True)
    return np.array(
        [
            min(nearest(z, [(t, a), (t, b)], norm) for a, b in itertools.combinations({*range(4)} - {t}, 2))
            for z, t in rows
        ]
    )


def exact_labels(norm, chosen=(0, 1, 2, 3)):
    """The nearest of the hyperplanes of the labels."""
    dual = np.linalg.norm(W, 1 if norm == "linf" else 2, axis=1)
    return (np.abs(Z.double().numpy()) / dual)[:, list(chosen)].min(1)


CASES = {
    "targeted": (Targeted("next"), Y, exact_targeted),
    "top 2": (TopK(2), Y, exact_top_2),
    "targeted top 2": (Targeted("likeliest", k=2), Y, exact_targeted_top_2),
    "labels": (MultiLabel(), (Z > 0).long(), exact_labels),
    "two labels": (MultiLabel((1, 3)), (Z > 0).long(), lambda norm: exact_labels(norm, (1, 3))),
}


def smallest(case, norm, attack):
    criterion, labels, _ = CASES[case]
    model = ThreatModel(norm=norm, epsilon=20.0, bounds=WIDE)
    result = robust_accuracy(LINEAR, attack, X, labels, model, criterion=criterion)
    assert result.content["clean_accuracy"] == 1
    return np.array(result.content["attacks"][0]["distances"], dtype=float)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("case", CASES)
def test_boundary_search_finds_the_nearest_point(case, norm):
    exact, found = CASES[case][2](norm), smallest(case, norm, BoundarySearch(budget=1500, hops=20))
    # None is nearer than the nearest, and these are within one per cent of it.
    assert (found >= exact * (1 - 1e-4)).all()
    np.testing.assert_allclose(np.median(found / exact), 1, atol=0.01)
    assert (found <= exact * 1.1).all()


@pytest.mark.parametrize("case", ["targeted", "top 2", "targeted top 2"])
def test_carlini_wagner_finds_the_nearest_point(case):
    # Made for bounds as wide as an image's: its steps are in their units.
    exact, found = CASES[case][2]("linf"), smallest(case, "linf", CarliniWagnerLinf(steps=150))
    assert (found >= exact * (1 - 1e-4)).all()
    assert np.median(found / exact) < 1.35


@pytest.mark.parametrize(
    "attack", [APGD(steps=100, restarts=3, loss="margin"), Square(queries=2000)], ids=lambda one: one.name
)
@pytest.mark.parametrize("case", CASES)
def test_success_begins_at_the_exact_distance(case, attack):
    criterion, labels, exact = CASES[case]
    exact = np.sort(exact("linf"))
    budgets = [float(exact[3] + exact[4]) / 2, float(exact[8] + exact[9]) / 2, float(exact[-1] * 1.2)]
    model = ThreatModel(norm="linf", epsilon=budgets[-1], bounds=WIDE)
    result = robust_accuracy(LINEAR, attack, X, labels, model, criterion=criterion, epsilons=budgets)
    robust = [round(12 * result.robust_accuracy(one)) for one in budgets]
    # No verified candidate is nearer than the exact distance; the attack misses two samples at most.
    assert all(true <= one <= true + 2 for one, true in zip(robust, [8, 3, 0], strict=True)), robust


@pytest.mark.parametrize("case", ["top 2", "labels"])
def test_decisions_alone_suffice(case):
    exact, found = CASES[case][2]("linf"), smallest(case, "linf", RayS(queries=2000, stop=False, tolerance=1e-5))
    assert (found >= exact * (1 - 1e-4)).all()
    assert np.median(found / exact) < 1.1


def test_a_tiny_network_by_brute_force():
    """Of a grid over two inputs, which points are adversarial, by numpy; no attack finds what is not there."""
    draw = torch.Generator().manual_seed(8)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    nn.utils.vector_to_parameters(torch.randn(51, generator=draw), network.parameters())
    network.requires_grad_(False)
    x = torch.rand(20, 2, generator=draw)
    y, epsilon = network(x).argmax(1), 0.1
    steps = torch.linspace(-epsilon, epsilon, 41)
    grid = torch.cartesian_prod(steps, steps)
    near = network((x[:, None] + grid).clamp(0, 1)).numpy()
    order = np.argsort(-near, axis=2)
    wanted = {
        TopK(2): (order[:, :, 2] == y.numpy()[:, None]).any(1),
        Targeted("next"): (order[:, :, 0] == ((y + 1) % 3).numpy()[:, None]).any(1),
        Targeted("next", k=2): (order[:, :, :2] == ((y + 1) % 3).numpy()[:, None, None]).any((1, 2)),
    }
    last = network(x).argmin(1).numpy() == ((y + 1) % 3).numpy()
    model = ThreatModel(norm="linf", epsilon=epsilon)
    for criterion, there in wanted.items():
        result = robust_accuracy(network, APGD(steps=50, loss="margin"), x, y, model, criterion=criterion)
        robust = np.array([one == "1" for one in result.content["worst_case"][0]["robust"]])
        # Of three classes, the last alone is not among the top 2 yet.
        right = last if criterion.aims and criterion.ranks else np.ones(20, dtype=bool)
        assert result.content["clean_accuracy"] == right.mean()
        # What the grid holds is found, up to points that only just are there.
        assert (~robust & right & there).sum() >= (right & there).sum() - 1
        assert (robust | ~right | there).sum() >= 19


HOSTS = {
    "foolbox": "foolbox:LinfPGD(steps=20)",
    "art": "art:ProjectedGradientDescent(max_iter=20)",
    "torchattacks": "torchattacks:PGD(steps=20)",
    "adv_lib": "adv_lib:apgd(n_iter=20, loss_function='ce')",
}


@pytest.mark.parametrize("host", HOSTS)
def test_attacks_of_libraries_aim_or_say_that_they_search_for_misclassification(host):
    pytest.importorskip(host)
    model = ThreatModel(norm="linf", epsilon=0.4)
    for targets in ((LABELS + 1) % 3, (LABELS + 2) % 3):
        aimed = robust_accuracy(NETWORK, HOSTS[host], INPUTS, LABELS, model, criterion=Targeted(targets))
        # A targeted point is misclassified too; untargeted runs end in one of the two classes for each sample.
        assert aimed.robust_accuracy(0.4) < 0.7
        assert not aimed.content["warnings"]
    for criterion in (TopK(2), Targeted("likeliest", k=2)):
        with pytest.warns(RobustExtWarning, match="searches for"):
            result = robust_accuracy(NETWORK, HOSTS[host], INPUTS, LABELS, model, criterion=criterion)
        assert criterion.words in result.content["warnings"][0]
        own = robust_accuracy(NETWORK, APGD(), INPUTS, LABELS, model, criterion=criterion)
        assert not own.content["warnings"]
        assert own.robust_accuracy(0.4) <= result.robust_accuracy(0.4)


@pytest.mark.parametrize(
    ("attack", "criterion"),
    [
        ("robust_ext:RayS()", Targeted()),
        ("robust_ext:ObjectivePGD(objective='kl')", Targeted()),
        ("foolbox:LinfDeepFoolAttack()", TopK(2)),
        (lambda model, x, y: x, Targeted("next")),
    ],
)
def test_attacks_that_cannot_are_refused(attack, criterion):
    with pytest.raises(AttackRefusedError):
        robust_accuracy(NETWORK, attack, INPUTS, LABELS, LINF, criterion=criterion)


def test_a_run_folder_belongs_to_its_criterion(tmp_path):
    def run(criterion):
        return robust_accuracy(NETWORK, APGD(steps=5), INPUTS, LABELS, LINF, criterion=criterion, out=tmp_path)

    first = run(Targeted((LABELS + 1) % 3))
    assert load_result(tmp_path).content["criterion"] == "the sample's target is predicted"
    assert run(Targeted((LABELS + 1) % 3)) == first
    for other, what in ((Targeted((LABELS + 2) % 3), "other targets"), (TopK(2), "criterion"), (None, "criterion")):
        with pytest.raises(RunFolderError, match=what):
            run(other)


@pytest.mark.parametrize("criterion", [TopK(2), Targeted("next"), MultiLabel()], ids=repr)
def test_evaluate(criterion):
    labels = (NETWORK(INPUTS) > 0).long() if isinstance(criterion, MultiLabel) else LABELS
    result = evaluate(NETWORK, INPUTS, labels, LINF, criterion=criterion, budget="quick", planted=0)
    best = robust_accuracy(NETWORK, BoundarySearch(), INPUTS, labels, LINF, criterion=criterion)
    assert result.robust_accuracy <= best.robust_accuracy(0.1)
    assert result.content["criterion"] == criterion.words


def test_mead_counts_by_the_criterion():
    """Success of an arm is that of its run by itself, judged by sorting the logits of its candidates."""
    spread, model = {"spread": lambda x: x.flatten(1).std(1)}, ThreatModel(norm="linf", epsilon=0.2)
    options = {"detectors": spread, "criterion": TopK(2), "resamples": 0}
    result = mead(NETWORK, APGD(), INPUTS, LABELS, model, **options)
    alone = robust_accuracy(NETWORK, APGD(), INPUTS, LABELS, model, criterion=TopK(2))
    broken = sum(one == "0" for one in alone.content["worst_case"][0]["robust"])
    assert 0 < broken < len(LABELS)
    assert result.content["arms"][0]["outcomes"]["found"] == broken
