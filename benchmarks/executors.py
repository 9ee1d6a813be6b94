"""What it costs to have blocks done by workers: many short blocks against the ideal, and a test here against one there.

Run it with ``python benchmarks/executors.py``; it takes a minute or two, and prints seconds and ratios. Workers are
processes of this machine, which has to have two cores to spare.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.executors import make_executor
from robust_ext.engine.inputs import blocks_of
from robust_ext.engine.run import Block, Run
from robust_ext.engine.running import attack_worker, run_all
from robust_ext.engine.task import Work, drive

THREAT = robust_ext.ThreatModel(norm="linf", epsilon=0.1)


@dataclass(frozen=True, kw_only=True)
class Sleeping(Run):
    """Blocks of one record that take a time."""

    seconds: float

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """Sleep."""
        time.sleep(self.seconds)
        return Block(records=[{"index": row} for row in rows], timing={"block": rows[0], "phases": {}})
        yield


def short_blocks(count: int, seconds: float, workers: int) -> None:
    """Blocks of so many seconds, into a run folder, on workers that have begun."""

    def run(number: int, folder: Path) -> float:
        made = Sleeping(key="", title="sleeping", blocks=blocks_of(number, 1), identity={}, seconds=seconds)
        begun = time.perf_counter()
        outcomes = drive(run_all([made], out=folder, progress=False, title="sleeping"))
        assert len(outcomes[""].records) == number
        return time.perf_counter() - begun

    with attack_worker(isolate=False, executor=f"local:{workers}"), tempfile.TemporaryDirectory() as folder:
        begun = run(4 * workers, Path(folder) / "first")
        taken, ideal = run(count, Path(folder) / "all"), count * seconds / workers
    print(f"workers begin in {begun:.1f} s")
    print(f"{count} blocks of {1000 * seconds:.0f} ms on {workers} workers: {taken:.2f} s, ideal {ideal:.2f} s")
    print(f"ratio {taken / ideal:.3f}")


def tests(samples: int, workers: int) -> None:
    """A binarization test here and on workers, their start counted."""
    inputs, _ = load_dataset("digits").take(range(samples))
    call = partial(
        robust_ext.binarization_test, digits_network(), "robust_ext:APGD(steps=100)", inputs, THREAT, batch_size=8
    )
    seconds = []
    for where in ({}, {"executor": f"local:{workers}"}):
        begun = time.perf_counter()
        call(**where)
        seconds.append(time.perf_counter() - begun)
    print(f"binarization test of {samples} samples: {seconds[0]:.1f} s here, {seconds[1]:.1f} s on {workers} workers")
    print(f"ratio {seconds[1] / seconds[0]:.2f}, ideal {1 / workers:.2f}")


def calls(name: str, workers: int) -> None:
    """What an executor takes to start, for a call, and for ten megabytes."""
    begun = time.perf_counter()
    executor = make_executor(name, workers=workers)()
    executor.submit(exec, "import robust_ext.engine.running").result()
    start = time.perf_counter() - begun
    wait([executor.submit(time.sleep, 0.5) for _ in range(2 * workers)])
    begun = time.perf_counter()
    wait([executor.submit(abs, -1) for _ in range(200)])
    call = (time.perf_counter() - begun) / 200
    begun, network = time.perf_counter(), os.urandom(10_000_000)
    executor.submit(len, network).result()
    large = time.perf_counter() - begun
    executor.shutdown(wait=False, cancel_futures=True)
    print(f"{name}: starts in {start:.1f} s, a call {1000 * call:.2f} ms, of 10 MB {1000 * large:.0f} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--executor", action="append", help="local or dask: only what these take for a call")
    chosen = parser.parse_args()
    for executor in chosen.executor or ():
        calls(executor, chosen.workers)
    if chosen.executor:
        sys.exit()
    short_blocks(chosen.blocks, 0.01, chosen.workers)
    tests(chosen.samples, chosen.workers)
