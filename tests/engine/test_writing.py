"""What the operating system refuses to write is an error with its words, and the folder can be gone on with."""

import errno
import multiprocessing
import os
import shutil
import time
from contextlib import contextmanager, suppress
from itertools import count

import numpy as np
import pytest

from robust_ext.core.errors import DataError, RunFolderError
from robust_ext.engine.inputs import blocks_of
from robust_ext.engine.run_folder import RunFolder, SavedRun
from robust_ext.reports import save
from tests.reports.results import make_robust_accuracy

resource = pytest.importorskip("resource", reason="limits of file sizes are POSIX")
BLOCKS = blocks_of(12, 4)


def opened(path, **options):
    return RunFolder(path, kind="test", settings={"a": 1}, versions={}, **options)


def fill(folder):
    """Work on what is missing; what is then there."""
    for rows in BLOCKS:
        if not folder.holds(rows):
            arrays = {f"candidates-{rows[0]}": {"candidates": np.random.default_rng(rows[0]).random(50)}}
            folder.append([{"index": row, "text": "x" * row} for row in rows], {"block": rows[0]}, arrays)
    return folder.records(), [timing["block"] for timing in folder.timings()]


@contextmanager
def full_disk(size):
    """No file grows beyond this size; what fits is written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [50, 100, 300, 500, 700, 1100, 1500])
def test_a_full_disk_loses_nothing(tmp_path, size):
    """Wherever in a file, and in whichever file, the space ends."""
    with opened(tmp_path / "whole") as folder:
        expected = fill(folder)
    path = tmp_path / "run"
    words = r"run/.*cannot be written \(File too large\); free space"
    with pytest.raises(RunFolderError, match=words), full_disk(size), opened(path) as folder:
        fill(folder)
    with opened(path) as folder:
        assert fill(folder) == expected


def test_a_write_that_failed_can_be_repeated_at_once(tmp_path):
    with opened(tmp_path) as folder:
        folder.append([{"index": 0}], {"block": 0})
        with full_disk(300), pytest.raises(RunFolderError, match="File too large"):
            folder.append([{"index": 1, "text": "x" * 30}, {"index": 2, "text": "x" * 200}], {"block": 1})
        folder.append([{"index": 1}], {"block": 1})
        assert SavedRun(tmp_path).records() == folder.records() == [{"index": 0}, {"index": 1}]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_errors_of_the_system_keep_their_words(tmp_path, monkeypatch, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    # Otherwise every few seconds.
    monkeypatch.setattr("robust_ext.engine.run_folder._SYNC_SECONDS", 0.0)
    with opened(tmp_path) as folder:
        monkeypatch.setattr(os, "fsync", refuse)
        for write in (
            lambda: folder.append([{"index": 0}], {"block": 0}),
            lambda: folder.save("arrays", values=np.zeros(3)),
            lambda: folder.append([{"index": 1}], {"block": 1}, {"arrays": {"values": np.zeros(3)}}),
            lambda: opened(tmp_path / "new"),
            lambda: folder.set_value("once", 1),
        ):
            with pytest.raises(RunFolderError, match=rf"cannot be written \({os.strerror(number)}\); free space"):
                write()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_vanishes_is_an_error(tmp_path):
    path = tmp_path / "run"
    with opened(path) as folder:
        folder.append([{"index": 0}], {"block": 0})
        shutil.rmtree(path)
        for write in (
            lambda: folder.append([{"index": 1}], {"block": 1}),
            lambda: folder.save("arrays", values=np.zeros(3)),
        ):
            with pytest.raises(RunFolderError, match=r"run/.*cannot be written \(No such file or directory\)"):
                write()
    assert not path.exists()


def test_reports_name_what_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "result.json").mkdir(parents=True)
    for place, words in (
        ("file", r"file: cannot be made a folder \(File exists\)"),
        ("folder", r"result\.json: cannot"),
    ):
        with pytest.raises(DataError, match=words):
            save(make_robust_accuracy("pgd"), tmp_path / place)


def test_two_writers_never_mix_lines(tmp_path, monkeypatch):
    """Where locks fail, as on some network drives, the second writer is seen by what it wrote."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.append([{"index": 0}], {"block": 0})
        with pytest.raises(RunFolderError, match=r"records\.jsonl: holds \d+ bytes where .* another one writes it too"):
            two.append([{"index": 1}], {"block": 1})
        one.append([{"index": 2}], {"block": 2})
    with opened(tmp_path) as folder:
        assert [record["index"] for record in folder.records()] == [0, 2]


def made(block):
    """The records, timing and arrays of a block."""
    rows = range(4 * block, 4 * block + 4)
    arrays = {f"candidates-{rows[0]}": {"candidates": np.random.default_rng(block).random(300)}}
    return [{"index": row, "text": "x" * (row % 97)} for row in rows], {"block": rows[0]}, arrays


def write_blocks(path, pipe):
    with opened(path) as folder:
        for block in count(len(folder.timings())):
            folder.append(*made(block))
            pipe.send(block)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_hundred_kills_lose_no_finished_block(tmp_path):
    """What a writer has stored is there after SIGKILL, wherever that hits it."""
    processes, draw, finished = multiprocessing.get_context("fork"), np.random.default_rng(0), -1
    for _ in range(100):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=write_blocks, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        finished = ours.recv()
        time.sleep(draw.uniform(0, 0.003))
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                finished = ours.recv()
        with opened(tmp_path) as folder:
            assert folder.holds(range(4 * finished, 4 * finished + 4))
    with opened(tmp_path) as folder:
        blocks = range(len(folder.timings()))
        assert len(blocks) >= 100
        for block in blocks:
            records, _, arrays = made(block)
            assert folder.block(range(4 * block, 4 * block + 4)) == records
            (name,) = arrays
            np.testing.assert_array_equal(folder.load(name)["candidates"], arrays[name]["candidates"])
