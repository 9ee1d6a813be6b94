"""Settings of the whole process that decide what networks compute, and that a careless attack leaves changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _device

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
    _autocast("cpu"),
    _autocast("cuda"),
)


@contextmanager
def fenced(left: list[str]) -> Iterator[None]:
    """A block from which no setting leaks; names of those that were left changed are added to ``left``."""
    kept = [(name, get, put, value) for name, get, put in _SETTINGS if (value := _value(get)) is not None]
    modes, inference, gradients = _function_modes(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
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
            if list(map(id, _function_modes())) != list(map(id, modes)):
                for _ in _function_modes():
                    torch._C._pop_torch_function_stack()
                for mode in modes:
                    torch._C._push_on_torch_function_stack(mode)
                left.append("torch's function modes")
    torch.set_grad_enabled(gradients)


def _value(get: Callable[[], Any]) -> Any:
    """A setting; None where this version of torch has it under another name, or refuses to give it."""
    try:
        return get()
    except (TypeError, AttributeError, RuntimeError):
        return None


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(number) for number in range(torch._C._len_torch_function_stack())]
