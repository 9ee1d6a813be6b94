"""One run on several processes: each repeats the command for its share of the samples, into the same run folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from robust_ext.core.errors import RobustExtError
from robust_ext.engine.progress import Progress

_PATIENCE = 0.5


def run_shards(
    arguments: Sequence[str], folders: Iterable[Path], *, jobs: int, total: int, bar: Progress | None = None
) -> None:
    """Run ``robust-ext`` ``jobs`` times with these arguments and ``--shard K/jobs``, until all have ended.

    Each gets its part of the cores, and ends when this process does. ``bar`` counts the records in the folders,
    ``total`` at the end. Raises RobustExtError with the end of its output where a process failed.
    """
    folders = list(folders)
    counted: dict[Path, tuple[int, int]] = {}  # Bytes that were read, and the lines in them

    def done() -> int:
        for file in (file for folder in folders for file in folder.glob("records*.jsonl")):
            offset, lines = counted.get(file, (0, 0))
            with file.open("rb") as opened:
                opened.seek(offset)
                added = opened.read()
            counted[file] = offset + len(added), lines + added.count(b"\n")
        return min(sum(lines for _, lines in counted.values()), total)

    cores = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores)}
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(jobs)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "robust_ext", *arguments, "--shard", f"{number}/{jobs}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )
            for number, log in enumerate(logs)
        ]
        stack.callback(_stop, children)
        shown = 0
        if bar is not None:
            bar.phase(f"{jobs} processes")
            bar.forecast.begin("", 1)
        while any(child.poll() is None for child in children):
            if bar is not None and (added := done() - shown) > 0:
                bar.forecast.end("", added)
                bar.forecast.begin("", 1)
                shown += added
                bar.advance(added)
            elif bar is not None:
                bar.advance(0)
            if any(child.poll() not in (None, 0) for child in children):
                break
            time.sleep(_PATIENCE)
        if bar is not None:
            bar.advance(done() - shown)
        for number, (child, log) in enumerate(zip(children, logs, strict=True)):
            if child.poll() not in (None, 0):
                log.seek(0)
                output = log.read().decode(errors="replace").strip().splitlines()
                raise RobustExtError(f"process {number} of {jobs} failed: " + "\n".join(output[-15:]))


def end_with_parent() -> None:
    """End this process when the one that started it closes its side of stdin, however that one ended."""

    def watch() -> None:
        # The bare file: a thread that waits inside sys.stdin would hold a lock that the interpreter needs to end.
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
