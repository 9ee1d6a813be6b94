"""Devices and number types that evaluations run on."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import module_device

# So many roundings, relative to the largest number, are what a deep network makes of one.
ROUNDINGS = 16


def tolerance_of(module: nn.Module, *outputs: Tensor, single: float) -> float:
    """The relative difference that counts as rounding: ``single`` is that in float32, more where a type is coarser.

    Args:
        module: What computes; the coarsest type of its weights, or that a wrapper declares, counts.
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
    # Types of eight bits and less store weights; nothing is computed in them.
    weights = {
        one.dtype
        for one in (*module.parameters(), *module.buffers())
        if one.is_floating_point() and one.dtype.itemsize > 1
    }
    return coarsest([*weights, *stated])


def coarsest(types: list[torch.dtype]) -> torch.dtype:
    """The floating point type with the fewest digits; float32 of none."""
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


M = TypeVar("M", bound=nn.Module)


def check_device(device: str | torch.device, *, argument: str = "device") -> torch.device:
    """A device that this torch can use, by name or as torch has it.

    Raises:
        InvalidArgumentError: There is no such device, or it computes nothing.
    """
    try:
        found = torch.device(device)
        # With the number that "cuda" stands for. A device without values, such as meta, computes nothing.
        values = torch.zeros(1, device=found)
        values.tolist()
    except (RuntimeError, AssertionError, ImportError, NotImplementedError, ValueError, TypeError) as error:
        known = str(error).partition("\n")[0]
        raise InvalidArgumentError(argument, repr(device), f"a device this torch computes on ({known})") from error
    return values.device


def on_device(module: M, device: str | torch.device | None, *, argument: str = "model") -> M:
    """A module on a device: itself where it lies there already or none is named, else a copy; its caller's stays.

    Raises:
        InvalidArgumentError: It cannot be copied, or there is no such device.
    """
    wanted = run_device(module, device)
    if wanted == module_device(module):
        return module
    try:
        return copy.deepcopy(module).to(wanted)
    except Exception as error:
        # Copying runs the user's own code.
        got = f"{type(module).__name__}, which cannot be copied to {wanted} ({type(error).__name__}: {error})"
        raise InvalidArgumentError(argument, got, f"a module on {wanted}; move it there yourself") from error


def run_device(module: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device that was named, else the module's own."""
    return module_device(module) if device is None else check_device(device)
