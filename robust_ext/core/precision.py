"""Floating point types: how coarse the one that a network computes in is, and what rounding in it explains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# So many roundings, relative to the largest number, are what a deep network makes of one.
ROUNDINGS = 16


def tolerance_of(module: nn.Module, *outputs: Tensor, single: float) -> float:
    """The relative difference that counts as rounding: ``single`` is that in float32, more where a type is coarser.

    Args:
        module: What computes; the coarsest type of its weights, or that a wrapper of it states, counts.
        outputs: What it returned; their types count too.
        single: For float32 and wider types.

    Example:
        >>> tolerance_of(nn.Linear(2, 2), single=1e-4), tolerance_of(nn.Linear(2, 2).bfloat16(), single=1e-4)
        (0.0001, 0.125)
    """
    types = [one.dtype for one in outputs if one.is_floating_point()]
    eps = torch.finfo(coarsest([precision_of(module), *types])).eps
    return single if eps <= torch.finfo(torch.float32).eps else max(single, ROUNDINGS * eps)


def precision_of(module: nn.Module) -> torch.dtype:
    """The coarsest type in which a network computes, by its weights and by what its wrappers state; else float32."""
    types = (getattr(part, "precision", None) for part in module.modules())
    stated = [one for one in types if isinstance(one, torch.dtype)]
    weights = {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if _computes(tensor)}
    return coarsest([*weights, *stated])


def coarsest(types: list[torch.dtype]) -> torch.dtype:
    """The floating point type with the fewest digits; float32 of none."""
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _computes(tensor: Tensor) -> bool:
    # Types of eight bits and less store weights; nothing is computed in them.
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1
