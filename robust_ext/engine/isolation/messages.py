"""What passes between the judge and an attack's process.

Tasks travel as pickles to the attack's process. What comes back is JSON and the bytes of tensors: nothing that an
attack's process sends is ever unpickled by the judge.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch import Tensor, nn

from robust_ext.core import errors
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.objects import loaded_files

# Of a JSON message, so that an attack's process cannot fill the judge's memory.
HEADER_BYTES = 2**20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}


class Pickled:
    """Objects pickled for one process; what is shared travels once and is referred to afterwards."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[object] = []  # So that no other object gets the id of one that was sent

    def share(self, obj: object) -> tuple[str, bytes] | None:
        """A name and the pickle of an object that is to be referred to from now on; None where it is known."""
        if id(obj) in self._names:
            return None
        name, content = f"shared-{len(self._kept)}", self.dumps(obj)
        self._names[id(obj)] = name
        self._kept.append(obj)
        return name, content

    def dumps(self, obj: object) -> bytes:
        """A pickle in which what is shared is referred to; ModelError where something cannot be pickled."""
        return pickled(obj, self._names, to="the attack's process")


def pickled(obj: object, names: Mapping[int, str], *, to: str) -> bytes:
    """A pickle in which objects whose id has a name are referred to; ModelError where something cannot be pickled."""
    # Classes from a file that the user named exist in no process that did not load it.
    by_value = list(loaded_files().values())
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, names).dump(obj)
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
    def __init__(self, file: BinaryIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: object) -> str | None:
        """The name of what is shared."""
        return self._names.get(id(obj))

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
    """Whether unpickled modules of a class lack what every module has, as quantised convolutions of torch do."""
    return kind.__module__.startswith("torch.ao.nn.") and kind.__setstate__ is not nn.Module.__setstate__


def _blank(kind: type[nn.Module]) -> nn.Module:
    """A module of a class without any state of its own."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


class Unpickler(pickle.Unpickler):
    """For the other side: reads what :func:`pickled` wrote, given what is shared by name."""

    def __init__(self, content: bytes, shared: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(content))
        self._shared = shared

    def persistent_load(self, name: str) -> object:
        """What is shared under a name."""
        return self._shared[name]


def send_header(connection: Connection, **header: Any) -> None:
    """Send plain values."""
    connection.send_bytes(json.dumps(header).encode())


def receive_header(connection: Connection) -> dict[str, Any]:
    """Receive plain values; ValueError where something else comes, EOFError and OSError where nothing does."""
    header = json.loads(connection.recv_bytes(HEADER_BYTES))
    if not isinstance(header, dict):
        raise ValueError("a message that is no object")
    return header


def describe_tensor(tensor: Tensor) -> dict[str, Any]:
    """Shape and dtype, as plain values."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def receive_tensor(
    connection: Connection, described: Mapping[str, Any], *, expected: Sequence[int], attack: str
) -> Tensor:
    """The tensor that :func:`describe_tensor` described, its values read only where it has the expected shape.

    ValueError where the description is none, AttackError where no candidates are of this type.
    """
    shape, dtype = described["shape"], _DTYPES.get(described["dtype"])
    if not isinstance(shape, list) or not all(isinstance(size, int) and 0 <= size < 2**31 for size in shape):
        raise ValueError("a shape that is none")
    if dtype is None:
        stated = str(described["dtype"])[:40]
        raise AttackError(f"{attack}: returned dtype torch.{stated}, expected floating point candidates")
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if shape != list(expected):
        return torch.zeros((), dtype=dtype).expand(shape)
    content = connection.recv_bytes(size)
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes for a tensor of {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


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
