"""Each readout against plain loops over problems, points and members, and against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.registry.readout import as_readout

B, N, K, F = 3, 40, 5, 6
TEXTS = (*READOUTS, "ensemble(combine='mean')", "code(decoder='linear')", "nearest(k=1)", "ensemble(C=1e-3)")


def shape_of(text, members=K):
    return (members, F) if text.partition("(")[0] in ("ensemble", "code", "mixing") else (F,)


def problems(shape, seed=0, shift=6.0, planted=3):
    """Features ``(B, N, *shape)`` of which the last are moved away from the others, in float32 and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(B, N, *shape, generator=generator)
    classes = torch.arange(N) >= N - planted
    away = torch.nn.functional.normalize(torch.randn(B, *[1] * len(shape), F, generator=generator), dim=-1)
    return rows + shift * away * classes.view(1, N, *[1] * len(shape)) + 3, classes


def posed(text, features, classes, kappa=0.5):
    """The readout, its parameters, scores, and a threshold that lies between the classes."""
    readout = as_readout(text)
    parameters = readout.fit(features, classes)
    scores = readout.scores(features, parameters)
    edge, inner = scores[:, classes].amin(1), scores[:, ~classes].amax(1)
    parameters, start = readout.anchored(parameters, edge)
    return readout, parameters, scores - edge[:, None] + start[:, None], start - (1 - kappa) * (edge - inner)


def own(parameters, problem):
    return {name: part[problem][None] for name, part in parameters.items()}


def logistic(points, classes, C):
    """Unit direction and positions of scikit-learn's logistic regression on standardised rows ``(n, F)``."""
    x = points.double().numpy()
    scaled = (x - x.mean(0)) / np.sqrt(((x - x.mean(0)) ** 2).mean())
    fit = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-10, max_iter=1000).fit(scaled, classes.numpy())
    weight = fit.coef_[0] / np.linalg.norm(fit.coef_[0])
    return weight, x @ weight


def in_units(along, classes):
    begin, inner = along[classes].min(), along[~classes].max()
    return (along - begin) / (begin - inner)


def members(features, classes):
    """Positions ``(n, K)`` of one problem's features ``(n, K, F)``, a fit a member."""
    mask = classes.numpy()
    columns = [logistic(features[:, member], classes, 10.0)[1] for member in range(features.shape[1])]
    return np.stack([in_units(column, mask) for column in columns], 1)


def by_hand(text, features, classes):
    """Scores of one problem's points, as loops and scikit-learn have them."""
    name, mask = text.partition("(")[0], classes.numpy()
    if name == "ensemble":
        combined = np.mean if "mean" in text else np.median
        return combined(members(features, classes), axis=1)
    if name == "code":
        return np.array([sum(math.tanh(2 * p + 1) for p in row) for row in members(features, classes)])
    if name == "nearest":
        counts = (1 if "k=1" in text else 5, 1)
        x, found = features.double().numpy(), []
        for sign, chosen, k in zip((1, -1), (~mask, mask), counts, strict=True):
            known = x[chosen]
            near = KNeighborsRegressor(k).fit(known, known[:, 0])
            found.append(sign * (near.kneighbors(x)[0] ** 2).mean(1))
        return sum(found)
    if name == "mixing":
        flat = features.flatten(0, 1)
        _, along = logistic(flat, classes.repeat_interleave(K), 10.0)
        mixes = along.reshape(len(features), K)
        begin, inner = mixes.mean(1)[mask].min(), mixes.mean(1)[~mask].max()
        share = [
            np.mean([1 / (1 + math.exp(-4 * ((a - begin) / (begin - inner) + 0.5))) for a in row]) for row in mixes
        ]
        return np.array([math.log(p / (1 - p)) / 4 for p in share])
    return logistic(features, classes, 10.0)[1]


@pytest.mark.parametrize(
    "text",
    ["logistic", "prototypes", "ensemble", "ensemble(combine='mean')", "code", "nearest", "nearest(k=1)", "mixing"],
)
def test_scores_are_those_made_by_hand(text):
    features, classes = problems(shape_of(text))
    _, _, scores, _ = posed(text, features, classes)
    for problem in range(B):
        expected = by_hand(text, features[problem], classes)
        expected = expected - expected[classes.numpy()].min() + float(scores[problem, classes].min())
        spread = float(scores[problem].std())
        np.testing.assert_allclose(scores[problem].numpy(), expected, rtol=0, atol=2e-3 * spread)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kappa", [0.1, 0.9, 1.5])
def test_class_1_is_where_the_score_is_above_the_threshold(text, kappa):
    """For measured points and others, in row order and by index, together and alone."""
    features, classes = problems(shape_of(text))
    readout, parameters, scores, threshold = posed(text, features, classes, kappa)
    module = BinarizedClassifier(
        torch.nn.Identity(),
        references=torch.arange(B)[:, None].float(),
        threshold=threshold,
        scale=torch.full((B,), 2.0),
        offset=torch.full((B,), 0.5),
        readout=readout,
        **parameters,
    )
    others = problems(shape_of(text), seed=1, shift=3.0)[0]
    index = torch.arange(B).repeat_interleave(N)
    for points in (features, others):
        rows = points.flatten(0, 1)
        score = torch.stack(
            [readout.score(row[None], own(parameters, i))[0] for row, i in zip(rows, index, strict=True)]
        )
        together = readout.score(rows, {name: part[index] for name, part in parameters.items()})
        torch.testing.assert_close(together, score)
        logits = module.read(rows, index)
        assert logits.dtype == torch.float32
        assert torch.equal(logits.argmax(1) == 1, score > threshold[index])
        if points is features:
            torch.testing.assert_close(score.view(B, N), scores)
        for i in range(B):
            alone = module.read(points[i], torch.full((N,), i))
            torch.testing.assert_close(alone, logits.view(B, N, 2)[i])


@pytest.mark.parametrize("text", TEXTS)
def test_a_batch_is_fitted_as_its_problems_alone(text):
    features, classes = problems(shape_of(text))
    together = posed(text, features, classes)[2]
    for problem in range(B):
        alone = posed(text, features[problem][None], classes)[2]
        torch.testing.assert_close(alone[0], together[problem], rtol=0, atol=1e-3 * float(together[problem].std()))


@pytest.mark.parametrize("text", TEXTS)
def test_logits_have_gradients(text):
    features, classes = problems(shape_of(text))
    readout, parameters, _, threshold = posed(text, features, classes)
    rows = features[:, 0].clone().requires_grad_()
    logits = readout.logits(rows, parameters, threshold, torch.ones(B), torch.zeros(B))
    (gradient,) = torch.autograd.grad((logits[:, 1] - logits[:, 0]).sum(), rows)
    assert bool((gradient.flatten(1).norm(dim=1) > 0).all())


def test_prototypes_are_the_nearer_of_two_centres():
    """Against scikit-learn's classifier, given the two centres; what is far from both has low logits."""
    features, classes = problems((F,))
    readout, parameters, _, threshold = posed("prototypes", features, classes, 0.7)
    points = problems((F,), seed=2, shift=4.0)[0]
    for i in range(B):
        centre, weight = parameters["centre"][i], parameters["weight"][i]
        half = float(threshold[i]) - float((centre - parameters["anchor"][i]) @ weight)
        torch.testing.assert_close(centre, features[i, ~classes].double().mean(0))
        centres = np.stack([centre.numpy(), (centre + 2 * half * weight).numpy()])
        oracle = KNeighborsClassifier(1).fit(centres, [0, 1])
        rows = {name: part[i].expand(N, *part.shape[1:]) for name, part in parameters.items()}
        ones = torch.ones(N, dtype=torch.float64)
        logits = readout.logits(points[i], rows, threshold[i] * ones, ones, 0 * ones)
        assert logits.argmax(1).tolist() == oracle.predict(points[i].double().numpy()).tolist()
        distances = torch.tensor(np.linalg.norm(points[i].double().numpy()[:, None] - centres, axis=2) ** 2)
        torch.testing.assert_close(logits, -distances / (2 * half))


def test_the_decoder_has_a_floor():
    """As of the published decoder: the logit of the word that loses is constant."""
    features, classes = problems((K, F))
    readout, parameters, scores, threshold = posed("code", features, classes)
    ones = torch.ones(B, dtype=torch.float64)
    found = readout.logits(features[:, 0], parameters, threshold, ones, ones)
    beyond = scores[:, 0] - threshold
    expected = [[math.log(max(-c, 0) + 1e-6), math.log(max(c, 0) + 1e-6)] for c in beyond.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert float(found[0, 1]) == pytest.approx(math.log(1e-6))


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_number_is_not_separated_and_spoils_no_other_problem(text):
    features, classes = problems(shape_of(text))
    spoiled = features.clone()
    spoiled[1, 3] = torch.nan
    whole, found = (posed(text, rows, classes)[2] for rows in (features, spoiled))
    assert not bool(found[1, classes].amin() > found[1, ~classes].amax())
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("text", READOUTS)
def test_constant_features_are_not_separated(text):
    features, classes = torch.full((B, N, *shape_of(text)), 0.1), torch.arange(N) >= N - 1
    scores = posed(text, features, classes)[2]
    assert bool((scores == scores[:, :1]).all())
