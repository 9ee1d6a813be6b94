"""Evaluations with limits of single entries, against every point of fine grids and every valid input of coarse ones."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import ThreatModel, binarization_test, robust_accuracy
from robust_ext.core.errors import RobustExtError, RobustExtWarning
from robust_ext.core.target import Target
from robust_ext.engine.task import Check, Task, drive, verified
from robust_ext.engine.verify import verify
from robust_ext.registry.attack import as_attack
from tests.libraries import library

LOW, HIGH = np.array([0.0, -2, 0, 10]), np.array([1.0, 2, 5, 20])
BUDGETS = np.array([0.2, 0.8, 1, 0])
SIZES, ORDERS = {"linf": 0.5, "l2": 0.8, "l1": 1.0}, {"linf": np.inf, "l2": 2, "l1": 1}
MASK = [True, True, False, True]
OWN = (
    "robust_ext:APGD(steps=30, loss='margin', restarts=2)",
    "robust_ext:APGD(steps=30, loss='margin', stop_early=True)",
    "robust_ext:ObjectivePGD(steps=20)",
    "robust_ext:Square(queries=100)",
    "robust_ext:BoundarySearch(budget=150)",
    "robust_ext:LinearRegion(budget=150)",
    "robust_ext:RandomSearch",
    "robust_ext:RayS(queries=100)",
    "robust_ext:CarliniWagnerLinf(steps=20, initial_const=0.1, const_factor=8)",
    "robust_ext:AdaptedAttack(attack='robust_ext:APGD(steps=20)', eot=2, keep_best=True, projected=True)",
)


class Table(nn.Module):
    """A small network on columns of different units."""

    def __init__(self, seed, columns=4, gain=4.0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(columns, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        with torch.no_grad():
            for layer in self.net[::2]:
                layer.weight.mul_(gain)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.net((x - torch.tensor(LOW).float()) / torch.tensor(HIGH - LOW).float())


def samples(net, count, seed=0):
    x = torch.tensor(LOW + (HIGH - LOW) * np.random.default_rng(seed).random((count, 4)), dtype=torch.float32)
    return x, net(x).argmax(1)


def table_model(norm, **more):
    return ThreatModel(norm=norm, epsilon=BUDGETS * SIZES[norm], bounds=(LOW, HIGH), **more)


def robust(result):
    return [one == "1" for one in result.content["worst_case"][0]["robust"]]


def robust_by_grid(net, x, y, *, norm, mask, points=61):
    """Which samples no point of a grid breaks, computed from budgets, bounds and mask alone."""
    found, reach = [], BUDGETS * SIZES[norm] * mask
    for row, label in zip(x.double().numpy(), y.tolist(), strict=True):
        low, high = np.maximum(row - reach, LOW), np.minimum(row + reach, HIGH)
        axes = [np.linspace(a, b, points) if b > a else np.array([a]) for a, b in zip(low, high, strict=True)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 4)
        moved = (grid - row)[:, reach > 0] / reach[reach > 0]
        grid = grid[np.linalg.norm(moved, ord=ORDERS[norm], axis=1) <= 1]
        found.append(bool((net(torch.tensor(grid, dtype=torch.float32)).argmax(1) == label).all()))
    return found


@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("mask", [None, MASK])
def test_own_attacks_find_what_every_point_of_a_grid_does(norm, mask):
    net = Table(4)
    x, y = samples(net, 30)
    expected = robust_by_grid(net, x, y, norm=norm, mask=np.ones(4) if mask is None else np.array(mask))
    assert 5 <= expected.count(False) <= 25
    assert robust(robust_accuracy(net, OWN[0], x, y, table_model(norm, mask=mask))) == expected


def attempted(net, attack, x, y, model, *, seed=0):
    """What the engine makes of one attack."""
    target = Target(module=net, bounds=model.bounds, classes=3, input_shape=tuple(x.shape[1:]), device=x.device)

    def work():
        task = Task(attack=as_attack(attack), target=target, inputs=x, labels=y, threat_model=model, stream=(seed,))
        return (yield task, Check(module=net, name="attack"))

    return drive(verified(work())).verified


def allowed(points, x, *, budgets, mask, norm, step=None):
    """Which points are allowed, by numpy alone."""
    points, x = points.double().numpy(), x.double().numpy()
    free, d = mask & (budgets > 0), points - x
    fine = np.linalg.norm(d[:, free] / budgets[free], ord=ORDERS[norm], axis=1) <= 1 + 1e-4
    fine &= np.abs(d[:, ~free]).max(1, initial=0) == 0
    fine &= ((points >= LOW - 1e-6 * np.abs(LOW)) & (points <= HIGH + 1e-6 * np.abs(HIGH))).all(1)
    if step is not None:
        off = (points - LOW) / step
        fine &= (np.abs(off - off.round()) < 1e-4).all(1)
    return fine


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    norm=st.sampled_from([*SIZES]),
    attack=st.sampled_from(OWN),
    budgets=st.lists(st.just(0.0) | st.floats(0.05, 1.5), min_size=4, max_size=4).filter(any),
    mask=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    levels=st.none() | st.integers(3, 9),
)
def test_nothing_outside_what_is_allowed_ever_counts(seed, norm, attack, budgets, mask, levels):
    budgets, mask = np.array(budgets) * (HIGH - LOW) / 3, np.array(mask)
    if not (budgets * mask).any():
        mask = budgets > 0
    norm = norm if norm in as_attack(attack).traits.norms else "linf"
    net = Table(seed % 7)
    x, _ = samples(net, 6, seed)
    step = None if levels is None else (HIGH - LOW) / (levels - 1)
    if step is not None:
        x = torch.tensor(LOW + ((x.numpy() - LOW) / step).round() * step, dtype=torch.float32)
    y = net(x).argmax(1)
    model = ThreatModel(norm=norm, epsilon=budgets, bounds=(LOW, HIGH), mask=mask, levels=levels)
    # Whatever is handed in: points anywhere, of which only allowed ones may count.
    anywhere = x + torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) * torch.tensor(HIGH - LOW).float()
    judged = verify(anywhere, x, y, module=net, threat_model=model, attack="any")
    for found in (attempted(net, attack, x, y, model, seed=seed), judged):
        counts = np.array([one == "found" for one in found.outcomes])
        assert allowed(found.candidates, x, budgets=budgets, mask=mask, norm=norm, step=step)[counts].all()


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize("attack", ["foolbox:L2PGD", "torchattacks:PGD(steps=20)", "art:ProjectedGradientDescent"])
def test_attacks_of_libraries_stay_in_the_limits_and_the_result_says_how(attack):
    library(attack.partition(":")[0])
    net, norm = Table(4), "l2" if "L2" in attack else "linf"
    with pytest.warns(RobustExtWarning, match="one epsilon"):
        result = robust_accuracy(net, attack, *samples(net, 30), table_model(norm, mask=MASK))
    (entry,) = result.content["attacks"]
    # Everything it returned was valid.
    assert set(entry["outcomes"]) <= {"found", "not_adversarial"}
    assert entry["outcomes"].get("found", 0) > 0


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.2), ("linf", 0.4), ("l2", 0.35), ("l1", 0.45)])
def test_levels_find_what_every_valid_input_does(norm, epsilon):
    levels, count, net = 6, 40, Table(3, columns=3).net
    x = torch.randint(0, levels, (count, 3), generator=torch.Generator().manual_seed(1)) / (levels - 1)
    y = net(x).argmax(1)

    def unbroken(points):
        classes = net(points).argmax(1)
        near = [torch.linalg.vector_norm(points - row, ord=ORDERS[norm], dim=1) <= epsilon + 1e-6 for row in x]
        return [bool((classes[one] == label).all()) for one, label in zip(near, y, strict=True)]

    model = ThreatModel(norm=norm, epsilon=epsilon, levels=levels)
    with pytest.warns(RobustExtWarning, match="rounded"):
        result = robust_accuracy(net, [OWN[0], "robust_ext:RandomSearch"], x, y, model)
    assert robust(result) == unbroken(torch.tensor(list(itertools.product(range(levels), repeat=3))) / (levels - 1))
    # The second number is that of inputs of any value: at most what a fine grid leaves.
    (row,), fine = result.content["worst_case"], torch.cartesian_prod(*[torch.linspace(0, 1, 61)] * 3)
    assert row["robust_accuracy"] >= row["without_rounding"]
    assert abs(row["without_rounding"] * count - sum(unbroken(fine))) <= 1


def test_repair_finds_valid_inputs_that_rounding_alone_loses():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    x = torch.randint(0, 16, (60, 48), generator=torch.Generator().manual_seed(2)) / 15
    y, model = net(x).argmax(1), ThreatModel(norm="linf", epsilon=0.2, levels=16)
    # Its points lie just beyond the boundary, on whose other side half of their rounded ones are.
    attack = "robust_ext:BoundarySearch(budget=150)"
    relaxed = attempted(net, attack, x, y, model.scalar)
    rounded = verify(relaxed.candidates, x, y, module=net, threat_model=model, attack="rounded")
    repaired = attempted(net, attack, x, y, model)
    alone, found, possible = (one.outcomes.count("found") for one in (rounded, repaired, relaxed))
    assert alone < 0.8 * found
    assert found > 0.95 * possible
    # Every sample that rounding alone undoes is named.
    assert alone + rounded.outcomes.count("undone_by_rounding") == possible
    steps = repaired.candidates[torch.tensor([one == "found" for one in repaired.outcomes])] * 15
    assert (steps - steps.round()).abs().max() < 1e-5


def test_kinds_find_what_every_valid_row_does():
    net = Table(2, gain=3.0).net
    rows = torch.stack([torch.cat([n[None], colour]) for n in torch.arange(4.0) for colour in torch.eye(3)])
    y, kinds = net(rows).argmax(1), ["integer", *["one-hot:colour"] * 3]
    for budgets, near in (
        ([1.0, 0.5, 0.5, 0.5], lambda a, b: abs(a[0] - b[0]) <= 1 and (a[1:] == b[1:]).all()),
        ([1.0, 1, 1, 1], lambda a, b: abs(a[0] - b[0]) <= 1),
        ([0.4, 1, 1, 1], lambda a, b: a[0] == b[0]),
    ):
        model = ThreatModel(norm="linf", epsilon=budgets, bounds=(np.zeros(4), np.array([3.0, 1, 1, 1])), kinds=kinds)
        with pytest.warns(RobustExtWarning):
            result = robust_accuracy(net, [*OWN[:2], "robust_ext:RandomSearch"], rows, y, model)
        assert robust(result) == [all(y[j] == y[i] for j in range(12) if near(rows[i], rows[j])) for i in range(12)]


def test_a_changed_mask_is_no_resumption(tmp_path):
    net = Table(4)
    x, y = samples(net, 4)
    for name, run in (
        ("accuracy", lambda *given, **more: robust_accuracy(net, OWN[2], x, y, *given, **more)),
        ("planted", lambda *given, **more: binarization_test(net, OWN[2], x, *given, **more)),
    ):
        begun = run(table_model("linf", mask=MASK), out=tmp_path / name).content
        again = run(table_model("linf", mask=torch.tensor(MASK)), out=tmp_path / name).content
        assert again["time"]["resumed"] > 0
        assert again["settings"]["entries"] == begun["settings"]["entries"]
        with pytest.raises(RobustExtError):
            run(table_model("linf", mask=[True, False, True, True]), out=tmp_path / name)
