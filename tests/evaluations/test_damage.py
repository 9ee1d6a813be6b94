"""Run folders of every evaluation: damage is an error that names the file, or the same result; and unfinished ones."""

import itertools
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli import app as cli
from robust_ext.core.errors import RunFolderError
from robust_ext.engine import task as engine_task
from robust_ext.evaluations.unfinished import show_run
from tests.evaluations.small import EVALUATIONS, INPUTS, LABELS, LINF, NETWORK, essence, evaluate, sign_step

every = pytest.mark.parametrize("name", EVALUATIONS)


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch):
    """Pages take most of the time here, and are never read."""
    monkeypatch.setattr("robust_ext.reports.kinds.report_page", lambda *_: "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each evaluation that is finished, one that is not, and the result."""
    made = {}

    def make(name):
        if name not in made:
            top = tmp_path_factory.mktemp(name)
            expected = essence(evaluate(name, top / "finished"))
            with pytest.raises(KeyboardInterrupt):
                evaluate(name, top / "unfinished", stop_at=2)
            assert essence(evaluate(name, shutil.copytree(top / "unfinished", top / "copy"))) == expected
            made[name] = top, expected
        return made[name]

    return make


def flipped(content, draw):
    content = bytearray(content)
    content[draw.integers(len(content))] ^= 1 << draw.integers(8)
    return bytes(content)


def truncated(content, draw):
    return content[: draw.integers(len(content))]


@every
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_flips_and_truncations(name, state, folders, tmp_path):
    (top, expected), draw, errors = folders(name), np.random.default_rng(2), []
    files = sorted(file.relative_to(top / state) for file in (top / state).rglob("*") if file.is_file())
    files = [file for file in files if (top / state / file).stat().st_size]
    for number, damage in enumerate([flipped] * 6 + [truncated] * 2):
        path = tmp_path / f"{number}"
        shutil.copytree(top / state, path)
        chosen = path / files[draw.integers(len(files))]
        chosen.write_bytes(damage(chosen.read_bytes(), draw))
        try:
            found = essence(evaluate(name, path))
        except RunFolderError as error:
            errors.append((chosen.name, str(error)))
            with robust_ext.repairing():
                found = essence(evaluate(name, path))
        assert found == expected, f"{chosen} changed the result"
    assert len(errors) > 1
    assert all(name in text for name, text in errors)


def test_points_that_are_made_again_are_scored_again(tmp_path, monkeypatch):
    """As after samples that were lost with an attack's process, whose points had been the clean inputs."""

    def lose(task, check, result):
        return verify(task, check, replace(result, candidates=None, lost=("ended", "killed")))

    expected, verify = essence(evaluate("mead", tmp_path / "whole")), engine_task._verify
    with monkeypatch.context() as changed:
        changed.setattr(engine_task, "_verify", lose)
        evaluate("mead", tmp_path / "run")
    assert essence(evaluate("mead", tmp_path / "run")) != expected
    with robust_ext.repairing():
        assert essence(evaluate("mead", tmp_path / "run")) == expected


def still(model, x, y):
    return x


ATTACKS = {"still": still, "step": sign_step}


def robust_accuracy(out, attacks=ATTACKS, *, epsilon=0.1):
    threat_model = replace(LINF, epsilon=epsilon)
    return robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, threat_model, out=out, batch_size=4)


def test_a_second_evaluation_never_replaces_the_first(tmp_path):
    first = robust_accuracy(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for other in (
        lambda: robust_accuracy(tmp_path, {"another": still}),
        lambda: EVALUATIONS["test_time"](tmp_path, {"still": still}),
        lambda: robust_accuracy(tmp_path, epsilon=0.2),
    ):
        with pytest.raises(RunFolderError, match="choose another"):
            other()
        assert {file: file.read_bytes() for file in before} == before
    # The same one may be resumed, and may cover more.
    assert robust_accuracy(tmp_path) == first
    assert set(robust_accuracy(tmp_path, {**ATTACKS, "another": still}).attacks) == {"still", "step", "another"}


# The call of an attack at which each is stopped, and what is shown of it then.
STOPPED = {
    "binarization": (10, "8  10", "Missing samples: binarization (2)"),
    "mead": (3, "not begun", "Missing samples: step linf 0.1 (2)"),
    "robust_accuracy": (3, "not begun", "Missing samples: step linf 0.1 (2)"),
    "test_time": (3, "left of these 10: static 100.0, defense 100.0", "Missing samples: step (2)"),
    "diagnosis": (2, "", "Not finished (step"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run(name, tmp_path):
    stop, word, missing = STOPPED[name]
    with pytest.raises(KeyboardInterrupt):
        evaluate(name, tmp_path, stop_at=stop)
    # As a kill leaves it: a last line that was not written to its end.
    with next(tmp_path.rglob("records.jsonl")).open("ab") as file:
        file.write(b'{"index": 9, "outc')
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert word in shown.output
    assert missing in shown.output
    result = evaluate(name, tmp_path)
    assert show_run(tmp_path) == str(result)


def test_nothing_is_written_where_a_link_leads_and_a_pipe_is_not_waited_for(tmp_path):
    first = robust_accuracy(tmp_path / "run")
    place = next((tmp_path / "run" / "attacks").iterdir())
    place.rename(tmp_path / "outside")
    place.symlink_to(tmp_path / "outside")
    with pytest.raises(RunFolderError):
        robust_accuracy(tmp_path / "run")
    place.unlink()
    assert robust_accuracy(tmp_path / "run") == first
    (tmp_path / "run" / "result.json").unlink()
    os.mkfifo(tmp_path / "run" / "result.json")
    with pytest.raises(robust_ext.RobustExtError):
        show_run(tmp_path / "run")


@every
def test_seconds_add_up_after_a_resume(name, tmp_path, monkeypatch):
    """The total is never less than its parts, also where all was done by an earlier call, and with a bad clock."""
    ticks = itertools.count(2e9, -1000)
    monkeypatch.setattr("tests.evaluations.small.sign_step", lambda model, x, *_: (time.sleep(0.05), x)[1])
    monkeypatch.setattr(time, "time", lambda: next(ticks))
    with pytest.raises(KeyboardInterrupt):
        evaluate(name, tmp_path, stop_at=2)
    for _ in range(2):
        content = evaluate(name, tmp_path).content
        parts = [row["seconds"] for row in content["time"]["phases"]]
        assert all(part >= 0 for part in parts)
        assert content["time"]["total"]["seconds"] == pytest.approx(sum(parts))
