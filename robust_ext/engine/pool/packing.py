"""Runs as bytes: what runs have in common travels once to each worker, and of the samples a few."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from robust_ext.engine.isolation.messages import Unpickler, pickled

_TO = "a worker"
# Rows of the samples that every worker has, as probes of the network.
_ROWS = 4


class Packing:
    """Objects as parts by digest; a part refers to those before it by theirs."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self._names: dict[int, str] = {}
        self._kept: list[object] = []  # So that no other object gets the id of one that has a name

    def shorten(self, tensor: Tensor) -> str:
        """The digest of the first rows of a tensor ``(N, ...)``, which stand for it from now on."""
        return self._name(tensor, self.add(tensor[:_ROWS].clone()))

    def add(self, obj: object) -> str:
        """The digest of an object, which is a part from now on; ModelError where it cannot be pickled."""
        if (known := self._names.get(id(obj))) is not None:
            return known
        content = pickled(obj, self._names, to=_TO)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.parts[digest] = content
        return self._name(obj, digest)

    def _name(self, obj: object, digest: str) -> str:
        self._names[id(obj)] = digest
        self._kept.append(obj)
        return digest


def pack(values: Mapping[str, Any]) -> bytes:
    """What a block needs; of views of tensors only what they show."""
    own = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}
    return pickled(own, {}, to=_TO)


def unpack(content: bytes, parts: Mapping[str, object], *, origin: str, device: str | None) -> Any:
    """An object; tensors and devices of the kind ``origin`` are moved to a device where one is given."""
    return _Unpickler(content, parts, origin, device).load()


class _Unpickler(Unpickler):
    def __init__(self, content: bytes, parts: Mapping[str, object], origin: str, device: str | None) -> None:
        super().__init__(content, parts)
        self._origin, self._device = origin, device

    def find_class(self, module: str, name: str) -> Any:
        """What tensors and devices are made by, so that they are made on the device."""
        made: dict[tuple[str, str], Callable[..., object]] = {
            ("torch.storage", "_load_from_bytes"): self._storage,
            ("torch", "device"): self._moved,
            ("robust_ext.engine.isolation.messages", "_scripted"): self._scripted,
        }
        found = made.get((module, name))
        return super().find_class(module, name) if found is None or self._device is None else found

    def _storage(self, content: bytes) -> object:
        # As torch.storage reads it: what a pickle of this project's own holds.
        return torch.load(io.BytesIO(content), map_location=self._map, weights_only=False)

    def _scripted(self, content: bytes) -> object:
        return torch.jit.load(io.BytesIO(content), map_location=self._device)  # type: ignore[no-untyped-call]

    def _map(self, storage: Any, location: str) -> Any:
        if location.split(":")[0] != self._origin:
            return None
        return torch.serialization.default_restore_location(storage, str(self._device))  # type: ignore[no-untyped-call]

    def _moved(self, kind: str, *index: int) -> torch.device:
        return torch.device(kind, *index) if kind != self._origin else torch.device(str(self._device))
