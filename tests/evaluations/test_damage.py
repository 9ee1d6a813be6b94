"""Damage to run folders of every evaluation: an error that names the file, or the same result; never another one."""

import itertools
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import robust_ext
from robust_ext.core.errors import RunFolderError
from robust_ext.engine import task as engine_task
from tests.evaluations.small import EVALUATIONS, NETWORK, essence, evaluate


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


def outcome_of(name, path):
    """The result, or the text of the error."""
    try:
        return essence(evaluate(name, path)), None
    except RunFolderError as error:
        return None, str(error)


def check_damage(name, state, folders, work, *, damage, count, seed):
    """Damage a file at a time; returns how often it was an error."""
    top, expected = folders(name)
    draw, errors = np.random.default_rng(seed), 0
    files = sorted(file.relative_to(top / state) for file in (top / state).rglob("*") if file.is_file())
    # What is planned is printed by `show` alone, and written anew where it is damaged.
    files = [file for file in files if (top / state / file).stat().st_size and file.name != "plan.json"]
    for number in range(count):
        path = work / f"{number}"
        shutil.copytree(top / state, path)
        chosen = path / files[draw.integers(len(files))]
        chosen.write_bytes(damage(chosen.read_bytes(), draw))
        found, error = outcome_of(name, path)
        if error is not None:
            errors += 1
            assert chosen.name in error
            with robust_ext.repairing():
                found = essence(evaluate(name, path))
        assert found == expected, f"{chosen} changed the result"
        shutil.rmtree(path)
    return errors


def every(*quick):
    """All evaluations, of which a few are tested at every install."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.exhaustive) for name in EVALUATIONS]


STATES = list(itertools.product(EVALUATIONS, ("finished", "unfinished")))


@pytest.mark.parametrize(("name", "state"), [one for one in STATES if one[0] in ("robust_accuracy", "test_time")])
def test_a_few_flips_and_truncations(name, state, folders, tmp_path):
    errors = check_damage(name, state, folders, tmp_path, damage=flipped, count=4, seed=0)
    assert errors >= 2
    check_damage(name, state, folders, tmp_path, damage=truncated, count=1, seed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "state"), STATES)
def test_many_flips_and_truncations(name, state, folders, tmp_path):
    """48 and 16 in all."""
    assert check_damage(name, state, folders, tmp_path, damage=flipped, count=6, seed=2) > 1
    check_damage(name, state, folders, tmp_path, damage=truncated, count=2, seed=3)


@pytest.mark.parametrize("name", every("binarization", "robust_accuracy"))
def test_lost_files_are_made_again(name, folders, tmp_path):
    """Every kind of file beside the run itself, without which the records are of nothing known."""
    top, expected = folders(name)
    kinds = {}
    for file in sorted((top / "finished").rglob("*")):
        if file.is_file():
            kinds[file.name.split("-")[0].split(".")[0], file.suffix] = file.relative_to(top / "finished")
    for file in kinds.values():
        path = shutil.copytree(top / "finished", tmp_path / file.name)
        (path / file).unlink()
        if file.name == "run.json":
            with pytest.raises(RunFolderError, match=r"holds records but no run\.json"):
                evaluate(name, path)
            with robust_ext.repairing():
                assert essence(evaluate(name, path)) == expected
        else:
            assert essence(evaluate(name, path)) == expected, file


@pytest.mark.parametrize(
    "content",
    [b"garbage", *(pytest.param(begun, marks=pytest.mark.exhaustive) for begun in (b"PK\x03\x04", b"\x93NUMPY"))],
)
def test_arrays_that_are_none_are_named(folders, tmp_path, content):
    top, expected = folders("binarization")
    path = shutil.copytree(top / "finished", tmp_path / "run")
    (path / "examples.npz").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"examples\.npz: does not match its checksum.*--repair"):
        evaluate("binarization", path)
    # Empty is what a machine that stops may leave, which is made again.
    (path / "examples.npz").write_bytes(b"")
    assert essence(evaluate("binarization", path)) == expected


@pytest.mark.parametrize("name", every("robust_accuracy", "test_time"))
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


@pytest.mark.parametrize("name", every("robust_accuracy", "mead"))
def test_pages_do_not_grow_with_the_samples(name, monkeypatch):
    pages = []
    # The first samples are the same: how many trials a calibration takes depends on them.
    many = torch.rand(300, 1, 4, 4, generator=torch.Generator().manual_seed(300))
    for inputs in (many[:20], many):
        monkeypatch.setattr("tests.evaluations.small.INPUTS", inputs)
        monkeypatch.setattr("tests.evaluations.small.LABELS", NETWORK(inputs).argmax(1))
        pages.append(len(evaluate(name, None).to_html()))
    assert 10_000 < pages[1] < 1.05 * pages[0]


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
