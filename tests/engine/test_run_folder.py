"""Folders of runs: what is kept, refused, repaired, and lost where the system, a kill or damage stops or changes it."""

import json
import multiprocessing
import os
import shutil
import time
from contextlib import contextmanager, suppress
from itertools import count

import numpy as np
import pytest

from robust_ext import BinarizationSettings, RunFolderError, ThreatModel, repairing
from robust_ext.core.errors import RobustExtWarning
from robust_ext.engine.evaluation_file import with_judge_seed
from robust_ext.engine.run_folder import RunFolder, SavedRun, seal

resource = pytest.importorskip("resource", reason="limits of file sizes are POSIX")
BLOCKS = [range(0, 3), range(3, 6), range(6, 7)]


def opened(path, settings=None, **options):
    settings = settings or {"epsilon": 0.1, "bounds": (0, 1)}
    return RunFolder(path, settings=settings, **{"kind": "test", "versions": {"torch": "1"}, **options})


def record(index, text=""):
    return {"index": index, "outcome": "found" if index % 2 else "not_adversarial", "text": text}


def made(rows):
    arrays = {f"candidates-{rows[0]}": {"candidates": np.random.default_rng(rows[0]).random(50)}}
    return [record(row, "é\n" * (row % 97)) for row in rows], {"block": rows[0], "passes": 5}, arrays


def fill(path, **options):
    with opened(path, **options) as folder:
        if "once" not in folder.values:
            folder.set_value("once", [1, 2.5])
        for rows in BLOCKS:
            if not folder.holds(rows):
                folder.append(*made(rows))
        assert folder.values == {"once": [1, 2.5]}
        assert [entry["passes"] for entry in folder.timings()] == [5, 5, 5]
        for rows in BLOCKS:
            check_block(folder, rows)


def check_block(folder, rows):
    records, _, arrays = made(rows)
    assert folder.block(rows) == records
    for name, parts in arrays.items():
        np.testing.assert_array_equal(folder.load(name)["candidates"], parts["candidates"])


@pytest.fixture
def whole(tmp_path):
    fill(tmp_path / "run")
    return tmp_path / "run"


def tree(path):
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def test_records_survive_closing_and_nothing_is_written_outside(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "a" / "run"
    with opened(path) as folder:
        assert (folder.records(), folder.timings()) == ([], [])
        folder.append([record(3), record(1, "é\n")], {"block": 0, "seconds": 0.5})
        folder.append([], {"block": 1, "seconds": 0.25})
        assert len(SavedRun(path).records()) == 2, "what is appended is in the file at once"
    with opened(path) as folder:
        assert folder.records() == [record(1, "é\n"), record(3)]
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.append([record(7, float("nan"))], {"block": 4})
        # A block that came twice counts once.
        folder.append([record(2)], {"block": 3})
        folder.append([record(3)], {"block": 3, "seconds": 7.0})
        assert [entry["index"] for entry in folder.records()] == [1, 2, 3]
        assert [entry.get("seconds") for entry in folder.timings()] == [0.5, 0.25, 7.0]
        folder.finish(folder.records())
        folder.save("arrays", x=np.zeros(2))
    kept = {"a/run/records.jsonl", "a/run/arrays.bin", "a/run/.lock"}
    assert tree(tmp_path) == {"elsewhere", "a", "a/run", *kept}


def test_a_block_counts_once_its_last_byte_is_there(whole, tmp_path):
    """Wherever a kill cuts the file, a block is there as a whole or is none, and can be stored again."""
    content = (whole / "records.jsonl").read_bytes()
    for cut in range(0, len(content) + 1, 11):
        path = shutil.copytree(whole, tmp_path / f"{cut}")
        (path / "records.jsonl").write_bytes(content[:cut])
        fill(path)


def test_other_settings_are_refused_and_named_and_other_versions_are_warned_of(whole, recwarn):
    content = (whole / "records.jsonl").read_text()
    with pytest.raises(RunFolderError, match=r"with other settings.*epsilon: 0.1 there, 0.2 now") as caught:
        opened(whole, {"epsilon": 0.2, "bounds": (0, 1), "new": "x" * 1000})
    assert "bounds" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(whole))
    assert (whole / "records.jsonl").read_text() == content
    # The refused one lets go of the folder, even while its error is kept.
    opened(whole).close()
    assert not recwarn
    with pytest.warns(RobustExtWarning, match="begun with other versions"):
        opened(whole, versions={"torch": "2"}).close()


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
        "file/run": "cannot be made a folder",
        "lock": "cannot be written",
    }.items():
        with pytest.raises(RunFolderError, match=words):
            opened(tmp_path / name, kind="mead")
    assert tree(tmp_path) - before == {"old/.lock"}
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["records.jsonl", "arrays.bin", ".lock"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused_and_not_waited_for(whole, tmp_path, name, kind):
    outside = tmp_path / "outside"
    outside.write_bytes((whole / name).read_bytes())
    before = outside.read_bytes()
    (whole / name).unlink()
    (whole / name).symlink_to(outside) if kind == "link" else os.mkfifo(whole / name)

    def use():
        with opened(whole) as folder:
            folder.save("b", x=np.zeros(2))

    with pytest.raises(RunFolderError, match=rf"{name}: (is a symbolic link|is a pipe or device|cannot be written)"):
        use()
    assert outside.read_bytes() == before


@contextmanager
def full_disk(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing_and_a_write_can_be_repeated_at_once(tmp_path):
    """Wherever in a file, and in whichever file, the space ends."""
    for size in (50, 100, 200, 300, 500, 700, 1100, 1500):
        path, words = tmp_path / f"{size}", rf"{size}/.*cannot be written \(File too large\); free space"
        with pytest.raises(RunFolderError, match=words), full_disk(size):
            fill(path)
        fill(path)
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0})
        with full_disk(450), pytest.raises(RunFolderError, match="File too large"):
            folder.append([record(1, "x" * 30), record(2, "x" * 300)], {"block": 1})
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
    assert SavedRun(tmp_path).records() == [record(0), record(2)]


def write_blocks(path, pipe):
    with opened(path) as folder:
        for block in count(len(folder.timings())):
            folder.append(*made(range(3 * block, 3 * block + 3)))
            pipe.send(block)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_twenty_kills_lose_no_finished_block(tmp_path):
    """What a writer has stored is there after SIGKILL, wherever that hits it; while it writes no other one may."""
    processes, draw, finished = multiprocessing.get_context("fork"), np.random.default_rng(0), -1
    for number in range(20):
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
            assert folder.holds(range(3 * finished, 3 * finished + 3))
    with opened(tmp_path) as folder:
        assert finished >= 19
        for block in range(len(folder.timings())):
            check_block(folder, range(3 * block, 3 * block + 3))


def edits(lines):
    one = lines[2]
    yield [*lines[:2], one.replace(b"not_adversarial", b"found"), *lines[3:]], 3
    yield [*lines[:2], one.replace(b": ", b":  ", 1), *lines[3:]], 3
    yield [*lines[:2], b"\n", *lines[2:]], 3
    yield [*lines[:2], one[: one.index(b', "checksum')] + b"}\n", *lines[3:]], 3
    yield [*lines[:2], one[:-1] + b" " + lines[3], *lines[4:]], 3
    yield [lines[0].replace(b"0.1", b"0.2"), *lines[1:]], 1
    yield lines[1:], 1
    # Samples that are missing are run again, and nothing else follows from the order of lines.
    yield [*lines[:2], *lines[3:]], None
    yield [*lines[:3], one, *lines[3:]], None
    yield [*lines[:2], *lines[3:], one], None


def test_an_edit_is_named_and_repaired_or_changes_nothing(whole, tmp_path):
    for number, (changed, place) in enumerate(edits((whole / "records.jsonl").read_bytes().splitlines(keepends=True))):
        path = shutil.copytree(whole, tmp_path / f"{number}")
        (path / "records.jsonl").write_bytes(b"".join(changed))
        if place is not None:
            with pytest.raises(RunFolderError, match=rf"records\.jsonl: line {place} .*--repair.*repairing"):
                opened(path)
            with pytest.warns(RobustExtWarning, match="dropped 1 damaged lines"), opened(path, repair=True) as folder:
                assert [folder.holds(rows) for rows in BLOCKS].count(True) >= 2
            assert (path / "records.jsonl.damaged").read_bytes() == b"".join(changed)
        fill(path)


def test_what_was_lost_or_is_damaged_of_arrays_is_run_again(whole):
    for name in ("arrays.bin", "records.jsonl"):
        (whole / name).unlink()
        fill(whole)
    (whole / "arrays.bin").write_bytes(b"")
    fill(whole)
    content = bytearray((whole / "arrays.bin").read_bytes())
    content[-1] ^= 1
    (whole / "arrays.bin").write_bytes(content)
    with opened(whole) as folder, pytest.raises(RunFolderError, match=r"arrays\.bin: candidates-6 does not match"):
        folder.load("candidates-6")
    with opened(whole, repair=True) as folder:
        assert [folder.holds(rows) for rows in BLOCKS] == [True, True, False]
    fill(whole)


WRONG = {
    "index is '0', expected int": {"index": "0"},
    "index is True, expected int": {"index": True},
    "index 9 is none of the 7 samples": {"index": 9},
    "arrays.a is 5, expected an object": {"block": 0, "arrays": {"a": 5}},
    "left_out is 3, expected a list": {"block": 0, "left_out": 3},
    "value is 1, expected str": {"value": 1, "content": 2},
    "no arrays": {"nonsense": 1},
}


def test_a_right_checksum_makes_no_wrong_content_right(whole, tmp_path, monkeypatch):
    with opened(whole) as folder:
        start = folder._start
    content = (whole / "records.jsonl").read_bytes()
    for words, entry in WRONG.items():
        (whole / "records.jsonl").write_bytes(content + seal(json.dumps(entry), start))
        with pytest.raises(RunFolderError, match=rf"records\.jsonl: .*{words}.*--repair"):
            opened(whole, samples=7)
    # Nor does a line fit into another run.
    opened(tmp_path / "other", {"epsilon": 0.2}).close()
    with (tmp_path / "other" / "records.jsonl").open("ab") as file:
        file.write(content.splitlines(keepends=True)[2])
    with pytest.raises(RunFolderError, match=r"records\.jsonl: line 2 does not match"):
        opened(tmp_path / "other", {"epsilon": 0.2})
    # Arrays that unpack to more than is meant are not unpacked.
    monkeypatch.setattr("robust_ext.engine.run_folder._MOST_BYTES", 1000)
    with opened(tmp_path) as folder:
        folder.save("bomb", values=np.zeros(10**6))
        folder.save("noise", values=np.random.default_rng(0).random(10**4))
        assert (tmp_path / "arrays.bin").stat().st_size < 2 * 10**5
        with pytest.raises(RunFolderError, match=r"arrays\.bin: bomb "):
            folder.load("bomb")
        assert len(folder.load("noise")["values"]) == 10**4
    # Nor is a first line that no run wrote that of a run that was never begun.
    (tmp_path / "records.jsonl").write_bytes(b"\xff\x00")
    with pytest.raises(RunFolderError, match="the file is damaged"):
        opened(tmp_path)


def test_the_judges_seed_is_found_again_in_what_depends_on_it(tmp_path):
    """A seed of the operating system cannot be drawn twice."""

    def drawn():
        settings = BinarizationSettings(threat_model=ThreatModel(norm="linf", epsilon=0.1))
        return with_judge_seed(settings, out=tmp_path, worker=lambda task: None).judge_seed

    seed = drawn()
    opened(tmp_path / "attacks", {"judge_seed": seed}).close()
    (tmp_path / "evaluation.json").unlink()
    assert drawn() == seed
    (tmp_path / "evaluation.json").write_bytes(b"garbage")
    with pytest.raises(RunFolderError, match=r"evaluation\.json: does not match"):
        drawn()
    with repairing():
        assert drawn() == seed


def test_repair_runs_again_what_was_lost_with_a_process(tmp_path):
    lost = [{"outcome": "ended"}, {"attacks": {"a": {"outcome": "timed_out"}}}, {"canary": "lost"}]
    with opened(tmp_path) as folder:
        folder.append([record(0), *({"index": row, **one} for row, one in enumerate(lost, 1))], {"block": 0})
        assert folder.holds(range(4))
    with opened(tmp_path, repair=True) as folder:
        assert folder.records() == [record(0)]
        assert not folder.holds(range(4))


def test_no_flipped_bit_changes_anything_unseen(whole):
    kept = {file: file.read_bytes() for file in sorted(whole.iterdir())}
    files, draw, named = [file for file, content in kept.items() if content], np.random.default_rng(0), []
    for _ in range(100):
        for file in whole.iterdir():
            file.write_bytes(kept[file]) if file in kept else file.unlink()
        file = files[draw.integers(len(files))]
        content = bytearray(kept[file])
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        file.write_bytes(content)
        try:
            fill(whole)
        except RunFolderError as error:
            named.append(file.name in str(error))
            opened(whole, repair=True).close()
            fill(whole)
    assert len(named) > 50
    assert all(named)
