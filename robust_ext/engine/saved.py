"""How far a search has come within a block of samples, in a file of the run folder until the block is done.

Attacks that can go on from there (:attr:`robust_ext.attacks.native.NativeAttack.resumable`) then find what they would
have found without a stop. The process that runs the attack writes and reads what is kept; the judge keeps bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from robust_ext.attacks.base import Attack
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.core.target import PassCounter
from robust_ext.core.warning import warn
from robust_ext.engine.chain import DIGITS, checksum
from robust_ext.engine.witness import Witness

# A search is kept every so many seconds, or more rarely, so that this takes at most a fiftieth of its time.
_SECONDS, _RATIO = 5.0, 50.0


class Place(Protocol):
    """Where the search of a task is kept."""

    def load(self) -> bytes:
        """What was kept last; empty where there is nothing."""

    def save(self, content: bytes) -> None:
        """Keep this instead; without content, what was loaded is of no use and is left as it is."""


@dataclass
class FilePlace:
    """A file, which need not be there; ``used`` counts how often what it held was gone on with."""

    file: Path
    used: int = 0

    def load(self) -> bytes:
        """What was kept last; empty where there is nothing."""
        content = self.file.read_bytes() if self.file.exists() else b""
        self.used += bool(content)
        return content

    def save(self, content: bytes) -> None:
        """Keep this instead; without content, what was loaded is of no use and is left as it is."""
        if content:
            replace_file(self.file, content, error=RunFolderError, sync=False)
        else:
            self.used -= 1


_PLACE: ContextVar[Place | None] = ContextVar("robust_ext_saved", default=None)


@contextmanager
def kept_at(place: Place | None) -> Iterator[None]:
    """Searches inside the block are kept there; nowhere with None."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def current_place(attack: Attack) -> Place | None:
    """Where the search that an attack begins now is kept; None where it is not."""
    return _PLACE.get() if isinstance(attack, NativeAttack) and attack.resumable else None


@contextmanager
def saving(folder: Path | None, rows: range) -> Iterator[FilePlace | None]:
    """Searches inside the block are kept in a folder, until the block ends without an error; yields where."""
    place = None if folder is None else FilePlace(folder / f"search-{rows[0]:06d}")
    with kept_at(place):
        yield place
    if place is not None:
        place.file.unlink(missing_ok=True)


class TaskSearch:
    """The search of one task, as :class:`robust_ext.attacks.native.SavedSearch` has it.

    What was kept with another ``key`` is not its own. ``seconds`` are those that went into what was gone on with.
    """

    def __init__(self, place: Place, key: str, counter: PassCounter, witness: Witness) -> None:
        self._place, self._key, self._counter, self._witness = place, key, counter, witness
        self._begun, self._before, self.seconds = time.perf_counter(), counter.snapshot(), 0.0
        self._due = self._begun + _SECONDS

    def load(self) -> dict[str, Any] | None:
        """What an earlier process kept of the same task; None where there is nothing."""
        content = self._place.load()
        stated, content = content[:DIGITS], content[DIGITS:]
        if stated != checksum(self._key, content).encode():
            if stated:
                warn("the saved state of a search is damaged, or of another search: it starts again", kept=False)
                self._place.save(b"")
            return None
        kept = _read(content)
        self.seconds = kept["seconds"]
        # What the search did until here it did before, too.
        again = self._counter.since(self._before)
        self._counter.count_forward(kept["forward"] - again.forward)
        self._counter.count_backward(kept["backward"] - again.backward)
        self._witness.restore(kept["witness"])
        search: dict[str, Any] = kept["search"]
        return search

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        """Keep what ``state`` returns, once enough time went by."""
        begun = time.perf_counter()
        if begun < self._due:
            return
        spent, seconds = self._counter.since(self._before), begun - self._begun + self.seconds
        kept = {"forward": spent.forward, "backward": spent.backward, "seconds": seconds}
        content = _written({**kept, "witness": self._witness.state(), "search": state()})
        self._place.save(checksum(self._key, content).encode() + content)
        now = time.perf_counter()
        self._due = now + max(_SECONDS, _RATIO * (now - begun))


def _written(value: dict[str, Any]) -> bytes:
    """Dicts by name of tensors, numbers and such dicts as a safetensors file; the text of the rest is a tensor too."""
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name, "device": str(tensor.device)}

    text = json.dumps(value, default=put).encode()
    content: bytes = save({**tensors, "text": torch.tensor(list(text), dtype=torch.uint8)})
    return content


def _read(content: bytes) -> dict[str, Any]:
    tensors = load(content)

    def get(entry: dict[str, Any]) -> Any:
        return tensors[entry["tensor"]].to(entry["device"]) if "tensor" in entry else entry

    found: dict[str, Any] = json.loads(tensors["text"].numpy().tobytes(), object_hook=get)
    return found
