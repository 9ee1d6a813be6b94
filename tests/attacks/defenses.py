"""Small classifiers with detectors, of which it is known what an attack can achieve."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors import Detector, ScoreDetector
from robust_ext.models.defended import Defended
from robust_ext.testing.networks import Centred
from tests.attacks.problems import Lambda


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an attack is given; the inputs are classified as ``labels``.

    ``room`` is how far a point can be beyond both boundaries at once, ``(N,)``; below 0 where no attack can succeed,
    NaN where it is not known.
    """

    target: Target
    defended: Defended
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    room: Tensor

    def successes(self, candidates):
        """Which candidates ``(N, ...)`` are misclassified, let pass, in the ball and in bounds, bool ``(N,)``."""
        predicted, rejected = self.defended.decide(candidates)
        low, high = self.threat_model.bounds
        inside = self.threat_model.contains(candidates, self.inputs)
        inside &= (candidates >= low).flatten(1).all(1) & (candidates <= high).flatten(1).all(1)
        return (predicted != self.labels) & ~rejected & inside


class Rowwise(nn.Module):
    """A linear layer ``(F, D)`` whose rows are summed one by one: alone a row gives the same bits as in a batch."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return (x.flatten(1)[:, None] * self.weight).sum(2)


class FarHidden(Detector):
    """The squared distance of the hidden units to their mean on clean inputs."""

    layers = ("2",)

    def __init__(self, classifier):
        super().__init__(classifier)
        self.register_buffer("middle", torch.zeros(()))

    def score_of(self, observed):
        return (observed.layers["2"] - self.middle).square().sum(1)


def small_defense(
    rows, *, norm="linf", epsilon=0.3, shape=(1, 3, 4), classes=4, bounds=(0.0, 1.0), inverted=False, references=2
):
    """A network of two layers whose hidden units are watched; the first rows are the same whatever their number.

    Epsilon is relative to the width of the bounds; ``references`` are points of other classes a row, 0 for none.
    """
    generator = stream(0, "network")
    first = torch.randn(8, int(torch.Size(shape).numel()), generator=generator) / 3
    last = torch.randn(classes, 8, generator=generator)
    network = nn.Sequential(Centred(bounds), Rowwise(first), nn.Tanh(), Rowwise(last)).eval()
    points = torch.rand(400, *shape, generator=generator) * (bounds[1] - bounds[0]) + bounds[0]
    detector = FarHidden(network)
    with torch.no_grad():
        detector.middle = network[:3](points).mean(0)
        predicted = network(points).argmax(1)
    detector.calibrate(points, false_positive_rate=0.5)
    defended = Defended(network, detector, inverted=inverted)
    inputs, labels = points[:rows], predicted[:rows]
    wanted = ~defended.decide(points)[1]
    others = [(points[(predicted != label) & wanted])[:references] for label in labels]
    threat_model = ThreatModel(norm=norm, epsilon=epsilon * (bounds[1] - bounds[0]), bounds=bounds)
    target = _target(defended, threat_model, shape, classes, torch.stack(others) if rows and references else None)
    room = torch.full((rows,), torch.nan)
    return Problem(target=target, defended=defended, inputs=inputs, labels=labels, threat_model=threat_model, room=room)


def linear_defense(rows, values, *, norm="linf", likeness=0.5, bounds=(0.0, 1.0)):
    """Linear classifiers with linear detectors, one of each a row; linear programs or duality give their room.

    For l2 the inputs keep epsilon away from the bounds; ``likeness`` is the average cosine between the two weights.
    """
    rng = np.random.default_rng([rows, values])
    width = bounds[1] - bounds[0]
    epsilon = 0.2 * width * (values / 2 if norm == "l1" else 1)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    kept = epsilon if norm == "l2" else 0
    x = rng.uniform(bounds[0] + kept, bounds[1] - kept, (rows, values))
    to_other = rng.normal(size=(rows, values))
    to_alarm = likeness * to_other + (1 - likeness**2) ** 0.5 * rng.normal(size=(rows, values))
    found = []
    for row in range(rows):
        # Where the furthest along each direction lies, boundaries are neither trivial nor out of reach.
        ways = np.stack([to_other[row], to_alarm[row]])
        reach = [_furthest(x[row], threat_model, way[None], np.zeros(1)) * np.linalg.norm(way) for way in ways]
        reach = np.array(reach) - ways @ x[row]
        drawn = np.array([rng.uniform(0.1, 0.9), rng.uniform(-0.3, 0.8)])
        threshold, limit = ways @ x[row] + drawn * reach
        ways[1] *= -1
        found.append((threshold, limit, _furthest(x[row], threat_model, ways, np.array([threshold, -limit]))))
    thresholds, limits, room = (torch.tensor(part, dtype=torch.float32) for part in zip(*found, strict=True))
    weight, alarm = (torch.tensor(way, dtype=torch.float32) for way in (to_other, to_alarm))

    def logits(points):
        """Each row has a boundary of its own."""
        along = (points * weight).sum(1) - thresholds
        return torch.stack([-along / 2, along / 2], 1)

    classifier = Lambda(logits)
    detector = ScoreDetector(classifier, lambda points: (points * alarm).sum(1) - limits)
    detector.threshold = torch.tensor(0.0)
    defended = Defended(classifier, detector)
    target = _target(defended, threat_model, (values,), 2, None)
    inputs, labels = torch.tensor(x, dtype=torch.float32), torch.zeros(rows, dtype=torch.int64)
    return Problem(target=target, defended=defended, inputs=inputs, labels=labels, threat_model=threat_model, room=room)


def _furthest(x, threat_model, ways, offsets):
    """The largest t with ``way . z - offset >= t |way|`` for one way or two, and a point z in ball and box."""
    values, low, high = len(x), *threat_model.bounds
    if threat_model.norm == "l2":
        # Where the box is out of reach, by duality the least of epsilon |m| + m . x - offset over mixtures m.
        lengths = np.linalg.norm(ways, axis=1)
        shares = np.linspace(0, 1, 2001)[:, None] if len(ways) == 2 else np.ones((1, 1))
        mixing = np.concatenate([shares, 1 - shares], 1)[:, : len(ways)] / lengths
        values = threat_model.epsilon * np.linalg.norm(mixing @ ways, axis=1) + mixing @ (ways @ x - offsets)
        return float(values.min())
    # z = x + up - down.
    signed = np.concatenate([-ways, ways], 1)
    rows = [np.concatenate([signed, np.linalg.norm(ways, axis=1)[:, None]], 1)]
    limits = [ways @ x - offsets]
    if threat_model.norm == "l1":
        rows.append(np.r_[np.ones(2 * values), 0.0][None])
        limits.append(np.array([threat_model.epsilon]))
    most = threat_model.epsilon
    bounds = [(0, min(most, high - value)) for value in x] + [(0, min(most, value - low)) for value in x]
    cost = np.r_[np.zeros(2 * values), -1.0]
    solved = linprog(cost, A_ub=np.concatenate(rows), b_ub=np.concatenate(limits), bounds=[*bounds, (None, None)])
    assert solved.x is not None
    return float(solved.x[-1])


def _target(defended, threat_model, shape, classes, references):
    given = {"bounds": threat_model.bounds, "classes": classes, "input_shape": shape, "device": torch.device("cpu")}
    return Target(module=defended, defended=defended, references=references, **given)
