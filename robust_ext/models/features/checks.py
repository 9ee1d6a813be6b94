"""Whether features are rows, and how near a readout has to come to the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import SplitError
from robust_ext.core.random import seeded_globals

# Of the largest logit, in single precision; in coarser ones more.
TOLERANCE = 1e-4


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
