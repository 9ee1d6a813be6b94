"""Damage of whatever kind to a run folder is seen, named and repaired, and never changes a record unseen."""

import json

import numpy as np
import pytest

from robust_ext import BinarizationSettings, RunFolderError, ThreatModel, repairing
from robust_ext.core.errors import RobustExtWarning
from robust_ext.engine.judge import with_judge_seed
from robust_ext.engine.run_folder import RunFolder

BLOCKS = [range(0, 3), range(3, 6), range(6, 7)]


def opened(path, settings=None, **options):
    return RunFolder(path, kind="test", settings=settings or {"epsilon": 0.1}, versions={}, **options)


def record(index):
    return {"index": index, "outcome": "found" if index % 2 else "not_adversarial"}


def fill(path, **options):
    """A folder of a finished run, and what is in it."""
    with opened(path, **options) as folder:
        with folder.once("once") as slot:
            if slot.empty:
                slot.fill([1, 2.5])
        for rows in BLOCKS:
            if not folder.holds(rows):
                folder.save(f"candidates-{rows[0]}", candidates=np.arange(rows[0], rows[-1] + 1) / 7)
                folder.append([record(row) for row in rows], {"block": rows[0], "passes": 5})
        return essence(folder)


def essence(folder):
    arrays = [folder.load(f"candidates-{rows[0]}")["candidates"].tolist() for rows in BLOCKS]
    return folder.records(), [entry["passes"] for entry in folder.timings()], arrays


@pytest.fixture
def whole(tmp_path):
    return tmp_path / "run", fill(tmp_path / "run")


def lines_of(file):
    return file.read_bytes().splitlines(keepends=True)


def edits(lines):
    """Names of edits, the lines after each, and the number of the line at which it shows."""
    one, two = lines[1], lines[3]
    yield "edited", [lines[0], one.replace(b"found", b"fouNd"), *lines[2:]], 2
    yield "spaces", [lines[0], one.replace(b": ", b":  ", 1), *lines[2:]], 2
    yield "removed", [lines[0], *lines[2:]], 2
    yield "doubled", [*lines[:2], one, *lines[2:]], 3
    yield "moved", [lines[0], two, lines[2], one, *lines[4:]], 2
    yield "first removed", lines[1:], 1
    yield "empty line", [*lines[:2], b"\n", *lines[2:]], 3
    yield "checksum taken off", [lines[0], one[: one.index(b', "checksum')] + b"}\n", *lines[2:]], 2
    yield "two in one", [lines[0], one[:-1] + b" " + lines[2], *lines[3:]], 2


@pytest.mark.parametrize("number", range(9))
def test_a_line_that_does_not_fit_is_named_and_repaired(whole, number):
    path, expected = whole
    file = path / "records.jsonl"
    lines = lines_of(file)
    name, changed, place = list(edits(lines))[number]
    file.write_bytes(b"".join(changed))
    with pytest.raises(RunFolderError, match=rf"records\.jsonl: line {place} does not match.*--repair.*repairing"):
        opened(path)
    with pytest.warns(RobustExtWarning, match="dropped"), opened(path, repair=True) as folder:
        assert [folder.holds(rows) for rows in BLOCKS].count(True) >= (0 if "moved" in name else 1), name
    assert fill(path) == expected


def test_exactly_what_was_damaged_is_done_again(whole):
    path, expected = whole
    lines = lines_of(path / "records.jsonl")
    lines[4] = lines[4].replace(b"not_adversarial", b"found")
    (path / "records.jsonl").write_bytes(b"".join(lines))
    with opened(path, repair=True) as folder:
        assert [folder.holds(rows) for rows in BLOCKS] == [True, False, True]
        assert [one["index"] for one in folder.records()] == [0, 1, 2, 3, 5, 6]
    assert fill(path) == expected


def test_lines_do_not_fit_into_other_files_folders_or_runs(whole, tmp_path):
    path, _ = whole
    for other, name in ((tmp_path / "twin", "timings.jsonl"), (tmp_path / "other", "records.jsonl")):
        given = {"epsilon": 0.1 if other.name == "twin" else 0.2}
        opened(other, given).close()
        (other / name).write_bytes((path / "records.jsonl").read_bytes())
        with pytest.raises(RunFolderError, match=rf"{name}: line 1 does not match"):
            opened(other, given)
    (path / "candidates-0.npz").write_bytes((path / "candidates-3.npz").read_bytes())
    with opened(path) as folder, pytest.raises(RunFolderError, match=r"candidates-0\.npz: does not match"):
        folder.load("candidates-0")


def test_what_was_cut_off_is_done_again(whole):
    """At a line's end nothing is damaged: the samples are missing, or the timings, or the arrays."""
    path, expected = whole
    for name, keep in (("records.jsonl", 4), ("timings.jsonl", 1), ("records.jsonl", 0), ("timings.jsonl", 0)):
        file = path / name
        file.write_bytes(b"".join(lines_of(file)[:keep]))
        assert fill(path) == expected
    for name in ("candidates-3.npz", "timings.jsonl", "once.json"):
        (path / name).unlink()
        assert fill(path) == expected
    (path / "run.json").unlink()
    with pytest.raises(RunFolderError, match=r"holds records but no run\.json; run the same command with --repair"):
        opened(path)
    opened(path, repair=True).close()
    assert fill(path) == expected


def test_a_timing_that_came_twice_counts_once(tmp_path):
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0, "passes": 5})
        folder.append([record(0), record(1)], {"block": 0, "passes": 7})
        assert [entry["passes"] for entry in folder.timings()] == [7]
    assert len(lines_of(tmp_path / "records.jsonl")) == 2
    with opened(tmp_path) as folder:
        assert [entry["passes"] for entry in folder.timings()] == [7]


def test_an_edited_run_is_refused(whole):
    path, expected = whole
    run = json.loads((path / "run.json").read_text())
    for change in ({"settings": {"epsilon": 0.2}}, {"versions": {"torch": "9"}}, {"checksum": "0" * 32}):
        (path / "run.json").write_text(json.dumps({**run, **change}))
        with pytest.raises(RunFolderError, match=r"run\.json: cannot be read as a run \(it does not match"):
            opened(path, {"epsilon": 0.2} if "settings" in change else None)
    opened(path, repair=True).close()
    assert fill(path) == expected


def error_of(path):
    try:
        fill(path)
    except RunFolderError as error:
        return str(error)
    return None


def flips(path, count, seed):
    """Files of a folder with one flipped bit each, the file whole again after each."""
    draw = np.random.default_rng(seed)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    for _ in range(count):
        file = files[draw.integers(len(files))]
        before = file.read_bytes()
        content = bytearray(before)
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        file.write_bytes(content)
        yield file
        for other in path.iterdir():
            if other not in files:
                other.unlink()
        file.write_bytes(before)


def test_no_flipped_bit_changes_anything_unseen(whole):
    path, expected = whole
    kept = {file: file.read_bytes() for file in path.iterdir()}
    seen = 0
    for file in flips(path, 150, seed=0):
        error = error_of(path)
        if error is not None:
            seen += 1
            assert file.name in error
            opened(path, repair=True).close()
        assert fill(path) == expected, file
        for one, content in kept.items():
            one.write_bytes(content)
    assert seen > 75


def test_the_judges_seed_is_found_again_in_what_depends_on_it(tmp_path):
    """A seed of the operating system cannot be drawn twice."""

    def drawn():
        settings = BinarizationSettings(threat_model=ThreatModel(norm="linf", epsilon=0.1))
        return with_judge_seed(settings, out=tmp_path, worker=lambda task: None).judge_seed

    seed = drawn()
    opened(tmp_path / "attacks", {"judge_seed": seed}).close()
    (tmp_path / "judge.json").unlink()
    assert drawn() == seed
    (tmp_path / "judge.json").write_bytes(b"garbage")
    with pytest.raises(RunFolderError, match=r"judge\.json: does not match"):
        drawn()
    with repairing():
        assert drawn() == seed
    assert drawn() == seed


@pytest.mark.parametrize(
    "lost", [{"outcome": "ended"}, {"attacks": {"a": {"outcome": "timed_out"}}}, {"canary": "lost"}]
)
def test_repair_runs_again_what_was_lost_with_a_process(tmp_path, lost):
    with opened(tmp_path) as folder:
        folder.append([record(0), {"index": 1, **lost}, record(2)], {"block": 0})
    with opened(tmp_path) as folder:
        assert folder.holds(range(3))
    with opened(tmp_path, repair=True) as folder:
        assert [one["index"] for one in folder.records()] == [0, 2]
        assert not folder.holds(range(3))


def test_arrays_that_unpack_to_more_than_is_meant_are_not_unpacked(tmp_path, monkeypatch):
    """Whoever computes checksums can write any file."""
    monkeypatch.setattr("robust_ext.core.arrays.MOST_BYTES", 1000)
    with opened(tmp_path) as folder:
        folder.save("bomb", values=np.zeros(10**6))
        folder.save("noise", values=np.random.default_rng(0).random(10**4))
        with pytest.raises(RunFolderError, match=r"bomb\.npz: holds .* bytes that unpack to 8,000,128"):
            folder.load("bomb")
        assert len(folder.load("noise")["values"]) == 10**4
