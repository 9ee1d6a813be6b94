"""Whether features are rows, and how near a replay has to come to the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import SplitError
from robust_ext.core.random import seeded_globals

# Of the largest logit, in single and double precision; in others so many roundings.
TOLERANCE = 1e-4
_ROUNDINGS = 16


def tolerance_of(model: nn.Module, *tensors: Tensor, tolerance: float = TOLERANCE) -> float:
    """The tolerance relative to the largest logit, in the lowest precision of a model's weights and of ``tensors``."""
    kinds = {one.dtype for one in (*model.parameters(), *model.buffers(), *tensors) if one.is_floating_point()}
    return max([tolerance, *(_ROUNDINGS * torch.finfo(kind).eps for kind in kinds)])


def check_features(part: nn.Module, inputs: Tensor) -> Tensor:
    """Features of ``inputs`` ``(n, ...)``; SplitError where they are no tensor of n rows."""
    with torch.no_grad(), seeded_globals(0):
        features: Tensor = part(inputs)
    if not isinstance(features, Tensor):
        raise SplitError(f"features: got {type(features).__name__}, expected a tensor (n, F)")
    if features.dim() < 2 or features.shape[0] != inputs.shape[0]:
        raise SplitError(
            f"features: got shape {tuple(features.shape)} for {inputs.shape[0]} inputs, expected "
            f"({inputs.shape[0]}, F), or more dimensions for a readout that takes them"
        )
    return features
