"""Networks at one moment: the modules they are made of, their parameters, buffers, hooks, methods and attributes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from robust_ext.core.intact.bookkeeping import assigns
from robust_ext.core.intact.tensors import GradientState, TensorState

_MISSING = object()
_BASE = vars(nn.Module())
# What every module keeps its parameters, buffers, submodules and hooks in.
_REGISTERS = tuple(name for name, value in _BASE.items() if isinstance(value, (dict, set)))
_SILENT = ("_buffers", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Copies of the tensors of a module in their order, for as long as it lives: attacks follow one another on a network.
_COPIES: WeakKeyDictionary[nn.Module, dict[int, Tensor | None]] = WeakKeyDictionary()


class NetworkState:
    """Modules and everything beneath them; inside, no parameter requires a gradient.

    Attacks need the gradients of inputs only, which saves part of each backward pass.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._modules = [_ModuleState(name, module) for name, module in _walk(roots)]
        self._tensors: dict[int, tuple[str, TensorState]] = {}
        for part in self._modules:
            kept = _COPIES.setdefault(part.module, {})
            for place, (label, tensor) in enumerate(part.tensors()):
                if id(tensor) not in self._tensors:
                    state = TensorState(tensor, kept=kept.get(place))
                    self._tensors[id(tensor)] = label, state
                    kept[place] = state.copy
        parameters = {id(p): p for part in self._modules for p in part.module.parameters(recurse=False)}
        self._gradients = [GradientState(parameter) for parameter in parameters.values()]

    @property
    def classes(self) -> set[type]:
        """The classes of all modules."""
        return {type(part.module) for part in self._modules}

    def restore(self) -> tuple[list[str], list[str]]:
        """Put everything back; what had been disturbed, and which attributes had been changed.

        Buffers and train flags are put back without a word: many attacks switch a network into train mode.
        """
        disturbed, attributes = list[str](), list[str]()
        for part in self._modules:
            for label, loud in part.restore():
                (disturbed if loud else attributes).append(label)
        for label, state in self._tensors.values():
            if state.restore() and label:
                disturbed.append(label)
        for gradient in self._gradients:
            gradient.restore()
        return disturbed, attributes


class _ModuleState:
    """One module without those beneath it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._class: Any = type(module)
        self._attributes = dict(vars(module))
        kept = ((key, self._attributes.get(key)) for key in _REGISTERS)
        self._registers = {key: value.copy() for key, value in kept if isinstance(value, (dict, set))}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors; named where a change of values is to be reported."""
        prefix = f"{self.name}." if self.name else ""
        for name, parameter in self.module.named_parameters(recurse=False):
            yield prefix + name, parameter
        for buffer in self.module.buffers(recurse=False):
            yield "", buffer
        for key, value in self._attributes.items():
            if key not in _BASE and not (isinstance(value, Tensor) and assigns(self._class, key)):
                yield from (("", each) for each in _inside(value) if isinstance(each, Tensor))

    def restore(self) -> Iterator[tuple[str, bool]]:
        """Put everything back but values of tensors; what differed, and whether that is a disturbance."""
        module, title = self.module, self.name or self._class.__name__
        if type(module) is not self._class:
            module.__class__ = self._class
            yield f"the class of {title}", True
        now = vars(module)
        for key, kept in self._registers.items():
            held: Any = self._attributes[key]
            if now.get(key) is not held or not _same_items(held, kept):
                names = _differing(now.get(key), kept)
                now[key] = held
                held.clear()
                held.update(kept)
                if key not in _SILENT:
                    yield _register_words(key, names, title), True
        for key in [*self._attributes, *(key for key in now if key not in self._attributes)]:
            if key in self._registers:
                continue
            old, new = self._attributes.get(key, _MISSING), now.get(key, _MISSING)
            if not _equal(old, new) and (loud := self._disturbs(key, old, new)) is not None:
                if old is _MISSING:
                    del now[key]
                else:
                    now[key] = old
                # Some hooks compute a weight anew for every pass, and keep it in an attribute.
                mentioned = old is not _MISSING and not isinstance(old, Tensor)
                if key not in _BASE and (loud or mentioned):
                    yield f"{key} of {title}", loud

    def _disturbs(self, key: str, old: object, new: object) -> bool | None:
        """Whether a changed attribute is a disturbance; None where it is the module's own bookkeeping."""
        shadows = hasattr(self._class, key) or any(key in kept for kept in self._registers.values())
        functional = callable(old) or callable(new)
        if shadows and (functional or isinstance(new, Tensor)):
            return True
        if key not in _BASE and assigns(self._class, key):
            return None
        return functional and old is not _MISSING


def _walk(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules once, also those in plain attributes, by name."""
    seen = set[int]()
    waiting = [("", root) for root in roots]
    while waiting:
        name, module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        prefix = f"{name}." if name else ""
        waiting += [(prefix + child, part) for child, part in module.named_children()]
        for key, value in vars(module).items():
            if key not in _BASE:
                waiting += [(prefix + key, each) for each in _inside(value) if isinstance(each, nn.Module)]


def _inside(value: object) -> Iterator[object]:
    """A value, those of a plain collection, or what a function holds."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield value


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _same_items(held: Any, kept: Any) -> bool:
    if not kept or isinstance(kept, set):
        return bool(held == kept)
    return list(held) == list(kept) and all(map(is_, held.values(), kept.values()))


def _differing(now: object, kept: Any) -> list[str]:
    """Keys whose values were replaced, added or taken away."""
    if not isinstance(now, Mapping) or not isinstance(kept, Mapping):
        return []
    return [str(key) for key in {**kept, **now} if now.get(key, _MISSING) is not kept.get(key, _MISSING)]


def _register_words(key: str, names: list[str], title: str) -> str:
    kind = {"_parameters": "weights", "_modules": "submodules"}.get(key)
    return f"the hooks of {title}" if kind is None else f"the {kind} {', '.join(names[:3])} of {title}"


def _equal(old: object, new: object) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)
