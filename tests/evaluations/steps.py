"""Steps by hand that attacks of tests are made of."""

import torch
from torch.nn.functional import cross_entropy


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
