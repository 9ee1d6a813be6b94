"""What is kept of an attack's queries, against a closed form, a brute force and counts by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.recorder import record_queries
from robust_ext.engine.trace import COLUMNS, LONGEST_CURVE, mean_curve, plain_curve

EPSILON = 0.1
LINF = ThreatModel(norm="linf", epsilon=EPSILON)


class Linear(nn.Module):
    """Three logits: 0, a . x + b, and one that never matters."""

    def __init__(self, size=4, scale=1.0):
        super().__init__()
        self.register_buffer("a", scale * torch.linspace(-1, 1, size))

    def forward(self, x):
        along = (x.flatten(1).to(self.a) * self.a).sum(1)
        return torch.stack([torch.zeros_like(along), along - 0.5 * self.a.abs().sum(), torch.full_like(along, -9e4)], 1)


def target_of(module, shape=(4,)):
    return Target(module=module, bounds=(0.0, 1.0), classes=3, input_shape=shape, device=torch.device("cpu"))


def watching(module, inputs, *, norm="linf", epsilon=EPSILON, labels=None):
    labels = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
    target = target_of(module, tuple(inputs.shape[1:]))
    return record_queries(target, inputs, labels, ThreatModel(norm=norm, epsilon=epsilon))


def recorded(module, inputs, queries, *, labels=None, **more):
    labels = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
    with watching(module, inputs, labels=labels, **more) as recorder:
        queries(module, inputs.clone(), labels)
    trace = recorder.trace()
    assert trace.values.shape == (len(inputs), len(COLUMNS))
    return trace.rows(), trace.curve


def ascend(steps, size):
    def run(module, x, labels):
        clean, point = x, x
        for _ in range(steps):
            point = point.detach().requires_grad_()
            loss = nn.functional.cross_entropy(module(point), labels, reduction="sum")
            gradient = torch.autograd.grad(loss, point)[0]
            point = clean + (point + size * gradient.sign() - clean).clamp(-EPSILON, EPSILON)
        module(point.detach())

    return run


def test_every_number_of_a_sign_attack_on_a_linear_network_in_closed_form():
    module, inputs = Linear(), torch.full((2, 4), 0.5)
    inputs[1] += 0.2 * module.a.sign()  # Its margin is 0.4 times the sum of |a|, above what the ball can change.
    total = float(module.a.abs().sum())
    (first, second), curve = recorded(module, inputs, ascend(20, EPSILON / 8))
    # A step moves the margin by the step times the sum of |a|, until the edge of the ball after eight of them.
    for row, start in ((first, -0.5 * total), (second, -0.5 * total + 0.2 * total)):
        zeros = "cut zero non_finite zero_loss other_label turns late recent saturated step back held fixed elsewhere"
        expected = dict.fromkeys([*zeros.split(), "outside"], 0) | {"queries": 21, "graphs": 20, "gradients": 20}
        expected |= {"first": start, "lowest": start, "scale": 9e4, "adversarial_at": None, "batch_queries": 21}
        expected |= dict.fromkeys(("best", "last"), start + EPSILON * total) | {"longest": 0.125}
        expected |= dict.fromkeys(("reach", "end", "follows", "uses", "grid", "unmoved"), 1)
        others = ("best_at", "low", "high", "slope", "shift")
        assert {name: value for name, value in row.items() if name not in others} == pytest.approx(expected, abs=1e-3)
        assert row["best_at"] in range(8, 21)
        last = inputs[0 if row is first else 1] + EPSILON * module.a.sign()
        assert (row["low"], row["high"]) == pytest.approx((float(last.min()), float(last.max())), abs=1e-3)
    assert [point["query"] for point in curve] == list(range(21))
    assert curve[4]["distance"] == pytest.approx(0.5, abs=1e-3)
    assert curve[0]["margin"] == pytest.approx(-0.4 * total, abs=1e-3)
    assert curve[20]["gradient"] is None
    assert all(point["gradient"] > 0 for point in curve[:20])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    norm=st.sampled_from(["linf", "l2", "l1"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_numbers_of_queries_of_parts_of_the_batch_by_brute_force(seed, norm, dtype):
    """Subsets, repeats and permutations of rows, out of the ball and the bounds: each query belongs to its row."""
    draw = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).requires_grad_(False)
    # Far enough apart to be told from one another at any of the distances below.
    inputs = torch.eye(12)[:4].reshape(4, 3, 2, 2) * 0.9 + 0.05
    labels = torch.randint(5, (4,), generator=draw)
    calls, asked = [], {row: [] for row in range(4)}
    for _ in range(12):
        rows = torch.randint(4, (int(torch.randint(1, 8, (), generator=draw)),), generator=draw)
        # A batch of as many rows as there are inputs counts as all of them in order.
        rows = torch.arange(4) if len(rows) == 4 else rows
        points = inputs[rows] + 0.2 * EPSILON * torch.randn(inputs[rows].shape, generator=draw)
        calls.append(points.to(dtype))
        for row, point in zip(rows.tolist(), points, strict=True):
            asked[row].append(point)
    traces, curve = recorded(
        module.to(dtype), inputs, lambda module, *_: [module(one) for one in calls], norm=norm, labels=labels
    )
    model = ThreatModel(norm=norm, epsilon=EPSILON)
    for row, points in asked.items():
        if not points:
            assert traces[row] is None
            continue
        away = torch.cat([model.distance(point[None], inputs[row : row + 1]) for point in points]) / EPSILON
        logits = torch.cat([module(point[None].to(dtype)) for point in points]).double()
        others = logits.clone()
        others[:, labels[row]] = -torch.inf
        margins = others.amax(1) - logits[:, labels[row]]
        stacked = torch.stack(points)
        inside = (away <= 1 + model.tolerance(12) / EPSILON) & ((stacked >= 0) & (stacked <= 1)).flatten(1).all(1)
        found = traces[row]
        assert (found["queries"], found["outside"]) == (len(points), int((~inside).sum()))
        assert found["reach"] == pytest.approx(float(away.max()), rel=1e-3)
        assert found["scale"] == pytest.approx(float(logits.abs().max()), rel=1e-3)
        best = float(margins.where(inside, -torch.inf).max())
        assert found["best"] == (pytest.approx(best, rel=1e-3, abs=1e-5) if math.isfinite(best) else None)
        adversarial = (inside & (margins > 0)).nonzero().flatten().tolist()
        assert (found["adversarial_at"] is None) == (not adversarial)
    queried = [point for points in asked.values() for point in points]
    assert sum(trace["queries"] for trace in traces if trace) == len(queried)
    assert len(curve) <= max(map(len, asked.values()))


def test_many_queries_leave_a_short_curve_and_what_the_last_tenth_gained():
    module = Linear()

    def query(module, x, labels):
        for number in range(1000):
            module(x + EPSILON * number / 999 * module.a.sign())

    (row,), curve = recorded(module, torch.full((1, 4), 0.5), query)
    assert len(curve) <= LONGEST_CURVE
    assert curve[-1]["query"] >= 950
    # Steady progress: a tenth of it all, up to the spacing of what is kept.
    assert row["late"] == pytest.approx(0.1 * EPSILON * float(module.a.abs().sum()), rel=0.2)


def test_queries_that_are_no_batch_of_inputs_are_let_be_and_no_hook_stays():
    module, inputs = Linear(), torch.full((2, 4), 0.5)
    with watching(module, inputs) as recorder:
        torch.vmap(lambda one: module(one[None])[0])(inputs)
        torch.func.grad(lambda one: module(one[None]).sum())(inputs[0])
        module(torch.zeros(0, 4))
        with pytest.raises(RuntimeError):
            module(torch.zeros(1, 9))
    assert recorder.witnesses.points is None
    trace = recorder.trace()
    assert (trace.rows(), trace.curve) == ([None, None], [])
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_what_another_process_states_is_a_curve_or_refused_and_means_are_over_what_is_there():
    for curve in (None, 3, [3], [{"query": "1"}], [{"query": 1}] * (LONGEST_CURVE + 1)):
        with pytest.raises(ValueError, match="curve"):
            plain_curve(curve)
    assert plain_curve([{"query": 1, "margin": float("nan"), "other": "x"}])[0]["margin"] is None
    point = {"query": 0, "margin": 1.0, "distance": 0.0, "gradient": None, "adversarial": 0.0}
    found = mean_curve([[point, {**point, "query": 1}], [{**point, "margin": 2.0}]])
    assert [(one["query"], one["margin"]) for one in found] == [(0, 1.5), (1, 1.0)]


class BreaksAbove(nn.Module):
    def forward(self, x):
        first = x.flatten(1)[:, :1]
        return torch.where(first > 0.5, torch.nan, torch.cat([first, -first], 1))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_of_points_without_finite_logits_the_nearest_in_the_ball_is_kept(norm):
    """In a full batch by row; in other batches for every input in whose ball it lies; as they were queried."""
    inputs, module = torch.tensor([[0.4, 0.4], [0.45, 0.4], [0.1, 0.4]]), BreaksAbove()
    with watching(module, inputs, norm=norm, epsilon=0.2) as recorder:
        module(inputs)
        assert recorder.witnesses.points is None
        points = torch.tensor([[0.58, 0.4], [0.99, 0.4], [0.55, 0.4]])
        module(points)
        points.zero_()
        assert torch.equal(recorder.witnesses.points[0], torch.tensor([0.58, 0.4]))
        assert recorder.witnesses.points[1:].isnan().all()
        # The first two lie in both balls, the third in none, the fourth out of bounds.
        module(torch.tensor([[0.53, 0.4], [0.56, 0.4], [0.9, 0.9], [0.55, -0.01]]))
        module(torch.tensor([[0.54, 0.4], [0.52, 0.4], [0.3, 0.4]]))
    module(torch.tensor([[0.501, 0.4]]))
    assert torch.equal(recorder.witnesses.points[:2], torch.tensor([[0.53, 0.4], [0.52, 0.4]]))
    assert recorder.witnesses.points[2].isnan().all()


@pytest.mark.parametrize(("value", "added"), [(0.45, "$"), (0.55, "; before that, the model returned NaN .*fix")])
def test_an_attack_that_raises_after_it_met_them_is_not_blamed_alone(value, added):
    def raising(module, x, labels):
        module(torch.full((1, 2), value))
        raise AttackError("attack: raised ValueError")

    with pytest.raises(AttackError, match=f"^attack: raised ValueError{added}"):
        recorded(BreaksAbove(), torch.full((1, 2), 0.45), raising)
