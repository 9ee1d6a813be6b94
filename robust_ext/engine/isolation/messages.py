"""Messages between the judge and an attack's process.

Requests travel to the process as pickles. Replies are safetensors files with a text of JSON in them: the judge
unpickles nothing that an attack's process sends.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, BinaryIO

import cloudpickle
import safetensors.torch
import torch
from torch import Tensor, nn

from robust_ext.core import errors
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.objects import loaded_files

REPLY_BYTES = 2**20
"""Bytes that a reply may have besides its tensors, so that an attack's process cannot fill the judge's memory."""

# Parts that are kept, so that the worker of a long-lived cluster does not keep every model that it has met.
_PARTS = 64
_NUMBERS = count()


class Parts:
    """Objects that were pickled before anything was planted; later pickles refer to them, and to their modules."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[bytes, list[str], list[object]]] = OrderedDict()
        self._names: dict[int, str] = {}

    def add(self, objects: Iterable[object]) -> None:
        """Pickle objects, each of which may hold those before it; known ones keep their pickle."""
        for obj in objects:
            if id(obj) in self._names:
                continue
            content, needed = self.pickle(obj)
            name = str(next(_NUMBERS))
            inside = [] if isinstance(obj, torch.jit.ScriptModule) or not isinstance(obj, nn.Module) else [obj]
            own = {id(obj): f"{name}:"}
            own |= {id(part): f"{name}:{path}" for one in inside for path, part in one.named_modules()}
            # All of them are kept, so that no other object gets the id of one that has a name.
            self._parts[name] = content, needed, [obj, *(part for one in inside for part in one.modules())]
            self._names = {**own, **self._names}
        while len(self._parts) > _PARTS:
            first, _ = self._parts.popitem(last=False)
            self._names = {key: name for key, name in self._names.items() if not name.startswith(f"{first}:")}

    def pickle(self, obj: object) -> tuple[bytes, list[str]]:
        """A pickle and the parts that it needs, in order; ModelError where something cannot be pickled."""
        used: set[str] = set()
        content = pickled(obj, self._names, to="the attack's process", used=used)
        needed: dict[str, None] = {}
        for name in sorted({one.partition(":")[0] for one in used}, key=int):
            self._parts.move_to_end(name)
            needed.update(dict.fromkeys([*self._parts[name][1], name]))
        return content, list(needed)

    def __getitem__(self, name: str) -> bytes:
        return self._parts[name][0]


def pickled(obj: object, names: Mapping[int, str], *, to: str, used: set[str] | None = None) -> bytes:
    """A pickle in which objects whose id has a name are referred to; ModelError where something cannot be pickled.

    Names that are referred to are added to ``used``.
    """
    # Classes from a file that the user named exist in no process that did not load it.
    by_value = list(loaded_files().values())
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, names, set() if used is None else used).dump(obj)
    except Exception as error:
        raise ModelError(
            f"{type(obj).__name__}: cannot be sent to {to} ({type(error).__name__}: {error}); make it of parts "
            "that can be pickled, or run attacks in this process (isolate=False, --in-process, no executor)"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: BinaryIO, names: Mapping[int, str], used: set[str]) -> None:
        super().__init__(file)
        self._names, self._used = names, used

    def persistent_id(self, obj: object) -> str | None:
        """The name of a known object."""
        name = self._names.get(id(obj))
        if name is not None:
            self._used.add(name)
        return name

    def reducer_override(self, obj: Any) -> Any:
        """Networks of ``torch.jit`` in their own format, which cannot be pickled; quantised layers as whole modules."""
        if isinstance(obj, torch.jit.ScriptModule):
            content = io.BytesIO()
            torch.jit.save(obj, content)
            return _scripted, (content.getvalue(),)
        if isinstance(obj, nn.Module) and _omits_init(type(obj)):
            return _blank, (type(obj),), obj.__getstate__()  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def _scripted(content: bytes) -> torch.jit.ScriptModule:
    found: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]
    return found


def _omits_init(kind: type[nn.Module]) -> bool:
    """Return whether unpickled modules of a class lack what every module has, as quantised convolutions of torch do."""
    return kind.__module__.startswith("torch.ao.nn.") and kind.__setstate__ is not nn.Module.__setstate__


def _blank(kind: type[nn.Module]) -> nn.Module:
    """A module of a class without any state of its own."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


class Unpickler(pickle.Unpickler):
    """The reader of what :func:`pickled` wrote, given parts by name; a path after a colon names a module of a part."""

    def __init__(self, content: bytes, parts: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._parts = parts

    def persistent_load(self, name: str) -> object:
        """The object of this name."""
        part, _, path = name.partition(":")
        return dict(self._parts[part].named_modules())[path] if path else self._parts[part]


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Plain values and tensors as bytes."""
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
    found: bytes = safetensors.torch.save({**own, "header": text})
    return found


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Unpack the bytes of :func:`pack` on the CPU; raises any exception for other bytes."""
    tensors = safetensors.torch.load(content)
    header = json.loads(tensors.pop("header").numpy().tobytes())
    if not isinstance(header, dict):
        raise ValueError("a message that is no object")
    return header, tensors


def describe_error(error: RobustExtError) -> dict[str, Any]:
    """An error of this project as plain values."""
    found: dict[str, Any] = {"error": type(error).__name__, "text": str(error)[:20_000]}
    if isinstance(error, InvalidArgumentError):
        found["argument"] = [error.argument, str(error.got), error.expected]
    return found


def as_error(described: Mapping[str, Any]) -> RobustExtError:
    """The error that :func:`describe_error` described; an AttackError where there is no such class."""
    kind, text = getattr(errors, str(described["error"]), None), str(described.get("text"))
    if kind is InvalidArgumentError:
        argument, got, expected = (*map(str, described.get("argument", ())), text, text, text)[:3]
        return InvalidArgumentError(argument, got, expected)
    return kind(text) if isinstance(kind, type) and issubclass(kind, RobustExtError) else AttackError(text)
