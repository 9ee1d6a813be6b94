"""Readouts against plain loops and scikit-learn; random models; binarized problems by hand and each alone."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsRegressor
from sklearn.svm import SVC
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.models.binarized import BinarizedClassifier, identifiable
from robust_ext.models.readouts import Readout
from robust_ext.models.readouts.base import check_logits, fitted
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.linear import KINDS, Linear, Logistic, fit_directions
from robust_ext.models.readouts.majority import Drawn, Majority
from robust_ext.registry.readout import as_readout
from tests.attacks.problems import Lambda

B, N, K, F = 3, 40, 5, 6
TEXTS = (*READOUTS, "ensemble(combine='mean')", "code(decoder='linear')", "nearest(k=1)", "ensemble(C=1e-3)")
EACH = pytest.mark.parametrize("text", TEXTS)


def shape_of(text):
    return (K, F) if text.partition("(")[0] in ("ensemble", "code", "mixing") else (F,)


def problems(shape, seed=0, shift=6.0, planted=3):
    """Features ``(B, N, *shape)`` of which the last are moved away from the others, in float32 and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(B, N, *shape, generator=generator)
    classes = torch.arange(N) >= N - planted
    away = nn.functional.normalize(torch.randn(B, *[1] * len(shape), F, generator=generator), dim=-1)
    return rows + shift * away * classes.view(1, N, *[1] * len(shape)) + 3, classes


def posed(text, features, classes, kappa=0.5):
    """The readout, its parameters, scores, and a threshold that lies between the classes."""
    readout = as_readout(text)
    parameters = readout.fit(features, classes)
    scores = readout.scores(features, parameters)
    edge, inner = scores[:, classes].amin(1), scores[:, ~classes].amax(1)
    parameters, start = readout.anchored(parameters, edge)
    return readout, parameters, scores - edge[:, None] + start[:, None], start - (1 - kappa) * (edge - inner)


def scaled(points):
    x = points.double().numpy()
    return (x - x.mean(0)) / np.sqrt(((x - x.mean(0)) ** 2).mean())


def oracle(points, classes, C=10.0):
    """The unit direction of scikit-learn's logistic regression on standardised rows ``(n, F)``."""
    fit = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-10, max_iter=1000)
    weight = fit.fit(scaled(points), classes.numpy()).coef_[0]
    return weight / np.linalg.norm(weight)


def members(features, classes):
    """Positions ``(n, K)`` of one problem's features ``(n, K, F)``, a fit a member."""
    along = np.stack([features[:, one].double().numpy() @ oracle(features[:, one], classes) for one in range(K)], 1)
    begin, inner = along[classes.numpy()].min(0), along[~classes.numpy()].max(0)
    return (along - begin) / (begin - inner)


def by_hand(text, features, classes):
    """Scores of one problem's points, as loops and scikit-learn have them."""
    name, mask, x = text.partition("(")[0], classes.numpy(), features.double().numpy()
    if name == "ensemble":
        return (np.mean if "mean" in text else np.median)(members(features, classes), axis=1)
    if name == "code":
        return np.array([sum(math.tanh(2 * p + 1) for p in row) for row in members(features, classes)])
    if name == "nearest":
        found = []
        for sign, chosen, k in ((1, ~mask, 1 if "k=1" in text else 5), (-1, mask, 1)):
            near = KNeighborsRegressor(k).fit(x[chosen], x[chosen, 0])
            found.append(sign * (near.kneighbors(x)[0] ** 2).mean(1))
        return sum(found)
    if name == "mixing":
        mixes = x @ oracle(features.flatten(0, 1), classes.repeat_interleave(K))
        begin, inner = mixes.mean(1)[mask].min(), mixes.mean(1)[~mask].max()
        share = (1 / (1 + np.exp(-4 * ((mixes - begin) / (begin - inner) + 0.5)))).mean(1)
        return np.log(share / (1 - share)) / 4
    return x @ oracle(features, classes)


HANDMADE = ("logistic", "prototypes", "ensemble", "ensemble(combine='mean')", "code", "nearest(k=1)", "mixing")


@pytest.mark.parametrize("text", HANDMADE)
def test_scores_are_those_made_by_hand(text):
    features, classes = problems(shape_of(text))
    _, _, scores, _ = posed(text, features, classes)
    for problem in range(B):
        expected = by_hand(text, features[problem], classes)
        expected = expected - expected[classes.numpy()].min() + float(scores[problem, classes].min())
        np.testing.assert_allclose(scores[problem], expected, rtol=0, atol=2e-3 * float(scores[problem].std()))


@EACH
@pytest.mark.parametrize("kappa", [0.1, 0.9, 1.5])
def test_class_1_is_where_the_score_is_above_the_threshold(text, kappa):
    """For measured points and others, in row order and by index, together and alone, in copies and pickles."""
    features, classes = problems(shape_of(text))
    readout, parameters, scores, threshold = posed(text, features, classes, kappa)
    values = {"threshold": threshold, "scale": torch.full((B,), 2.0), "offset": torch.full((B,), 0.5)}
    references = torch.arange(B)[:, None].float()
    module = BinarizedClassifier(nn.Identity(), references=references, readout=readout, **values, **parameters)
    index = torch.arange(B).repeat_interleave(N)
    for points in (features, problems(shape_of(text), seed=1, shift=3.0)[0]):
        rows = points.flatten(0, 1)
        own = [{name: part[i][None] for name, part in parameters.items()} for i in range(B)]
        score = torch.cat([readout.score(row[None], own[i]) for row, i in zip(rows, index, strict=True)])
        together = readout.score(rows, {name: part[index] for name, part in parameters.items()})
        torch.testing.assert_close(together, score)
        logits = module.read(rows, index)
        assert torch.equal(logits.argmax(1) == 1, score > threshold[index])
        if points is features:
            torch.testing.assert_close(score.view(B, N), scores)
        for i in range(B):
            torch.testing.assert_close(module.read(points[i], torch.full((N,), i)), logits.view(B, N, 2)[i])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        assert torch.equal(other.read(rows, index), logits)


@EACH
def test_problems_are_fitted_alone_have_gradients_and_spoil_no_other(text):
    features, classes = problems(shape_of(text))
    readout, parameters, together, threshold = posed(text, features, classes)
    for problem in range(B):
        alone = posed(text, features[problem][None], classes)[2]
        torch.testing.assert_close(alone[0], together[problem], rtol=0, atol=1e-3 * float(together[problem].std()))
    rows = features[:, 0].clone().requires_grad_()
    logits = readout.logits(rows, parameters, threshold, torch.ones(B), torch.zeros(B))
    (gradient,) = torch.autograd.grad((logits[:, 1] - logits[:, 0]).sum(), rows)
    assert bool((gradient.flatten(1).norm(dim=1) > 0).all())
    spoiled = features.clone()
    spoiled[1, 3] = torch.nan
    found = posed(text, spoiled, classes)[2]
    assert not bool(found[1, classes].amin() > found[1, ~classes].amax())
    torch.testing.assert_close(found[[0, 2]], together[[0, 2]], rtol=0, atol=1e-4)
    constant = posed(text, torch.full((B, N, *shape_of(text)), 0.1), torch.arange(N) >= N - 1)[2]
    assert bool((constant == constant[:, :1]).all())


# Fitted directions.


def problem(seed, n, F, planted, shift):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, F, generator=generator) @ torch.randn(F, F, generator=generator) / F**0.5
    direction = torch.randn(F, generator=generator)
    classes = torch.arange(n) >= n - planted
    return rows + shift * classes[:, None] * direction / direction.norm() + 5, classes


def cosine(a, b):
    return float(a.numpy() @ b / np.linalg.norm(a.numpy()) / np.linalg.norm(b))


@pytest.mark.parametrize("C", [1e-2, 1.0, 10.0, 1e4])
@pytest.mark.parametrize(("n", "F"), [(60, 2), (200, 10), (40, 39), (30, 80)])
@pytest.mark.parametrize(("planted", "shift"), [(1, 6.0), (7, 3.0), (7, 0.1)])
def test_logistic_agrees_with_scikit_learn(C, n, F, planted, shift):
    rows, classes = problem(n + planted, n, F, planted, shift)
    found = fit_directions(rows[None], classes, C=C)
    assert bool(found.converged.all())
    assert cosine(found.weight[0], oracle(rows, classes, C)) > 0.9999
    assert float(found.weight.norm()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("seed", "n", "F"), [(0, 12, 2), (1, 15, 3), (2, 10, 5), (3, 8, 12)])
def test_maximum_margin_agrees_with_scikit_learn(seed, n, F):
    rows, classes = problem(seed, n, F, 3, 8.0)
    found = fit_directions(rows[None], classes, kind="max-margin")
    weight = SVC(kernel="linear", C=1e9, tol=1e-9).fit(scaled(rows), classes.numpy()).coef_[0]
    assert bool(found.converged.all())
    assert cosine(found.weight[0], weight) > 0.99999
    along = rows.double() @ found.weight[0]
    gap = float(along[classes].min() - along[~classes].max())
    assert gap == pytest.approx(2 * float(found.scale[0]) / np.linalg.norm(weight), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_inseparable_and_constant_features_and_other_units(kind):
    rows = torch.randn(1, 120, 2, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(120) % 2 == 0
    found = fit_directions(rows, classes, kind=kind)
    assert float(found.weight.norm()) == pytest.approx(1)
    along = rows[0].double() @ found.weight[0]
    assert along[classes].min() < along[~classes].max()
    # The capped solver states that it was stopped; logistic regression has a minimum all the same.
    assert found.converged.tolist() == [kind == "logistic"]
    rows, classes = problem(4, 50, 3, 2, 7.0)
    padded = torch.cat([rows, torch.full((50, 2), 0.1)], 1)
    alone, with_constants = (fit_directions(r[None], classes, kind=kind).weight[0] for r in (rows, padded))
    assert float(with_constants[3:].abs().max()) < 1e-9
    assert cosine(alone, with_constants[:3].numpy()) > 0.99
    rows, classes = problem(9, 40, 5, 2, 4.0)
    first = fit_directions(rows[None].double(), classes, kind=kind)
    for factor in (1e-6, 1.0, 1e5):
        moved = fit_directions(factor * (rows[None].double() + 100), classes, kind=kind)
        torch.testing.assert_close(moved.weight, first.weight, rtol=0, atol=1e-5)
        torch.testing.assert_close(moved.scale, factor * first.scale)


# Random models.


def test_draws_are_repeated_for_the_same_batch_alone():
    noise = Lambda(lambda x: x + 0.1 * torch.randn_like(x))
    x, drawn, state = torch.rand(4, 3), Drawn(noise, 5, seed=1), torch.get_rng_state()
    first = drawn(x)
    torch.rand(1)
    assert torch.equal(drawn(x), first)
    torch.set_rng_state(state)
    others = [first - x[:, None], Drawn(noise, 5, seed=2)(x) - x[:, None], drawn(x + 1) - x[:, None] - 1]
    assert torch.equal(torch.get_rng_state(), state)
    for values in others:
        assert (values.shape, len(values.unique())) == ((4, 5, 3), 60)
        assert 0.07 < float(values.std()) < 0.13
    assert not any(torch.isclose(others[0], other).any() for other in others[1:])


@pytest.mark.parametrize("draws", [2, 5, 6])
def test_a_majority_of_draws_decides(draws):
    generator = torch.Generator().manual_seed(draws)
    features, planted = torch.randn(3, 20, draws, 4, generator=generator), torch.arange(20) >= 18
    features[:, 18:] += 4
    readout = Majority(readout=Logistic(), draws=draws)
    parameters = readout.fit(features, planted)
    flat = torch.stack([features[:, i, d] for i in range(20) for d in range(draws)], 1)
    torch.testing.assert_close(parameters, Logistic().fit(flat, torch.arange(20 * draws) >= 18 * draws))
    scores = readout.scores(features, parameters)
    for i in range(3):
        one = {name: part[i].expand(20, -1) for name, part in parameters.items()}
        torch.testing.assert_close(readout.score(features[i], one), scores[i])
        votes = torch.stack([Logistic().score(features[i, :, d], one) for d in range(draws)], 1)
        for threshold in torch.linspace(float(votes.min()) - 1, float(votes.max()) + 1, 30):
            assert torch.equal(2 * (votes > threshold).sum(1) > draws, scores[i] > threshold)


@pytest.mark.parametrize("draws", [5, 9, 21])
def test_what_lasts_is_above_the_boundary_at_nearly_every_majority(draws):
    """By simulation: of planted points with normal scores, the share that loses a fresh vote."""

    class First(Linear):
        def directions(self, features, planted):
            return torch.eye(1, features.shape[2], dtype=torch.float64).expand(len(features), -1)

    generator, readout = torch.Generator().manual_seed(draws), Majority(readout=First(), draws=draws)
    parameters = {"weight": torch.ones(4000, 1).double(), "anchor": torch.zeros(4000, 1).double()}
    edge = readout.lasting(torch.randn(4000, 1, 7 * draws, 1, generator=generator), parameters)[:, 0]
    fresh = readout.score(torch.randn(4000, draws, 1, generator=generator), parameters)
    assert float((fresh <= edge).double().mean()) < 0.01
    assert float(edge.median()) < float(fresh.median())


# Classes of one's own.


class Mean(Readout):
    def fit(self, features, planted):
        return {"middle": features.double().flatten(2).mean((1, 2))}

    def score(self, features, parameters):
        return features.double().flatten(1).mean(1) - parameters["middle"]


def of(**methods):
    return type("Own", (Mean,), methods)()


@pytest.mark.parametrize(
    ("readout", "error", "message"),
    [
        (of(fit=lambda self, x, y: x), InvalidArgumentError, r"fit\(\) returned Tensor, expected a dict of tensors"),
        (of(fit=lambda self, x, y: {"w": x[0]}), InvalidArgumentError, r"'w' of shape \(5, 3\), expected 2 rows"),
        (of(score=lambda self, x, p: x), InvalidArgumentError, r"score\(\) came to \(2, 5, 3\) .* so \(2, 5\) in all"),
        (of(score=lambda self, x, p: p["w"]), DataError, r"readout: Own\(\) raised KeyError"),
        (of(logits=lambda *z: Readout.logits(*z).flip(1)), InvalidArgumentError, r"than score\(\) for 5 of 5"),
        (of(logits=lambda self, x, *_: torch.zeros(len(x), 3)), InvalidArgumentError, r"returned \(5, 3\) for 5 rows"),
    ],
)
def test_classes_that_contradict_themselves_are_refused(readout, error, message):
    features, planted = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(5) >= 4
    features[:, 4] += 10

    def checked():
        parameters, scores = fitted(readout, features, planted)
        check_logits(readout, features, parameters, scores, scores[:, 4] - 1, torch.ones(2, dtype=torch.float64))

    with pytest.raises(error, match=message):
        checked()


SIZE, FEATURES = 6, 4


def flat_net():
    with seeded_globals(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(SIZE, FEATURES), nn.Tanh()).eval()


def made_parts(count):
    generator = torch.Generator().manual_seed(count)
    made = {"references": torch.rand(count, 2, 3, generator=generator)}
    made |= {name: torch.randn(count, FEATURES, generator=generator) for name in ("weight", "anchor")}
    made |= {name: torch.randn(count, generator=generator) for name in ("threshold", "scale", "offset")}
    return {**made, "scale": made["scale"].sigmoid() + 0.5}


def single(made, i, **options):
    return BinarizedClassifier(flat_net(), **{name: part[i : i + 1] for name, part in made.items()}, **options)


def logits_by_hand(x, problem, count):
    """The logits of one row in plain float64 arithmetic."""
    p = {name: part.double()[problem].tolist() for name, part in made_parts(count).items() if name != "references"}
    with torch.no_grad():
        features = flat_net().double()(x[None].double())[0].tolist()
    along = sum((f - a) * w for f, a, w in zip(features, p["anchor"], p["weight"], strict=True))
    signed = p["scale"] * (along - p["threshold"])
    return [p["offset"] - signed, p["offset"] + signed]


@pytest.mark.parametrize("rows", ["full", "any"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_logits_and_gradients_are_those_of_problems_by_hand_and_alone(rows, count):
    made = made_parts(count)
    module = BinarizedClassifier(flat_net(), **made, batching=rows)
    x = made["references"] + 0.01
    expected = torch.tensor([logits_by_hand(x[i], i, count) for i in range(count)])
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


@st.composite
def planted_cases(draw):
    """A classifier of problems in random bounds, each of them alone, and a generator."""
    norm, count = draw(st.sampled_from(NORMS)), draw(st.integers(2, 5))
    low, width = draw(st.sampled_from([(0.0, 1.0), (-3.0, 6.0), (0.0, 255.0)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    made = {**made_parts(count), "references": torch.rand(count, 2, 3, generator=generator) * width + low}
    module = BinarizedClassifier(flat_net(), **made, batching="auto", norm=norm)
    return module, made["references"], [single(made, i) for i in range(count)], generator


def lengths(norm, steps):
    """By hand, of rows ``(n, ...)``."""
    values = steps.double().abs().flatten(1)
    return {"linf": values.amax(1), "l2": values.square().sum(1).sqrt(), "l1": values.sum(1)}[norm]


def half_way(norm, references, i):
    others = [j for j in range(len(references)) if j != i]
    return float(lengths(norm, references[others] - references[i]).min()) / 2


def check_alone(module, singles, x, order, atol=1e-3):
    wanted = torch.cat([singles[i](row[None]) for row, i in zip(x, order, strict=True)])
    torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=atol)


@settings(max_examples=150, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_near_rows_get_their_own_readouts_in_any_batch_and_far_ones_count_in_order_or_are_refused(case, data):
    module, references, singles, generator = case
    count, width = len(references), float(references.max() - references.min())
    some = st.lists(st.integers(0, count - 1), min_size=1, max_size=9)
    order = data.draw(st.permutations(range(count)) | some)
    steps = torch.randn(len(order), 2, 3, generator=generator)
    reaches = torch.tensor([half_way(module.norm, references, i) for i in range(count)])
    reach = reaches[order] * data.draw(st.floats(0, 0.999))
    x = references[order] + steps * (reach / lengths(module.norm, steps)).float().view(-1, 1, 1)
    check_alone(module, singles, x, order, atol=1e-4)
    factor = data.draw(st.sampled_from([0.3, 3.0, 30.0]))
    x = references + factor * width * torch.randn(references.shape, generator=generator)
    far_by = torch.stack([lengths(module.norm, x - reference) for reference in references], 1)
    near = far_by < reaches
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


def test_rows_that_are_not_finite_keep_their_place_and_are_refused_elsewhere():
    module, x = BinarizedClassifier(flat_net(), **made_parts(3), batching="auto"), made_parts(3)["references"].clone()
    x[1, 0, 0] = torch.nan
    logits = module(x)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[::2], BinarizedClassifier(flat_net(), **made_parts(3))(x)[::2])
    with pytest.raises(ModelError, match="row 0 of a batch of 1 lies nan"):
        module(x[1:2])
