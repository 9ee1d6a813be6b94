"""A classifier, detectors, a defense and steps by hand that several tests of evaluations are about."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from robust_ext.detectors import Detector
from robust_ext.models.adaptive import Purifier

# Settings of a short binarization test.
SMALL = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "planted_candidates": 4}


def random_classifier():
    """A network with random weights, eight inputs, and the classes that it predicts."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 60), nn.ReLU(), nn.Linear(60, 3)).eval()
    inputs = torch.rand(8, 1, 4, 4)
    return network, inputs, network(inputs).argmax(1)


class Pattern(Detector):
    """How much of a fixed pattern of pixels there is in an image of 64."""

    def score_of(self, seen):
        signs = torch.zeros(64)
        signs[20:44] = torch.tensor([1.0, -1.0] * 12)
        return seen.inputs.flatten(1) @ signs


class Noisy(Pattern):
    """The same, unsure of itself."""

    random = True

    def score_of(self, seen):
        return super().score_of(seen) + 0.02 * torch.randn(len(seen.inputs))


class Unsure(Detector):
    """Small distance between the two largest logits."""

    def score_of(self, seen):
        first, second = seen.logits.topk(2).values.unbind(1)
        return second - first


class Rounding(Purifier):
    """A little towards grey, and 32 levels: plain gradients are zero."""

    def step(self, point, *, x, number, state, rng):
        return ((point + 0.02 * (0.5 - point)) * 31).round() / 31


def rounded(x):
    return (x * 4).round() / 4


def spread(x):
    return x.flatten(1).std(1)


def gradient(model, x, y):
    """That of the cross-entropy of each row."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), x)[0]


def into_ball(points, x, epsilon):
    """The nearest points in the linf ball and in [0, 1]."""
    return (x + (points - x).clamp(-epsilon, epsilon)).clamp(0, 1)


def climb(model, x, y, *, epsilon, steps=20, step=0.125):
    """Sign-gradient PGD from the clean input."""
    points = x
    for _ in range(steps):
        points = into_ball(points + step * epsilon * gradient(model, points, y).sign(), x, epsilon)
    return points
