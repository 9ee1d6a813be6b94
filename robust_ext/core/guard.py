"""A guard against accidents: what an attack leaves changed of modules and of the process is found and undone.

Tampering on purpose needs a process of its own, see docs/threats.md.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _device

# Where every module keeps parameters, buffers, submodules and hooks.
_REGISTERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
_SILENT = ("_buffers", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Changes:
    """The changes by a guarded block that the guard undid, as text."""

    network: list[str] = field(default_factory=list)  # Weights, submodules and hooks
    process: list[str] = field(default_factory=list)  # Settings of the process


@contextmanager
def guarded(
    *roots: nn.Module, originals: Sequence[nn.Module] = (), probe: Callable[[], Iterable[str]] = tuple
) -> Iterator[Changes]:
    """Run a block on modules, find what it changed, and undo that, also where the block raises.

    Inside, no parameter requires a gradient: attacks need those of inputs only, which saves part of each backward
    pass. Changes of buffers, train flags and gradients are undone without being mentioned. So are those of attributes,
    if there are originals or the block changed something else.

    Args:
        *roots: The modules.
        originals: The modules that these are copies of, which are guarded too.
        probe: Finds changes of another kind, such as those of an attribute that matters.
    """
    found, states = Changes(), [ModuleState(*originals)] if originals else []
    states.append(ModuleState(*roots, copied=states[0] if states else None))
    try:
        with _guarded_process(found.process):
            yield found
    finally:
        changed = [text for state in reversed(states) for text in state.restore()]
        found.network = list(dict.fromkeys([*changed, *probe()]))
        # Without a copy, what a module notes of its queries is left to it where nothing else has changed.
        for state in states if originals or found.network else ():
            state.restore_attributes()


@contextmanager
def frozen(module: nn.Module, *, attributes: bool = False) -> Iterator[None]:
    """Guard a module inside a block that leaves its weights alone, of which no copy is made.

    Args:
        module: The module.
        attributes: Also undo what it notes of its own calls, such as a count of them.
    """
    state = ModuleState(module, weights=False)
    try:
        yield
    finally:
        state.restore()
        if attributes:
            state.restore_attributes()


class ModuleState:
    """Modules and all beneath them at one moment; from then on no parameter requires a gradient.

    Args:
        *roots: The modules.
        weights: Whether to notice and undo changes of the parameters' values.
        copied: The state of modules that these are copies of, whose values serve for both.
    """

    def __init__(self, *roots: nn.Module, weights: bool = True, copied: ModuleState | None = None) -> None:
        named = {id(part): (name, part) for root in roots for name, part in root.named_modules()}
        self._parts = [(name, part, dict(vars(part)), _registers(part)) for name, part in named.values()]
        self._training = [(part, part.training) for _, part in named.values()]
        plain = (
            one
            for *_, held, own in self._parts
            for key, one in held.items()
            if key not in own and isinstance(one, (dict, list, set))
        )
        self._containers = [(one, copy.deepcopy(one)) for one in plain if _is_plain(one)]
        self._tensors: dict[int, _TensorState] = {}
        twins = list(copied._tensors.values()) if copied is not None else []
        for name, part, *_ in self._parts:
            prefix = f"{name}." if name else ""
            found = [(prefix + key, one) for key, one in part.named_parameters(recurse=False)] if weights else []
            for label, tensor in [*found, *(("", one) for one in part.buffers(recurse=False))]:
                if id(tensor) not in self._tensors:
                    twin = next(iter(twins[len(self._tensors) :]), None)
                    self._tensors[id(tensor)] = _TensorState(label, tensor, twin)
        parameters = {id(one): one for root in roots for one in root.parameters()}
        self._gradients = [(one, one.requires_grad, one.grad) for one in parameters.values()]
        for parameter in parameters.values():
            parameter.requires_grad_(False)
            parameter.grad = None

    def restore(self) -> list[str]:
        """Undo all changes but those of attributes; the weights, submodules and hooks that had changed."""
        changed = []
        for name, part, attributes, registers in self._parts:
            now = vars(part)
            for key, before in registers.items():
                if not _same_items(now.get(key), before):
                    kind = {"_parameters": "the weights", "_modules": "the submodules"}.get(key, "the hooks")
                    changed += [f"{kind} of {name or type(part).__name__}"] if key not in _SILENT else []
                    attributes[key].clear()
                    attributes[key].update(before)
                    now[key] = attributes[key]
        with torch._C.DisableTorchFunctionSubclass():
            changed += [one.label for one in self._tensors.values() if one.restore() and one.label]
        for parameter, required, gradient in self._gradients:
            parameter.requires_grad_(required)
            parameter.grad = gradient
        for part, training in self._training:
            if part.training != training:
                part.training = training
        return changed

    def restore_attributes(self) -> None:
        """Undo changes of attributes, and of the plain values in their lists, dicts and sets."""
        for _, part, attributes, _ in self._parts:
            vars(part).clear()
            vars(part).update(attributes)
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)


class _TensorState:
    """The values of a tensor and where they lay."""

    def __init__(self, label: str, tensor: Tensor, twin: _TensorState | None) -> None:
        self.label, self._tensor = label, tensor
        # Another tensor on the same storage, which stays when the first one is moved.
        self._alias = tensor.detach()
        bits = _bits(self._alias)
        self.values: Tensor | None = None if bits is None else bits.clone() if twin is None else twin.values

    def restore(self) -> bool:
        """Put values and place back; whether the values had changed."""
        changed, tensor, alias = False, self._tensor, self._alias
        if self.values is None:
            return False
        if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (alias.data_ptr(), alias.shape, alias.stride()):
            # Some attacks move networks to another device and back, which changes nothing.
            held = _bits(tensor.detach().to(alias.device))
            changed = held is None or held.dtype != self.values.dtype or not torch.equal(held, self.values)
            tensor.data = alias
        bits = _bits(alias)
        if bits is not None and not torch.equal(bits, self.values):
            with torch.inference_mode(alias.is_inference()):
                bits.copy_(self.values)
            changed = True
        return changed


def _bits(tensor: Tensor) -> Tensor | None:
    """A dense tensor as integers, so that NaN equals itself; None for others, whose values are not compared."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    whole = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return whole.view(_BITS[whole.element_size()])


def _registers(part: nn.Module) -> dict[str, Any]:
    """Shallow copies of a module's registers, by name."""
    return {key: held.copy() for key in _REGISTERS if isinstance(held := vars(part).get(key), (dict, set))}


def _same_items(now: Any, before: Any) -> bool:
    if isinstance(before, set):
        return bool(now == before)
    # Objects are compared by identity, since tensors have no plain equality.
    return now is not None and list(now) == list(before) and [*map(id, now.values())] == [*map(id, before.values())]


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, _PLAIN)


_CUDNN: Any = torch.backends.cudnn
# How each setting is read and put back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "the precision of matrix products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cuDNN's flags": (
        lambda: (_CUDNN.enabled, _CUDNN.benchmark, _CUDNN.deterministic),
        lambda value: _CUDNN.set_flags(_enabled=value[0], _benchmark=value[1], _deterministic=value[2]),
    ),
    "numpy's error handling": (np.geterr, lambda value: np.seterr(**value)),
    # None where there is none.
    "the default device": (lambda: _device.CURRENT_DEVICE, torch.set_default_device),
    "the working folder": (os.getcwd, os.chdir),
    "autocast": (
        lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        lambda value: [torch.set_autocast_enabled(*pair) for pair in zip(("cpu", "cuda"), value, strict=True)],
    ),
}


@contextmanager
def _guarded_process(left: list[str]) -> Iterator[None]:
    """Undo changes of settings of the process, whose names are added to ``left``."""
    before = {name: get() for name, (get, _) in _SETTINGS.items()}
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    # Leaving this block undoes both modes, however many blocks inside were entered and not left.
    with torch.inference_mode(inference):
        torch.set_grad_enabled(gradients)
        try:
            yield
        finally:
            if torch.is_inference_mode_enabled() != inference:
                left.append("inference mode")
            elif torch.is_grad_enabled() != gradients:
                left.append("the gradient mode")
            for name, (get, put) in _SETTINGS.items():
                if get() != before[name]:
                    put(before[name])
                    left.append(name)
    torch.set_grad_enabled(gradients)
