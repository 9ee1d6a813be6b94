"""Gaussian kernel densities."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def log_density(points: Tensor, references: Tensor, *, bandwidth: float, chunk: int = 4096) -> Tensor:
    """Logarithm of the Gaussian kernel density, with gradients for the points.

    It is the mean over references r of the normal density at the point with mean r and covariance ``bandwidth^2 I``.
    Distances are taken directly, not through inner products, which would cancel at small bandwidths.

    Args:
        points: ``(N, F)``.
        references: ``(R, F)``, R of at least 1.
        bandwidth: Above 0.
        chunk: References in one step: memory is N x chunk, on the way back too.

    Returns:
        ``(N,)``.

    Example:
        >>> log_density(torch.zeros(1, 2), torch.zeros(5, 2), bandwidth=1.0)
        tensor([-1.8379])
    """
    parts = torch.split(references, chunk)
    several = len(parts) > 1 and torch.is_grad_enabled() and points.requires_grad
    sums = [
        checkpoint(_log_kernels, points, part, bandwidth, use_reentrant=False)
        if several
        else _log_kernels(points, part, bandwidth)
        for part in parts
    ]
    constant = math.log(len(references)) + references.shape[1] / 2 * math.log(2 * math.pi * bandwidth**2)
    return _log_sum_exp(torch.stack(sums, 1)) - constant


def _log_kernels(points: Tensor, references: Tensor, bandwidth: float) -> Tensor:
    distances = torch.cdist(points, references, compute_mode="donot_use_mm_for_euclid_dist")
    return _log_sum_exp(-(distances / bandwidth).square() / 2)


def _log_sum_exp(values: Tensor) -> Tensor:
    """Over dimension 1; torch's own divides on the way back by what may have been rounded off, far from 0."""
    largest = values.detach().amax(1, keepdim=True)
    return (values - largest).exp().sum(1).log() + largest.squeeze(1)
