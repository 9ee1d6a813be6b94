"""Damage of whatever kind to a run folder is seen, named and repaired, and never changes a record unseen."""

import json

import numpy as np
import pytest

from robust_ext import BinarizationSettings, RunFolderError, ThreatModel, repairing
from robust_ext.core.errors import RobustExtWarning
from robust_ext.engine.evaluation_file import with_judge_seed
from robust_ext.engine.run_folder import RunFolder, seal

BLOCKS = [range(0, 3), range(3, 6), range(6, 7)]


def opened(path, settings=None, **options):
    return RunFolder(path, kind="test", settings=settings or {"epsilon": 0.1}, versions={}, **options)


def record(index):
    return {"index": index, "outcome": "found" if index % 2 else "not_adversarial"}


def fill(path, **options):
    """A folder of a finished run, and what is in it."""
    with opened(path, **options) as folder:
        if "once" not in folder.values:
            folder.set_value("once", [1, 2.5])
        for rows in BLOCKS:
            if not folder.holds(rows):
                arrays = {f"candidates-{rows[0]}": {"candidates": np.arange(rows[0], rows[-1] + 1) / 7}}
                folder.append([record(row) for row in rows], {"block": rows[0], "passes": 5}, arrays)
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
    """Names of edits, the lines after each, and the number of the line at which it shows; None where it does not."""
    one = lines[2]
    yield "edited", [*lines[:2], one.replace(b"not_adversarial", b"found"), *lines[3:]], 3
    yield "spaces", [*lines[:2], one.replace(b": ", b":  ", 1), *lines[3:]], 3
    yield "empty line", [*lines[:2], b"\n", *lines[2:]], 3
    yield "checksum taken off", [*lines[:2], one[: one.index(b', "checksum')] + b"}\n", *lines[3:]], 3
    yield "two in one", [*lines[:2], one[:-1] + b" " + lines[3], *lines[4:]], 3
    yield "the run edited", [lines[0].replace(b"0.1", b"0.2"), *lines[1:]], 1
    yield "the run removed", lines[1:], 1
    # Samples that are missing are run again, and nothing else follows from the order of lines.
    yield "removed", [*lines[:2], *lines[3:]], None
    yield "doubled", [*lines[:3], one, *lines[3:]], None
    yield "moved", [*lines[:2], *lines[3:], one], None


@pytest.mark.parametrize("number", range(10))
def test_an_edit_is_named_and_repaired_or_changes_nothing(whole, number):
    path, expected = whole
    file = path / "records.jsonl"
    name, changed, place = list(edits(lines_of(file)))[number]
    file.write_bytes(b"".join(changed))
    if place is not None:
        with pytest.raises(RunFolderError, match=rf"records\.jsonl: line {place} .*--repair.*repairing"):
            opened(path)
        before = file.read_bytes()
        with pytest.warns(RobustExtWarning, match="dropped 1 damaged lines"), opened(path, repair=True) as folder:
            assert [folder.holds(rows) for rows in BLOCKS].count(True) >= 2, name
        assert (path / "records.jsonl.damaged").read_bytes() == before
    assert fill(path) == expected


def test_lines_do_not_fit_into_other_runs(whole, tmp_path):
    opened(tmp_path / "other", {"epsilon": 0.2}).close()
    with (tmp_path / "other" / "records.jsonl").open("ab") as file:
        file.write(lines_of(whole[0] / "records.jsonl")[2])
    with pytest.raises(RunFolderError, match=r"records\.jsonl: line 2 does not match"):
        opened(tmp_path / "other", {"epsilon": 0.2})


def test_what_was_lost_is_run_again(whole):
    path, expected = whole
    for name in ("arrays.bin", "records.jsonl"):
        (path / name).unlink()
        assert fill(path) == expected
    (path / "arrays.bin").write_bytes(b"")
    assert fill(path) == expected


def test_damaged_arrays_are_named_and_their_block_is_run_again(whole):
    path, expected = whole
    content = bytearray((path / "arrays.bin").read_bytes())
    content[-1] ^= 1
    (path / "arrays.bin").write_bytes(content)
    with opened(path) as folder, pytest.raises(RunFolderError, match=r"arrays\.bin: candidates-6 does not match"):
        folder.load("candidates-6")
    with opened(path, repair=True) as folder:
        assert [folder.holds(rows) for rows in BLOCKS] == [True, True, False]
    assert fill(path) == expected


def test_a_block_that_came_twice_counts_once(tmp_path):
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0, "passes": 5})
        folder.append([record(0), record(1)], {"block": 0, "passes": 7})
        assert [entry["passes"] for entry in folder.timings()] == [7]
    with opened(tmp_path) as folder:
        assert [entry["passes"] for entry in folder.timings()] == [7]
        assert [one["index"] for one in folder.records()] == [0, 1]


def error_of(path):
    try:
        fill(path)
    except RunFolderError as error:
        return str(error)
    return None


def test_no_flipped_bit_changes_anything_unseen(whole):
    path, expected = whole
    kept = {file: file.read_bytes() for file in sorted(path.iterdir())}
    files, draw, seen = [file for file, content in kept.items() if content], np.random.default_rng(0), 0
    for _ in range(200):
        for file in path.iterdir():
            file.write_bytes(kept[file]) if file in kept else file.unlink()
        file = files[draw.integers(len(files))]
        content = bytearray(kept[file])
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        file.write_bytes(content)
        error = error_of(path)
        if error is not None:
            seen += 1
            assert file.name in error
            opened(path, repair=True).close()
        assert fill(path) == expected, file
    assert seen > 100


WRONG = {
    "index is '0', expected int": {"index": "0"},
    "index is True, expected int": {"index": True},
    "index 9 is none of the 7 samples": {"index": 9},
    "arrays.a is 5, expected an object": {"block": 0, "arrays": {"a": 5}},
    "left_out is 3, expected a list": {"block": 0, "left_out": 3},
    "value is 1, expected str": {"value": 1, "content": 2},
    "no arrays": {"nonsense": 1},
}


def test_a_right_checksum_makes_no_wrong_content_right(whole):
    path, _ = whole
    with opened(path) as folder:
        start = folder._start
    content = (path / "records.jsonl").read_bytes()
    for words, entry in WRONG.items():
        (path / "records.jsonl").write_bytes(content + seal(json.dumps(entry), start))
        with pytest.raises(RunFolderError, match=rf"records\.jsonl: .*{words}.*--repair"):
            opened(path, samples=7)


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
    monkeypatch.setattr("robust_ext.engine.run_folder._MOST_BYTES", 1000)
    with opened(tmp_path) as folder:
        folder.save("bomb", values=np.zeros(10**6))
        folder.save("noise", values=np.random.default_rng(0).random(10**4))
        assert (tmp_path / "arrays.bin").stat().st_size < 2 * 10**5
        with pytest.raises(RunFolderError, match=r"arrays\.bin: bomb "):
            folder.load("bomb")
        assert len(folder.load("noise")["values"]) == 10**4


def test_a_first_line_that_no_run_wrote_is_damage(tmp_path):
    """Otherwise a log that was overwritten as a whole would count as one that was never begun."""
    opened(tmp_path).close()
    (tmp_path / "records.jsonl").write_bytes(b"\xff\x00")
    with pytest.raises(RunFolderError, match="the file is damaged"):
        opened(tmp_path)
