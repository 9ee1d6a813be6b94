"""Logits of binarized problems by hand, and which problem a row belongs to: compared with each problem alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.core.errors import ModelError
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.models.binarized import BinarizedClassifier, identifiable

SIZE, FEATURES = 6, 4


def network():
    with seeded_globals(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(SIZE, FEATURES), nn.Tanh()).eval()


def parts(count):
    generator = torch.Generator().manual_seed(count)
    made = {"references": torch.rand(count, 2, 3, generator=generator)}
    made |= {name: torch.randn(count, FEATURES, generator=generator) for name in ("weight", "anchor")}
    made |= {name: torch.randn(count, generator=generator) for name in ("threshold", "scale", "offset")}
    return {**made, "scale": made["scale"].sigmoid() + 0.5}


def classifier(count, rows="any"):
    return BinarizedClassifier(network(), **parts(count), batching=rows)


def single(made, i, **options):
    """Problem i alone."""
    return BinarizedClassifier(network(), **{name: part[i : i + 1] for name, part in made.items()}, **options)


def by_hand(x, problem, count):
    """The logits of one row in plain float64 arithmetic."""
    p = {name: part.double()[problem].tolist() for name, part in parts(count).items() if name != "references"}
    with torch.no_grad():
        features = network().double()(x[None].double())[0].tolist()
    along = sum((f - a) * w for f, a, w in zip(features, p["anchor"], p["weight"], strict=True))
    signed = p["scale"] * (along - p["threshold"])
    return [p["offset"] - signed, p["offset"] + signed]


@pytest.mark.parametrize("rows", ["full", "any"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_logits_and_gradients_are_those_of_problems_by_hand_and_alone(rows, count):
    made, module = parts(count), classifier(count, rows)
    x = made["references"] + 0.01
    expected = torch.tensor([by_hand(x[i], i, count) for i in range(count)])
    assert module(x).dtype == torch.float32
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    x.requires_grad_()
    loss = nn.functional.cross_entropy(module(x), torch.zeros(count, dtype=torch.int64), reduction="sum")
    (together,) = torch.autograd.grad(loss, x)
    for i in range(count):
        row = x.detach()[i : i + 1].requires_grad_()
        loss = nn.functional.cross_entropy(single(made, i, batching=rows)(row), torch.zeros(1).long())
        (gradient,) = torch.autograd.grad(loss, row)
        torch.testing.assert_close(gradient[0], together[i])
        assert float(gradient.abs().max()) > 0
    if rows == "full":
        assert module.problems(x) is None
        for other in (0, count - 1, count + 1, 2 * count):
            with pytest.raises(ModelError, match=rf"got a batch of {other} rows, expected the {count} problem"):
                module(torch.rand(other, 2, 3))


def test_one_problem_takes_every_row():
    module, x = BinarizedClassifier(network(), **parts(1), batching="auto"), torch.rand(9, 2, 3) * 100
    assert module.problems(x).tolist() == [0] * 9
    torch.testing.assert_close(module(x), torch.tensor([by_hand(row, 0, 1) for row in x]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_other_types_give_float32(dtype):
    class Cast(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :FEATURES].to(dtype)

    made = parts(2)
    found = BinarizedClassifier(Cast(), **made)(made["references"])
    assert found.dtype == torch.float32
    rounded = made["references"].flatten(1)[:, :FEATURES].to(dtype).float()
    signed = made["scale"] * (((rounded - made["anchor"]) * made["weight"]).sum(1) - made["threshold"])
    torch.testing.assert_close(found, torch.stack([made["offset"] - signed, made["offset"] + signed], 1))


@pytest.mark.parametrize("distance", [1e-3, 3e-5])
def test_references_that_are_much_alike_are_distinguished(distance):
    """Close references far from the origin: what tells them apart is less than a float32 of their squared norms."""
    references = torch.rand(1, 784, generator=torch.Generator().manual_seed(0)).repeat(3, 1) * 3 - 1
    references[1, 7] += distance
    references[2, 300] += distance
    threat_model = ThreatModel(norm="linf", epsilon=distance / 10, bounds=(-1, 3))
    assert identifiable(references, threat_model)
    # Only the problems of its rows matter.
    rows = {name: torch.zeros(3) for name in ("threshold", "scale", "offset")}
    flat = {"weight": torch.ones_like(references), "anchor": references}
    module = BinarizedClassifier(nn.Identity(), references=references, norm="linf", **flat, **rows)
    assert module.problems(references).tolist() == [0, 1, 2]
    for i in range(3):
        assert module.problems(threat_model.sample_corners(references[i], 30, key=i)).tolist() == [i] * 30


def worst_margin(references, norm, epsilon):
    """How much nearer a point of a ball is to its own reference than to another, at the least that a search finds.

    The search tries, for each pair, the step in the ball that goes furthest towards the other reference, and random
    ones; the bounds are left open, as :func:`identifiable` leaves them.
    """
    free, least = ThreatModel(norm=norm, epsilon=epsilon, bounds=(-100, 100)), float("inf")
    for i, j in itertools.permutations(range(len(references)), 2):
        own, other = references[i].double().flatten(), references[j].double().flatten()
        towards = epsilon * (other - own) / lengths(norm, (other - own)[None]).clamp_min(1e-300)
        draws = (free.sample_inner, free.sample_surface, free.sample_corners)
        points = [draw(references[i].flatten(), 100, key=i * 10 + j).double() for draw in draws]
        at = torch.cat([(own + towards)[None], *points])
        least = min(least, float((lengths(norm, at - other) - lengths(norm, at - own)).min()))
    return least


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NORMS), st.floats(0.01, 1.5), st.integers(2, 4), st.integers(1, 6), st.integers(0, 10_000))
def test_identifiable_agrees_with_a_search_over_the_balls(norm, epsilon, count, size, seed):
    references = torch.rand(count, 1, size, generator=torch.Generator().manual_seed(seed))
    margin = worst_margin(references, norm, epsilon)
    # Refused only where a point is nearer to another reference, or within the slack of a thousandth.
    allowed = identifiable(references, ThreatModel(norm=norm, epsilon=epsilon))
    assert margin > 0 if allowed else margin < 0.01 * epsilon


@pytest.mark.parametrize(("norm", "distance"), [("linf", 1.0), ("l2", 1.25**0.5), ("l1", 1.5)])
def test_the_limit_of_identifiable_is_half_the_distance(norm, distance):
    references, wide = torch.tensor([[0.0, 0.0, 0.0], [1.0, -0.5, 0.0]]), ThreatModel(norm=norm, epsilon=100)
    assert identifiable(references, ThreatModel(norm=norm, epsilon=distance / 2 * 0.998))
    assert not identifiable(references, ThreatModel(norm=norm, epsilon=distance / 2))
    assert identifiable(references[:1], wide)
    assert identifiable(references[:0], wide)
    threat_model, drawn = ThreatModel(norm=norm, epsilon=1e-6), torch.rand(4, 1, 3, generator=stream(1))
    assert identifiable(drawn, threat_model)
    assert not identifiable(torch.cat([drawn, drawn[1:2]]), threat_model)


@st.composite
def planted_cases(draw):
    """A classifier of problems in random bounds, each of them alone, and a generator."""
    norm, count = draw(st.sampled_from(NORMS)), draw(st.integers(2, 5))
    low, width = draw(st.sampled_from([(0.0, 1.0), (-3.0, 6.0), (0.0, 255.0)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    made = {**parts(count), "references": torch.rand(count, 2, 3, generator=generator) * width + low}
    module = BinarizedClassifier(network(), **made, batching="auto", norm=norm)
    return module, made["references"], [single(made, i) for i in range(count)], generator


def lengths(norm, steps):
    """By hand, of rows ``(n, ...)``."""
    values = steps.double().abs().flatten(1)
    return {"linf": values.amax(1), "l2": values.square().sum(1).sqrt(), "l1": values.sum(1)}[norm]


def half_way(norm, references, i):
    """Half the distance of reference i from the next one."""
    others = [j for j in range(len(references)) if j != i]
    return float(lengths(norm, references[others] - references[i]).min()) / 2


def check_alone(module, singles, x, order, atol=1e-3):
    wanted = torch.cat([singles[i](row[None]) for row, i in zip(x, order, strict=True)])
    torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=atol)


@settings(max_examples=150, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_batches_of_near_rows_get_their_own_readouts_in_any_order(case, data):
    module, references, singles, generator = case
    order = data.draw(
        st.permutations(range(len(references))) | st.lists(st.integers(0, len(references) - 1), min_size=1, max_size=9)
    )
    steps = torch.randn(len(order), 2, 3, generator=generator)
    reach = torch.tensor([half_way(module.norm, references, i) for i in order]) * data.draw(st.floats(0, 0.999))
    x = references[order] + steps * (reach / lengths(module.norm, steps)).float().view(-1, 1, 1)
    check_alone(module, singles, x, order, atol=1e-4)


@settings(max_examples=150, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_far_rows_count_in_order_and_are_refused_in_other_batches(case, data):
    module, references, singles, generator = case
    count, width = len(references), float(references.max() - references.min())
    factor = data.draw(st.sampled_from([0.3, 3.0, 30.0]))
    x = references + factor * width * torch.randn(references.shape, generator=generator)
    far_by = torch.stack([lengths(module.norm, x - reference) for reference in references], 1)
    near = far_by < torch.tensor([half_way(module.norm, references, i) for i in range(count)])
    if not bool((near & ~torch.eye(count, dtype=torch.bool)).any()):
        check_alone(module, singles, x, range(count))
    for batch in (list(range(count - 1)), [*range(count), 0], [0] * (count + 1)):
        rows = [place for place, m in enumerate(batch) if not bool(near[m].any())]
        if rows:
            words = rf"row {rows[0]} of a batch of {len(batch)} lies .* single\(row\)"
            with pytest.raises(ModelError, match=words) as error:
                module(x[batch])
            stated = float(str(error.value).split("lies ")[1].split()[0])
            assert stated == pytest.approx(float(far_by[batch[rows[0]]].min()), rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_a_full_batch_that_near_rows_show_to_be_permuted_refuses_far_ones(case, data):
    module, references, singles, _ = case
    count = len(references)
    order, far = data.draw(st.permutations(range(count))), data.draw(st.integers(0, count - 1))
    x = references[order].clone()
    x[far] = references.max() + 100 * float(references.max() - references.min())
    if any(m != i for m, i in enumerate(order) if m != far):
        with pytest.raises(ModelError, match=rf"row {far} of a batch of {count}"):
            module(x)
    else:
        check_alone(module, singles, x, order)


def test_rows_that_are_not_finite_keep_their_place_and_are_refused_elsewhere():
    module, x = BinarizedClassifier(network(), **parts(3), batching="auto"), parts(3)["references"].clone()
    x[1, 0, 0] = torch.nan
    logits = module(x)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[::2], classifier(3)(x)[::2])
    with pytest.raises(ModelError, match="row 0 of a batch of 1 lies nan"):
        module(x[1:2])
