"""What runs of attacks leave: records, candidates and scores, in memory or in folders that survive a kill.

In a run folder each run of an attack has a folder of its own, ``arms/NAME``, with ``run.json``, ``records.jsonl``,
``timings.jsonl``, ``candidates-ROW.npz`` (float32, compressed, without pickle) and ``scores-DETECTOR-DIGEST.npz``. A
suite with further arms or detectors goes on in the same folder: what is there already is not made again.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.run_folder import RunFolder

Floats = NDArray[np.float64]


class RunStore(Protocol):
    """What one run of an attack leaves."""

    def records(self) -> list[dict[str, Any]]:
        """One a sample, sorted by ``index``."""

    def timings(self) -> list[dict[str, Any]]:
        """One a block."""

    def append(self, records: Iterable[Mapping[str, Any]], timing: Mapping[str, Any], candidates: Tensor) -> None:
        """Keep a finished block: its records, what it took, and its candidates ``(n, ...)``."""

    def candidates(self, start: int) -> Tensor:
        """The candidates of the block that begins at this row, float32 ``(n, ...)``."""

    def scores(self, detector: str, digest: str) -> tuple[Floats, float] | None:
        """A detector's scores of all candidates, float64 ``(N,)``, and the seconds they took; None before."""

    def keep_scores(self, detector: str, digest: str, scores: Floats, seconds: float) -> None:
        """Keep these."""

    def close(self) -> None:
        """Let other processes have it."""


class MemoryRun:
    """A run that is kept in memory."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._timings: list[dict[str, Any]] = []
        self._candidates: dict[int, Tensor] = {}
        self._scores: dict[tuple[str, str], tuple[Floats, float]] = {}

    def records(self) -> list[dict[str, Any]]:
        """See :class:`RunStore`."""
        return sorted(self._records, key=lambda record: int(record["index"]))

    def timings(self) -> list[dict[str, Any]]:
        """See :class:`RunStore`."""
        return self._timings

    def append(self, records: Iterable[Mapping[str, Any]], timing: Mapping[str, Any], candidates: Tensor) -> None:
        """See :class:`RunStore`."""
        new = [dict(record) for record in records]
        self._records += new
        self._timings.append(dict(timing))
        self._candidates[new[0]["index"]] = candidates.cpu()

    def candidates(self, start: int) -> Tensor:
        """See :class:`RunStore`."""
        return self._candidates[start]

    def scores(self, detector: str, digest: str) -> tuple[Floats, float] | None:
        """See :class:`RunStore`."""
        return self._scores.get((detector, digest))

    def keep_scores(self, detector: str, digest: str, scores: Floats, seconds: float) -> None:
        """See :class:`RunStore`."""
        self._scores[detector, digest] = scores, seconds

    def close(self) -> None:
        """Nothing to do."""


class FolderRun:
    """A run in a folder.

    Args:
        path: Of the folder.
        settings: All that decides what the run returns.
        versions: Of what runs.

    Raises:
        RunFolderError: The folder holds another run.
        RunFolderBusyError: Another process has it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, settings: Mapping[str, Any], versions: Mapping[str, str]
    ) -> None:
        self._folder = RunFolder(path, kind="arm", settings=settings, versions=versions)
        self.path = self._folder.path

    def records(self) -> list[dict[str, Any]]:
        """See :class:`RunStore`."""
        return self._folder.records()

    def timings(self) -> list[dict[str, Any]]:
        """See :class:`RunStore`."""
        return self._folder.timings()

    def append(self, records: Iterable[Mapping[str, Any]], timing: Mapping[str, Any], candidates: Tensor) -> None:
        """See :class:`RunStore`."""
        new = list(records)
        # Before the records: a block whose records are there is not run again.
        _save(self._file(new[0]["index"]), candidates=candidates.detach().cpu().numpy())
        self._folder.append(new, timing)

    def candidates(self, start: int) -> Tensor:
        """See :class:`RunStore`."""
        return torch.from_numpy(_load(self._file(start))["candidates"])

    def scores(self, detector: str, digest: str) -> tuple[Floats, float] | None:
        """See :class:`RunStore`."""
        file = self._scores_file(detector, digest)
        if not file.exists():
            return None
        found = _load(file)
        return found["scores"].astype(np.float64), float(found["seconds"])

    def keep_scores(self, detector: str, digest: str, scores: Floats, seconds: float) -> None:
        """See :class:`RunStore`."""
        _save(self._scores_file(detector, digest), scores=scores, seconds=np.float64(seconds))

    def close(self) -> None:
        """See :class:`RunStore`."""
        self._folder.close()

    def _file(self, start: int) -> Path:
        return self.path / f"candidates-{start:06d}.npz"

    def _scores_file(self, detector: str, digest: str) -> Path:
        return self.path / f"scores-{re.sub(r'[^A-Za-z0-9.]+', '-', detector)[:40]}-{digest[:12]}.npz"


def _save(path: Path, **arrays: Any) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    replace_file(path, content.getvalue())


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); remove its folder to run it again") from error
