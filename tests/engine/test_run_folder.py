import json
import logging
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.run_folder import RunFolder


def opened(path, settings=None, **options):
    given = {"kind": "test", "versions": {"torch": "1"}, **options}
    return RunFolder(path, settings={"epsilon": 0.1, "bounds": (0, 1)} if settings is None else settings, **given)


def once(folder, name, compute):
    with folder.once(name) as slot:
        if slot.empty:
            slot.fill(compute())
    return slot.value


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
        assert len((tmp_path / "a" / "run" / "records.jsonl").read_text().splitlines()) == 3
    assert before[0] == [record(0), record(1, "é\n"), record(3)]
    assert [entry["block"] for entry in before[1]] == [0, 1, 2]
    with opened(tmp_path / "a" / "run") as folder:
        assert (folder.records(), folder.timings()) == before
        folder.append([record(2)], {"block": 3})
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.append([record(7, float("nan"))], {"block": 4})
        assert [entry["index"] for entry in folder.records()] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", ['{"index": 1', '{"index": 1}', "{", "\x00\x00"])
@pytest.mark.parametrize("name", ["records.jsonl", "timings.jsonl"])
def test_a_torn_last_line_is_dropped(tmp_path, torn, name):
    """The last line counts only with its line break; the next record starts a line of its own."""
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0})
    with (tmp_path / name).open("a") as file:
        file.write(torn)
    with opened(tmp_path) as folder:
        assert (folder.records(), folder.timings()) == ([record(0)], [{"block": 0}])
        folder.append([record(1)], {"block": 1})
        assert (folder.records(), folder.timings()) == ([record(0), record(1)], [{"block": 0}, {"block": 1}])


def test_a_line_that_another_shard_is_writing_is_left_alone(tmp_path):
    with opened(tmp_path, shard=1) as other:
        other.append([record(5)], {"block": 5})
        torn = tmp_path / "records-1.jsonl"
        with torn.open("a") as file:
            file.write('{"index": 6')
        content = torn.read_text()
        with opened(tmp_path) as folder:
            assert folder.records() == [record(5)]
        assert torn.read_text() == content


@pytest.mark.parametrize("damage", ["{\n", "no json\n", "[1]\n", "5\n", "{}\n", '{"index": 4}\n', "\xff\n", "\n"])
def test_a_line_without_a_checksum_is_an_error(tmp_path, damage):
    with opened(tmp_path) as folder:
        folder.append([record(0)], {"block": 0})
    path = tmp_path / "records.jsonl"
    path.write_bytes(damage.encode("latin-1") + path.read_bytes())
    with pytest.raises(RunFolderError, match=r"records\.jsonl: line 1 does not match its checksum.*--repair"):
        opened(tmp_path)


def test_other_settings_are_refused_and_named(tmp_path):
    first = {"epsilon": 0.1, "norm": "linf", "seed": 0, "old": 1}
    words = ("with other settings", "epsilon: 0.1 there, 0.2 now", "old: 1 there, None now", "new: None there, 'xxx")
    opened(tmp_path, first).close()
    content = (tmp_path / "run.json").read_text()
    with pytest.raises(RunFolderError) as caught:
        opened(tmp_path, {"epsilon": 0.2, "norm": "linf", "seed": 0, "new": "x" * 100})
    text = str(caught.value)
    assert all(word in text for word in words)
    assert not any(word in text for word in ("norm", "seed"))
    assert len(text) < 400 + len(str(tmp_path))
    assert (tmp_path / "run.json").read_text() == content
    # The refused one lets go of the folder, even while its error is kept.
    opened(tmp_path, first).close()
    assert caught.value is not None


def test_settings_are_compared_as_json_keeps_them(tmp_path):
    opened(tmp_path, {"bounds": (0, 1), "share": 0.1 + 0.2, "nested": {"a": (1, 2)}}).close()
    opened(tmp_path, {"share": 0.30000000000000004, "nested": {"a": [1, 2]}, "bounds": [0, 1]}).close()
    with pytest.raises(RunFolderError, match="share"):
        opened(tmp_path, {"share": 0.3, "nested": {"a": [1, 2]}, "bounds": [0, 1]})


def test_other_versions_are_logged(tmp_path, caplog):
    opened(tmp_path).close()
    with caplog.at_level(logging.WARNING, logger="robust_ext"):
        opened(tmp_path).close()
        assert not caplog.records
        opened(tmp_path, versions={"torch": "2"}).close()
    assert "begun with other versions" in caplog.text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", "{}", '{"kind": "test"}', '{"kind": "test", "settings": 5, "versions": {}}', "\xff"]
)
def test_a_damaged_run_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunFolderError, match=r"run\.json: cannot be read as a run"):
        opened(tmp_path)


def test_folders_that_are_no_run_of_this_kind_are_refused(tmp_path):
    """Another kind, records without a run, no folder, and what cannot be locked, which is not said to be in use."""
    opened(tmp_path / "test").close()
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "records.jsonl").write_text('{"index": 0}\n')
    (tmp_path / "file").write_text("mine")
    (tmp_path / "lock" / ".lock").mkdir(parents=True)
    before = tree(tmp_path)
    for name, words in {
        "test": "holds a run of kind 'test', not 'mead'",
        "records": r"holds records but no run\.json",
        "file": "cannot be made a folder",
        "file/run": "cannot be made a folder",
        "lock": "cannot be written",
    }.items():
        with pytest.raises(RunFolderError, match=words):
            opened(tmp_path / name, kind="mead")
    assert tree(tmp_path) - before == {"records/.lock"}
    assert (tmp_path / "file").read_text() == "mine"


HOLD = """
import sys
from robust_ext.engine.run_folder import RunFolder
with RunFolder(sys.argv[1], kind="test", settings={"epsilon": 0.1, "bounds": [0, 1]}, versions={"torch": "1"},
               shard=int(sys.argv[2])) as folder:
    folder.append([{"index": 7}], {"block": 7})
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_the_same_shard(tmp_path):
    pytest.importorskip("fcntl", reason="folders are guarded by POSIX locks only")
    command = [sys.executable, "-c", HOLD, str(tmp_path), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match="another process is writing this run"):
            opened(tmp_path)
        with opened(tmp_path, shard=1) as folder:
            assert folder.records() == [{"index": 7}]
            with pytest.raises(RunFolderError, match="another process is writing this run"):
                opened(tmp_path, shard=1)
        process.kill()
    with opened(tmp_path) as folder:
        assert folder.records() == [{"index": 7}]


def test_once_is_computed_once(tmp_path):
    expected = {"value": [1, 2.5, None, "a"]}
    compute = Mock(return_value=expected)
    with opened(tmp_path) as folder, opened(tmp_path, shard=1) as other:
        assert [once(one, "plan", compute) for one in (folder, folder, other)] == [expected] * 3
        assert once(folder, "other", lambda: None) is None
        assert once(folder, "other", lambda: 5) is None
    with opened(tmp_path) as folder:
        assert once(folder, "plan", compute) == expected
        # One that failed is tried again.
        with pytest.raises(ZeroDivisionError):
            once(folder, "failed", lambda: 1 / 0)
        with pytest.raises(ValueError, match="not JSON compliant"):
            once(folder, "failed", lambda: float("nan"))
        assert once(folder, "failed", lambda: 3) == 3
    compute.assert_called_once_with()


ONCE = """
import sys, time, os
from robust_ext.engine.run_folder import RunFolder
def compute():
    with open(sys.argv[1] + "/calls", "a") as file:
        file.write("call\\n")
    time.sleep(0.2)
    return os.getpid()
with RunFolder(sys.argv[1], kind="test", settings={}, versions={}, shard=int(sys.argv[2])) as folder:
    with folder.once("plan") as slot:
        if slot.empty:
            slot.fill(compute())
    print(slot.value)
"""


def test_processes_share_what_is_computed_once(tmp_path):
    pytest.importorskip("fcntl", reason="folders are guarded by POSIX locks only")
    command = [sys.executable, "-c", ONCE, str(tmp_path)]
    processes = [subprocess.Popen([*command, shard], stdout=subprocess.PIPE, text=True) for shard in "01"]
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(answers) == 1
    assert (tmp_path / "calls").read_text() == "call\n"


def test_finish_merges_shards_in_order(tmp_path):
    """A sample that was won twice counts once, as after a kill before the shards' own files were removed."""
    with opened(tmp_path) as folder:
        for shard in (1, 2, 11):
            with opened(tmp_path, shard=shard) as other:
                other.append([record(20 - shard, shard), record(shard, shard), record(0, 0)], {"block": shard})
        folder.append([record(5, 0), record(0, 0)], {"block": 0})
        folder.refresh()
        merged = folder.records()
        assert [entry["index"] for entry in merged] == [0, 1, 2, 5, 9, 11, 18, 19]
        assert [entry["value"] for entry in merged] == [0, 1, 2, 0, 11, 11, 2, 1]
        folder.finish(merged)
        assert folder.records() == merged
        assert sorted(entry["block"] for entry in folder.timings()) == [0, 1, 2, 11]
    assert [file.name for file in tmp_path.glob("records*")] == ["records.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [{key: one[key] for key in ("index", "value")} for one in lines] == merged
    with opened(tmp_path) as folder:
        assert folder.records() == merged


def test_nothing_is_written_outside_the_folder(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with opened(tmp_path / "run") as folder, opened(tmp_path / "run", shard=1) as other:
        for one in (folder, other):
            one.append([record(0)], {"block": 0})
        once(folder, "plan", lambda: 1)
        # Not while another process may still write its part.
        with pytest.raises(RunFolderError, match="another process is writing"):
            folder.finish(folder.records())
        other.close()
        folder.finish(folder.records())
    expected = {"run.json", "records.jsonl", "timings.jsonl", "timings-1.jsonl", "plan.json"}
    locks = {".lock", ".lock-1", ".lock-once"}
    assert tree(tmp_path) == {"elsewhere", "run", *(f"run/{name}" for name in expected | locks)}


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
