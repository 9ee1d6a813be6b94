"""Messages to other processes.

Requests travel to an attack's process, and calls to a worker, as pickles. Replies of an attack's process are
safetensors files with JSON in them: the judge unpickles nothing that an attack's process sends.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
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

LONGEST = 20_000
"""Characters of a text in a reply."""


class Packer:
    """Objects as pickles; those that several of them share are parts, pickled once and referred to by name.

    ``to`` is where they travel, for errors.
    """

    def __init__(self, to: str) -> None:
        self.parts: dict[str, bytes] = {}
        """Pickles of parts by digest; each may refer to those before it."""
        self._to = to
        self._needed: dict[str, list[str]] = {}
        self._names: dict[int, str] = {}
        self._kept: list[object] = []  # So that no other object gets the id of one that has a name

    def share(self, obj: object, *, rows: int | None = None) -> None:
        """Pickle a part as it is now, unless it is one; its modules are referred to as well.

        With ``rows`` the first rows of a tensor ``(N, ...)`` stand for all of it.
        """
        if id(obj) in self._names:
            return
        content, needed = self.pickle(obj[:rows].clone() if isinstance(obj, Tensor) and rows is not None else obj)
        name = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.parts[name], self._needed[name] = content, needed
        scripted = isinstance(obj, torch.jit.ScriptModule)
        modules = dict(obj.named_modules()) if isinstance(obj, nn.Module) and not scripted else {}
        self._names = {
            id(obj): f"{name}:",
            **{id(one): f"{name}:{path}" for path, one in modules.items()},
            **self._names,
        }
        self._kept += [obj, *modules.values()]

    def pickle(self, obj: object) -> tuple[bytes, list[str]]:
        """Return a pickle and the parts that it needs, in order; ModelError where something cannot be pickled."""
        used: set[str] = set()
        content = pickled(obj, self._names, to=self._to, used=used)
        names = {name.partition(":")[0] for name in used}
        needed = names.union(*(self._needed[name] for name in names))
        return content, [name for name in self.parts if name in needed]


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
    found: dict[str, Any] = {"error": type(error).__name__, "text": str(error)[:LONGEST]}
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
