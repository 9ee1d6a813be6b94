"""Folders of runs: what is kept, compared and refused, and what is lost where the system or a kill stops a write."""

import multiprocessing
import os
import shutil
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from robust_ext.core.errors import RobustExtWarning, RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.run_folder import RunFolder, SavedRun

resource = pytest.importorskip("resource", reason="limits of file sizes are POSIX")


def opened(path, settings=None, **options):
    given = {"kind": "test", "versions": {"torch": "1"}, **options}
    return RunFolder(path, settings={"epsilon": 0.1, "bounds": (0, 1)} if settings is None else settings, **given)


def tree(path):
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def record(index, value=0):
    return {"index": index, "value": value}


def made(block):
    """The records, timing and arrays of a block of four samples."""
    rows = range(4 * block, 4 * block + 4)
    arrays = {f"candidates-{rows[0]}": {"candidates": np.random.default_rng(block).random(50)}}
    return [record(row, "x" * (row % 97)) for row in rows], {"block": rows[0]}, arrays


def fill(folder, blocks=3):
    """Work on what is missing; what is then there."""
    for block in range(blocks):
        if not folder.holds(range(4 * block, 4 * block + 4)):
            folder.append(*made(block))
    check(folder, blocks)


def check(folder, blocks):
    """Every block is there with its arrays."""
    assert [timing["block"] for timing in folder.timings()] == [4 * block for block in range(blocks)]
    for block in range(blocks):
        records, _, arrays = made(block)
        assert folder.block(range(4 * block, 4 * block + 4)) == records
        for name, array in arrays.items():
            np.testing.assert_array_equal(folder.load(name)["candidates"], array["candidates"])


def test_records_survive_closing(tmp_path):
    with opened(tmp_path / "a" / "run") as folder:
        assert (folder.records(), folder.timings()) == ([], [])
        folder.append([record(3), record(1, "é\n")], {"block": 0, "seconds": 0.5})
        folder.append([], {"block": 1, "seconds": 0.25})
        folder.append([record(0)], {"block": 2, "seconds": 0.125})
        before = folder.records(), folder.timings()
        # What is appended is in the file at once.
        assert len(SavedRun(tmp_path / "a" / "run").records()) == 3
    assert before[0] == [record(0), record(1, "é\n"), record(3)]
    assert [entry["block"] for entry in before[1]] == [0, 1, 2]
    with opened(tmp_path / "a" / "run") as folder:
        assert (folder.records(), folder.timings()) == before
        folder.append([record(2)], {"block": 3})
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.append([record(7, float("nan"))], {"block": 4})
        assert [entry["index"] for entry in folder.records()] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", ['{"index": 1', '{"index": 1}', "{", "\x00\x00"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    """The last line counts only with its line break; the next record starts a line of its own."""
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(torn)
    with opened(tmp_path) as folder:
        assert (folder.records(), folder.timings()) == ([record(0)], [{"block": 0}])
        folder.append([record(1)], {"block": 1})
    with opened(tmp_path) as folder:
        assert (folder.records(), folder.timings()) == ([record(0), record(1)], [{"block": 0}, {"block": 1}])


def test_a_block_counts_once_its_last_byte_is_there(tmp_path):
    """Wherever a kill cuts the file, a block is there as a whole or is none, and can be stored again."""
    with opened(tmp_path / "whole") as folder:
        fill(folder, 2)
    content = (tmp_path / "whole" / "records.jsonl").read_bytes()
    for cut in range(0, len(content) + 1, 7):
        path = shutil.copytree(tmp_path / "whole", tmp_path / f"{cut}")
        (path / "records.jsonl").write_bytes(content[:cut])
        with opened(path) as folder:
            fill(folder, 2)


def test_other_settings_are_refused_and_named(tmp_path):
    opened(tmp_path).close()
    content = (tmp_path / "records.jsonl").read_text()
    with pytest.raises(RunFolderError, match=r"with other settings.*epsilon: 0.1 there, 0.2 now") as caught:
        opened(tmp_path, {"epsilon": 0.2, "bounds": (0, 1), "new": "x" * 1000})
    assert "bounds" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert (tmp_path / "records.jsonl").read_text() == content
    # The refused one lets go of the folder, even while its error is kept.
    opened(tmp_path).close()
    assert caught.value is not None


def test_other_versions_are_warned_of(tmp_path, recwarn):
    opened(tmp_path).close()
    opened(tmp_path).close()
    assert not recwarn
    with pytest.warns(RobustExtWarning, match="begun with other versions"):
        opened(tmp_path, versions={"torch": "2"}).close()


def test_folders_that_are_no_run_of_this_kind_are_refused(tmp_path):
    """Another kind, an earlier version, no folder, and what cannot be locked, which is not said to be in use."""
    opened(tmp_path / "test").close()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "lock" / ".lock").mkdir(parents=True)
    before = tree(tmp_path)
    for name, words in {
        "test": "holds a run of kind 'test', not 'mead'",
        "old": "old: was written by an earlier version of robust_ext",
        "file": "cannot be made a folder",
        "file/run": "cannot be made a folder",
        "lock": "cannot be written",
    }.items():
        with pytest.raises(RunFolderError, match=words):
            opened(tmp_path / name, kind="mead")
    assert tree(tmp_path) - before == {"old/.lock"}
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["records.jsonl", "arrays.bin", ".lock"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused_and_not_waited_for(tmp_path, name, kind):
    path, outside = tmp_path / "run", tmp_path / "outside"
    with opened(path) as folder:
        folder.append([record(0)], {"block": 0}, {"a": {"x": np.zeros(2)}})
    outside.write_bytes((path / name).read_bytes())
    before = outside.read_bytes()
    (path / name).unlink()
    (path / name).symlink_to(outside) if kind == "link" else os.mkfifo(path / name)

    def use():
        with opened(path) as folder:
            folder.save("b", x=np.zeros(2))

    with pytest.raises(RunFolderError, match=rf"{name}: (is a symbolic link|is a pipe or device|cannot be written)"):
        use()
    assert outside.read_bytes() == before


def test_nothing_is_written_outside_the_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with opened(tmp_path / "run") as folder:
        folder.append([record(0)], {"block": 0})
        folder.set_value("once", 1)
        folder.finish(folder.records())
        folder.save("arrays", x=np.zeros(2))
    assert tree(tmp_path) == {"elsewhere", "run", "run/records.jsonl", "run/arrays.bin", "run/.lock"}


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "file.txt"
    replace_file(file, "one")
    replace_file(file, "twö")
    assert tree(tmp_path) == {"file.txt"}
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, "three")
    assert file.read_text(encoding="utf-8") == "twö"


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
    path, words = tmp_path / "run", r"run/.*cannot be written \(File too large\); free space"
    with pytest.raises(RunFolderError, match=words), full_disk(size), opened(path) as folder:
        fill(folder)
    with opened(path) as folder:
        fill(folder)


def test_a_write_that_failed_can_be_repeated_at_once(tmp_path):
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0})
        with full_disk(330), pytest.raises(RunFolderError, match="File too large"):
            folder.append([record(1, "x" * 30), record(2, "x" * 200)], {"block": 1})
        folder.append([record(1)], {"block": 1})
        assert SavedRun(tmp_path).records() == folder.records() == [record(0), record(1)]


def test_two_writers_never_mix_lines(tmp_path, monkeypatch):
    """Where locks fail, as on some network drives, the second writer is seen by what it wrote."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.append([record(0)], {"block": 0})
        with pytest.raises(RunFolderError, match=r"records\.jsonl: holds \d+ bytes where .* another one writes it too"):
            two.append([record(1)], {"block": 1})
        one.append([record(2)], {"block": 2})
    with opened(tmp_path) as folder:
        assert [one["index"] for one in folder.records()] == [0, 2]


def write_blocks(path, pipe):
    with opened(path) as folder:
        for block in count(len(folder.timings())):
            folder.append(*made(block))
            pipe.send(block)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_thirty_kills_lose_no_finished_block(tmp_path):
    """What a writer has stored is there after SIGKILL, wherever that hits it; while it writes no other one may."""
    processes, draw, finished = multiprocessing.get_context("fork"), np.random.default_rng(0), -1
    for number in range(30):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=write_blocks, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        finished = ours.recv()
        if number == 0:
            with pytest.raises(RunFolderError, match="another process is writing this run"):
                opened(tmp_path)
        time.sleep(draw.uniform(0, 0.003))
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                finished = ours.recv()
        with opened(tmp_path) as folder:
            assert folder.holds(range(4 * finished, 4 * finished + 4))
    with opened(tmp_path) as folder:
        assert finished >= 29
        check(folder, len(folder.timings()))
