"""Settings of the whole process that decide what networks compute, and that a careless attack leaves changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.utils import _device, _python_dispatch

_UNKNOWN = object()
_Setting = tuple[str, Callable[[], Any], Callable[[Any], object]]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(device: str) -> _Setting:
    return (
        f"autocast on {device}",
        lambda: torch.is_autocast_enabled(device),
        lambda value: torch.set_autocast_enabled(device, value),
    )


def _default_device() -> tuple[Any, Any]:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE


def _put_default_device(kept: tuple[Any, Any]) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = kept


_SETTINGS: tuple[_Setting, ...] = (
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    ("the precision of matrix products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("cudnn.enabled", *_attribute(torch.backends.cudnn, "enabled")),
    ("cudnn.benchmark", *_attribute(torch.backends.cudnn, "benchmark")),
    ("cudnn.deterministic", *_attribute(torch.backends.cudnn, "deterministic")),
    ("numpy's error handling", np.geterr, lambda value: np.seterr(**value)),
    ("the default device", _default_device, _put_default_device),
    ("the working folder", os.getcwd, os.chdir),
    ("the trace function", sys.gettrace, sys.settrace),
    ("the profile function", sys.getprofile, sys.setprofile),
    _autocast("cpu"),
    _autocast("cuda"),
)

# Modes that see every call of a function, and every operation: how they are listed, taken off and put on.
_STACKS: tuple[tuple[str, Callable[[], list[Any]], Callable[[], object], Callable[[Any], object]], ...] = (
    ("torch's function modes", overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    (
        "torch's dispatch modes",
        _python_dispatch._get_current_dispatch_mode_stack,
        _python_dispatch._pop_mode,
        _python_dispatch._push_mode,
    ),
)


@contextmanager
def fenced(left: list[str]) -> Iterator[None]:
    """A block from which no setting leaks; names of those that were left changed are added to ``left``."""
    kept = [(name, get, put, value) for name, get, put in _SETTINGS if (value := _value(get)) is not _UNKNOWN]
    stacks = [listed() for _, listed, _, _ in _STACKS]
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    # Leaving this block puts both modes back, however many blocks inside were entered and not left.
    with torch.inference_mode(inference):
        torch.set_grad_enabled(gradients)
        try:
            yield
        finally:
            if torch.is_inference_mode_enabled() != inference:
                left.append("inference mode")
            elif torch.is_grad_enabled() != gradients:
                left.append("the gradient mode")
            for name, get, put, value in kept:
                if _value(get) != value:
                    put(value)
                    left.append(name)
            for (name, listed, pop, push), modes in zip(_STACKS, stacks, strict=True):
                if list(map(id, listed())) != list(map(id, modes)):
                    for _ in listed():
                        pop()
                    for mode in modes:
                        push(mode)
                    left.append(name)
    torch.set_grad_enabled(gradients)


def _value(get: Callable[[], Any]) -> Any:
    """A setting; _UNKNOWN where this version of torch has it under another name, or it cannot be had."""
    try:
        return get()
    except (TypeError, AttributeError, RuntimeError, OSError):
        return _UNKNOWN
