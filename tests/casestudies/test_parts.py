"""Parts of the defenses against closed forms, loops, linear programming and scikit-learn."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext import ThreatModel
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.adversarial_interpolation import interpolated_inputs, interpolated_labels
from robust_ext.casestudies.detected import seen_by
from robust_ext.casestudies.ecoc import BITS, Decoder, code_words
from robust_ext.casestudies.empir import Members, QuantisedConv, Vote, quantise
from robust_ext.casestudies.feature_scattering import cosine_costs, mixed_labels, scattered, sinkhorn_cost
from robust_ext.casestudies.k_winners import Winners
from robust_ext.casestudies.mixup_inference import MeanSoftmax, MixedFeatures, WithoutMixing
from robust_ext.casestudies.mmc import CentreDistances, LeaveCentre, simplex_centres
from robust_ext.casestudies.pcl import conformity
from robust_ext.casestudies.thermometer import LogitSpacePGA, Standardise, ThermometerCode, mean_code
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.detectors.base import Detector

LINF = ThreatModel(norm="linf", epsilon=0.1)


def test_winners():
    x = torch.randn(3, 4, 5, 2)
    loop = torch.zeros_like(x)
    for row, out in zip(x.flatten(1), loop.flatten(1), strict=True):
        for place in row.argsort(descending=True)[:4]:
            out[place] = row[place]
    assert torch.equal(Winners()(x), loop)
    # Ties, and layers with fewer values than a tenth makes one of.
    assert torch.equal(Winners()(torch.tensor([[2.0, 2.0, 1.0]])), torch.tensor([[2.0, 2.0, 0.0]]))
    assert torch.equal(Winners()(torch.tensor([[-3.0, -1.0]])), torch.tensor([[0.0, -1.0]]))


def test_conformity():
    features, centres, labels = torch.randn(5, 3), torch.randn(4, 3), torch.tensor([0, 3, 1, 1, 2])
    total = 0.0
    for row, label in zip(features, labels.tolist(), strict=True):
        total += float(((row - centres[label]) ** 2).sum())
        others = [float(((centres[label] - centre) ** 2).sum()) for k, centre in enumerate(centres) if k != label]
        total -= 0.3 * sum(others) / len(others)
    torch.testing.assert_close(float(conformity(features, centres, labels, push=0.3)), total / 5)


@pytest.mark.parametrize(("classes", "coordinates"), [(2, 2), (10, 64)])
def test_centres_are_a_simplex_and_logits_squared_distances(classes, coordinates):
    centres = simplex_centres(classes, coordinates, 10.0).double()
    cosines = centres @ centres.mT / 100
    wanted = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    assert centres.shape == (classes, coordinates)
    torch.testing.assert_close(cosines, wanted, atol=1e-6, rtol=0)
    features, others = torch.randn(5, 7), torch.randn(3, 7)
    loop = torch.tensor([[-float(((row - one) ** 2).sum()) for one in others] for row in features])
    torch.testing.assert_close(CentreDistances(others)(features), loop)


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5)])
def test_sinkhorn_cost_is_the_least_over_all_plans_with_equal_weights(rows, columns):
    first, second = torch.randn(rows, 6).double(), torch.randn(columns, 6).double()
    costs = cosine_costs(first, second)
    loop = [[1 - float(a @ b / (a.norm() * b.norm())) for b in second] for a in first]
    torch.testing.assert_close(costs, torch.tensor(loop).double(), atol=1e-6, rtol=0)
    sums = np.concatenate([np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))])
    weights = np.concatenate([np.full(rows, 1 / rows), np.full(columns, 1 / columns)])
    least = linprog(costs.numpy().ravel(), A_eq=sums, b_eq=weights).fun
    found = sinkhorn_cost(costs, entropy=1e-3, iterations=5000)
    torch.testing.assert_close(float(found), least, atol=2e-3, rtol=0)


def test_scattered_points_lie_in_the_ball_and_cost_more():
    assert mixed_labels(torch.tensor([1]), 3).tolist() == [[0.25, 0.5, 0.25]]
    module, x = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)), torch.rand(8, 1, 3, 3)
    points = scattered(module, x, 0.2)
    start = (x + 0.2 * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
    with torch.no_grad():
        found, there = (float(sinkhorn_cost(cosine_costs(module(x), module(one)))) for one in (points, start))
    assert found > 2 * there
    assert float((points - x).abs().max()) <= 0.2 + 1e-6
    assert 0 <= float(points.min()) <= float(points.max()) <= 1


def test_thermometer_code():
    # Away from the ends of levels, where rounding decides; with the ends of the bounds.
    values = torch.tensor([0.0, 0.01, 0.33, 0.5, 0.7, 0.99, 1.0]).expand(2, 3, 1, -1)
    loop = torch.zeros(2, 48, 1, 7)
    for channel in range(3):
        for bit in range(16):
            for place, value in enumerate(values[0, 0, 0].tolist()):
                loop[:, 16 * channel + bit, 0, place] = float(int(15.9998 * value) >= bit)
    assert torch.equal(ThermometerCode()(values), loop)
    shares = torch.rand(1, 1, 16, 1, 1).softmax(2)
    codes = ThermometerCode()((torch.arange(16.0) / 16 + 0.03).view(16, 1, 1, 1))
    torch.testing.assert_close(mean_code(shares).flatten(), (shares.flatten()[:, None] * codes.flatten(1)).sum(0))
    rows = Standardise()(3 * torch.rand(4, 2, 3, 3) + 7)
    torch.testing.assert_close(rows.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std((1, 2, 3), unbiased=False), torch.ones(4))


def test_the_decoder_by_a_loop():
    decoder = Decoder(3).requires_grad_(False)
    decoder.words = code_words(3, generator=torch.Generator().manual_seed(1))
    features = torch.randn(5, BITS, 64)
    for row, found in zip(features, decoder(features), strict=True):
        bits = [float(row[bit] @ decoder.weight[bit] + decoder.bias[bit]) for bit in range(BITS)]
        correlations = torch.stack([sum(torch.tensor(bits).tanh() * decoder.words[label]) for label in range(3)])
        torch.testing.assert_close(found, torch.log(correlations.clamp_min(0) + 1e-6), atol=1e-3, rtol=0)


def test_layers_of_few_bits_by_loops():
    for bits in (1, 2, 4):
        values = torch.rand(50, requires_grad=True)
        levels = [step / (2**bits - 1) for step in range(2**bits)]
        out = quantise(values, bits)
        nearest = [min(levels, key=lambda level: abs(level - value)) for value in values.tolist()]
        assert torch.allclose(out, torch.tensor(nearest))
        out.sum().backward()
        assert bool((values.grad == 1).all())
    layer, unit = QuantisedConv(1, 8, (2, 2)).requires_grad_(False), torch.zeros(1, 1, 3, 3)
    unit[0, 0, 1, 1] = 1
    bounded = layer.weight.tanh()
    for output in range(8):
        # What a single bright value in the middle sums is the weight in the middle.
        share = float(bounded[output, 0, 1, 1] / (2 * bounded.abs().max()) + 0.5)
        weight = (2 * round(3 * share) / 3 - 1) / 3
        activation = min(max(weight + float(layer.bias[output]), 0), 1)
        assert abs(float(layer(unit)[0, output, 1, 1]) - round(3 * activation) / 3) < 1e-6


def test_the_largest_logit_is_the_majority_and_else_the_full_member():
    members, vote = Members((1, 8, 8), 16), Vote(16, 5)
    with torch.no_grad():
        features = 3 * members(torch.rand(300, 1, 8, 8))
        choices, found = vote.outputs(features).argmax(2).tolist(), vote(features).argmax(1).tolist()
    assert {len(set(row)) for row in choices} >= {1, 2}
    for row, decided in zip(choices, found, strict=True):
        ((winner, count),) = Counter(row).most_common(1)
        assert decided == (winner if count > 1 else row[-1])


def test_interpolated_labels_and_inputs():
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 2, 2, 0])
    for row, y, other in zip(interpolated_labels(labels, partners, 4), labels, partners, strict=True):
        loop = torch.tensor([0.5 * (k == int(y)) + 0.5 / 3 * (k != int(other)) for k in range(4)])
        torch.testing.assert_close(row, loop)
    # With features that are the inputs, the cosine's gradient is p / (|p||x|) - (p.x) x / (|p||x|^3).
    inputs = torch.rand(5, 6) * 0.4 + 0.3
    partners, epsilon = inputs.flip(0), 0.1
    with seeded_globals(7):
        found = interpolated_inputs(nn.Identity(), inputs, partners, epsilon)
    with seeded_globals(7):
        start = inputs - epsilon + 2 * epsilon * torch.rand_like(inputs)
    sizes = [(p.norm(), x.norm(), p @ x) for p, x in zip(partners, start, strict=True)]
    gradients = [p / (a * b) - c * x / (a * b**3) for (a, b, c), p, x in zip(sizes, partners, start, strict=True)]
    wanted = start + epsilon * torch.stack(gradients).sign()
    torch.testing.assert_close(found, torch.maximum(torch.minimum(wanted, inputs + epsilon), inputs - epsilon))


class Brightness(Detector):
    def score_of(self, observed):
        return observed.inputs.flatten(1).mean(1).mul(20).round()


def test_how_a_detector_sees_candidates():
    clean, bright = torch.rand(60, 1, 4, 4), 0.2 + 0.8 * torch.rand(40, 1, 4, 4)
    detector = Brightness(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval())
    scores = [detector.score(points).tolist() for points in (clean, bright)]
    found = seen_by(detector, clean, bright, seed=0)
    assert abs(found["AUROC"] - roc_auc_score([0] * 60 + [1] * 40, scores[0] + scores[1])) < 1e-9
    # 95% of the clean scores are at most the limit.
    limit = sorted(scores[0])[int(0.95 * 59) + 1]
    assert abs(found["flagged"] - sum(score > limit for score in scores[1]) / 40) <= 0.05
    assert seen_by(detector, clean, bright[:0], seed=0) == {"AUROC": 0.0, "flagged": 0.0}


def search(attack, module, x, y, classes, bounds=(0, 1)):
    target = Target(module=module.eval(), bounds=bounds, classes=classes, input_shape=x.shape[1:], device=x.device)
    model = ThreatModel(norm="linf", epsilon=0.1, bounds=bounds)
    found = attack.search(target, x, y, threat_model=model, generator=stream(0))
    assert bool(model.contains(found, x).all())
    return found


def test_leaving_a_centre_ends_in_the_corner_away_from_it():
    # On the plane itself, with centres (1, 0) and (-1, 0): from (-.4, .3) away from the second centre is up and right.
    module, x = CentreDistances(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), torch.tensor([[-0.4, 0.3]])
    for predicted, label, corner in ((True, 0, [-0.3, 0.4]), (False, 0, [-0.5, 0.4]), (False, 1, [-0.3, 0.4])):
        found = search(LeaveCentre(steps=5, predicted=predicted), module, x, torch.tensor([label]), 2, (-1, 1))
        torch.testing.assert_close(found, torch.tensor([corner]))


@pytest.mark.parametrize("signed", [False, True])
def test_the_attack_on_thermometer_codes_goes_to_the_outermost_level(signed):
    # Class 1 by the sum of the bits, so that more levels are better for label 0.
    module = nn.Sequential(ThermometerCode(), nn.Flatten(), nn.Linear(48, 2, bias=False))
    module[2].weight.data = torch.tensor([[-0.01], [0.01]]).expand(2, 48).clone()
    x = torch.tensor([[[[0.5, 0.02, 0.9]]]])
    for label, end in ((0, 0.1), (1, -0.1)):
        found = search(LogitSpacePGA(signed=signed), module, x, torch.tensor([label]), 2)
        assert torch.equal((15.9998 * found).floor(), (15.9998 * (x + end).clamp(0, 1)).floor())


@pytest.fixture
def parts():
    """A network on 4 values whose prediction is the largest of the first three, and a pool whose images are known."""
    last = nn.Linear(4, 3, bias=False)
    last.weight.data = torch.eye(3, 4)
    pool = torch.arange(3 * 5 * 4.0).view(3, 5, 4) / 60
    return MixedFeatures(nn.Identity(), last, pool, mixes=7, weight=0.6).eval(), MeanSoftmax(last).eval()


@pytest.mark.parametrize("fixed", [False, True])
def test_mixes_and_their_mean_as_in_a_loop(parts, fixed):
    """Fixed mixes repeat, a row's whatever the others are; the rest do not."""
    (mixed, mean), x = parts, torch.rand(6, 4, generator=stream(0))
    part = mixed.fixed(3) if fixed else mixed
    with seeded_globals(1):
        features = part(x)
    assert features.shape == (6, 7, 4)
    flat = mixed.pool.flatten(0, 1)
    for row, own in zip((features - 0.6 * x[:, None]) / 0.4, x, strict=True):
        for partner in row:
            # One of the pool, and of another class than the predicted one.
            distance = (flat - partner).abs().amax(1)
            assert distance.min() < 1e-5
            assert int(distance.argmin()) // 5 != int(own[:3].argmax())
    probabilities = sum(features[:, draw, :3].softmax(1) for draw in range(7)) / 7
    torch.testing.assert_close(mean(features).exp(), probabilities)
    assert torch.equal(part(x), features) == fixed
    assert not fixed or torch.equal(part(x[2:3]), features[2:3])


def test_without_mixing_is_the_attack_on_the_network(parts):
    (mixed, mean), x, y = parts, torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    attack = ObjectivePGD(steps=5, rel_step_size=0.3, start="input")
    alone = search(attack, nn.Sequential(mixed.bare(), mean), x, y, 3)
    assert torch.equal(search(WithoutMixing(attack=attack), nn.Sequential(mixed, mean), x, y, 3), alone)
    with pytest.raises(AttackRefusedError, match="nothing to exchange"):
        search(WithoutMixing(attack=attack), nn.Linear(4, 3), x, y, 3)
