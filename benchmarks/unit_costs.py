"""What one record, call or megabyte costs the process that opens the run folder; docs/scaling.md is computed from it.

    python benchmarks/unit_costs.py [--json docs/unit_costs.json]

Everything is measured here, in under a minute: records of real runs on the demo's network, their time to be written and
read, arrays of noise with 256 levels (what images compress to lies below), a network of 10 million numbers as a pickle,
and calls to one process of a pool. Seconds are the fastest of a few attempts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import pgd
from numpy.typing import NDArray
from torch import nn

from robust_ext import binarization_test, robust_accuracy
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.run_folder import RunFolder, SavedRun

THREAT = ThreatModel(norm="linf", epsilon=0.1)
MEBI = 2**20


def fastest(function: Callable[[], object], *, repeats: int = 3) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return min(times)


def line_bytes(folder: Path) -> float:
    """Mean bytes of a sample's line in the only run of a folder."""
    (file,) = folder.rglob("records.jsonl")
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.startswith(b'{"index"')]
    return sum(map(len, lines)) / len(lines)


def record_bytes(folder: Path) -> dict[str, float]:
    """Bytes of a sample's record: of robust accuracy, and of the binarization test for each attack and beside them."""
    digits = load_dataset("digits")
    inputs, labels = digits.take(digits.choose(32, seed=0))
    robust_accuracy(digits_network(), pgd(10), inputs, labels, THREAT, out=folder / "accuracy")

    def size(attacks: int) -> float:
        recipes = {f"attack {number}": pgd(10) for number in range(attacks)}
        settings = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "depths": (1,), "sequential": False}
        out = folder / f"binarization {attacks}"
        binarization_test(digits_network(), recipes, inputs, THREAT, out=out, **settings)
        return line_bytes(out)

    one, three = size(1), size(3)
    attack = (three - one) / 2
    return {
        "record_bytes": line_bytes(folder / "accuracy"),
        "planted_attack_bytes": attack,
        "planted_sample_bytes": one - attack,
    }


def record_seconds(folder: Path, *, count: int) -> dict[str, float]:
    """Seconds to append a record in a block of 64, to wait for the disk once, and to read a record again."""
    (file,) = (folder / "accuracy").rglob("records.jsonl")
    saved = SavedRun(file.parent)
    record, timing = saved.records()[0], {**saved.timings()[0], "arrays": {}}
    given: Mapping[str, Any] = {"kind": "attack", "settings": {}, "versions": {}}
    place = folder / "records"

    def opened() -> RunFolder:
        return RunFolder(place, **given)

    store = opened()
    store.append([], {**timing, "block": -1})  # Waits for the disk; the next seconds do not
    begun = time.perf_counter()
    for start in range(0, count, 64):
        block = [{**record, "index": index} for index in range(start, start + 64)]
        store.append(block, {**timing, "block": start})
    append = (time.perf_counter() - begun) / count
    store.close()
    read = fastest(lambda: opened().close()) / count
    with (place / "synced").open("ab", buffering=0) as synced:

        def sync() -> None:
            synced.write(b"." * 64 * len(json.dumps(record)))
            os.fsync(synced.fileno())

        waited = fastest(sync)
    return {"append_seconds": append, "sync_seconds": waited, "read_seconds": read}


def noise(rows: int) -> NDArray[np.float32]:
    """Images of 224 x 224 with 256 levels, and a sign-gradient step away from them."""
    draw = np.random.default_rng(0)
    clean = draw.integers(256, size=(rows, 3, 224, 224)).astype(np.float32) / 255
    found: NDArray[np.float32] = clean + np.float32(4 / 255) * draw.choice([-1, 1], clean.shape).astype(np.float32)
    return found


def array_costs(folder: Path) -> dict[str, float]:
    """Of a MiB of candidates: seconds to write it, and what is left of it."""
    candidates, store = noise(8), RunFolder(folder / "arrays", kind="costs", settings={}, versions={})
    store.save("candidates-000000", candidates=candidates)
    size = (folder / "arrays" / "arrays.bin").stat().st_size
    write = fastest(lambda: store.save("candidates-000000", candidates=candidates))
    store.close()
    return {"write_seconds_mib": write / candidates.nbytes * MEBI, "kept_share": size / candidates.nbytes}


def network_costs() -> dict[str, float]:
    """Of a network of 10 million numbers: bytes of one, and seconds of a MiB."""
    network, file = nn.Linear(3162, 3162), io.BytesIO()
    size = sum(part.numel() for part in network.parameters())

    def write() -> None:
        file.seek(0)
        pickle.dump(network, file)

    seconds = fastest(write)
    return {"bytes_parameter": file.tell() / size, "pickle_seconds_mib": seconds / file.tell() * MEBI}


def echo(content: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a worker is given."""
    return content


def call_costs(calls: int) -> dict[str, float]:
    """Of a call to another process: seconds by itself, and of each MiB that goes there and comes back."""
    block, empty = noise(8), np.zeros(1, dtype=np.float32)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(echo, empty).result()
        bare = fastest(lambda: [pool.submit(echo, empty).result() for _ in range(calls)]) / calls
        full = fastest(lambda: pool.submit(echo, block).result())
    return {"call_seconds": bare, "travel_seconds_mib": (full - bare) / (2 * block.nbytes) * MEBI}


def measured(*, records: int = 6400, calls: int = 200) -> dict[str, float]:
    """All unit costs: bytes, seconds and shares."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = record_bytes(folder) | record_seconds(folder, count=records) | array_costs(folder)
    return found | network_costs() | call_costs(calls)


def main() -> None:
    """Print the costs, and write them where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = json.dumps({name: float(f"{value:.3g}") for name, value in measured().items()}, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
