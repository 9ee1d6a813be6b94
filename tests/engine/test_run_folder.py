import multiprocessing
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from robust_ext.core.errors import RobustExtWarning, RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.run_folder import RunFolder, SavedRun


def opened(path, settings=None, **options):
    given = {"kind": "test", "versions": {"torch": "1"}, **options}
    return RunFolder(path, settings={"epsilon": 0.1, "bounds": (0, 1)} if settings is None else settings, **given)


def tree(path):
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def record(index, value=0):
    return {"index": index, "value": value}


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
        assert (folder.records(), folder.timings()) == ([record(0), record(1)], [{"block": 0}, {"block": 1}])


def test_a_block_counts_once_its_last_byte_is_there(tmp_path):
    """Wherever a kill cuts the file, a block is there as a whole or is none, and can be stored again."""
    with opened(tmp_path / "whole") as folder:
        for block in (0, 1):
            folder.append([record(2 * block), record(2 * block + 1)], {"block": 2 * block}, {"a": {"x": np.arange(3)}})
        expected = folder.records()
    content = (tmp_path / "whole" / "records.jsonl").read_bytes()
    for cut in range(0, len(content) + 1, 7):
        path = shutil.copytree(tmp_path / "whole", tmp_path / f"{cut}")
        (path / "records.jsonl").write_bytes(content[:cut])
        with opened(path) as folder:
            for block in (0, 1):
                rows = range(2 * block, 2 * block + 2)
                if not folder.holds(rows):
                    folder.append([record(row) for row in rows], {"block": rows[0]})
            assert folder.records() == expected


def test_other_settings_are_refused_and_named(tmp_path):
    first = {"epsilon": 0.1, "norm": "linf", "seed": 0, "old": 1}
    words = ("with other settings", "epsilon: 0.1 there, 0.2 now", "old: 1 there, None now", "new: None there, 'xxx")
    opened(tmp_path, first).close()
    content = (tmp_path / "records.jsonl").read_text()
    with pytest.raises(RunFolderError) as caught:
        opened(tmp_path, {"epsilon": 0.2, "norm": "linf", "seed": 0, "new": "x" * 100})
    text = str(caught.value)
    assert all(word in text for word in words)
    assert not any(word in text for word in ("norm", "seed"))
    assert len(text) < 400 + len(str(tmp_path))
    assert (tmp_path / "records.jsonl").read_text() == content
    # The refused one lets go of the folder, even while its error is kept.
    opened(tmp_path, first).close()
    assert caught.value is not None


def test_settings_are_compared_as_json_keeps_them(tmp_path):
    opened(tmp_path, {"bounds": (0, 1), "share": 0.1 + 0.2, "nested": {"a": (1, 2)}}).close()
    opened(tmp_path, {"share": 0.30000000000000004, "nested": {"a": [1, 2]}, "bounds": [0, 1]}).close()
    with pytest.raises(RunFolderError, match="share"):
        opened(tmp_path, {"share": 0.3, "nested": {"a": [1, 2]}, "bounds": [0, 1]})


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


def hold(path, pipe):
    with opened(path) as folder:
        folder.append([{"index": 7}], {"block": 7})
        pipe.send("held")
        pipe.recv()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_two_processes_do_not_write_the_same_folder(tmp_path):
    pytest.importorskip("fcntl", reason="folders are guarded by POSIX locks only")
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "held"
    with pytest.raises(RunFolderError, match="another process is writing this run"):
        opened(tmp_path)
    process.kill()
    process.join()
    with opened(tmp_path) as folder:
        assert folder.records() == [{"index": 7}]


def test_values_are_kept_as_json_has_them(tmp_path):
    value = {"value": [1, 2.5, None, "a"], "pair": (1, 2)}
    expected = {**value, "pair": [1, 2]}
    with opened(tmp_path) as folder:
        assert folder.set_value("once", value) == folder.values["once"] == expected
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.set_value("failed", float("nan"))
    assert SavedRun(tmp_path).values == {"once": expected}


def test_nothing_is_written_outside_the_folder(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with opened(tmp_path / "run") as folder:
        folder.append([record(0)], {"block": 0})
        folder.set_value("once", 1)
        folder.finish(folder.records())
        folder.save("arrays", x=np.zeros(2))
    expected = {"records.jsonl", "arrays.bin", ".lock"}
    assert tree(tmp_path) == {"elsewhere", "run", *(f"run/{name}" for name in expected)}


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "file.txt"
    replace_file(file, "one")
    replace_file(file, "twö")
    assert file.read_text(encoding="utf-8") == "twö"
    assert tree(tmp_path) == {"file.txt"}
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, "three")
    assert file.read_text(encoding="utf-8") == "twö"
