"""Devices that evaluations run on."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import module_device

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
