"""Damage to run folders of every evaluation: an error that names the file, or the same result; never another one."""

import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import robust_ext
from robust_ext.core.errors import RunFolderError
from robust_ext.engine import task as engine_task
from robust_ext.engine.run_folder import SavedRun, seal, unseal
from robust_ext.evaluations.unfinished import show_run
from tests.evaluations.small import EVALUATIONS, INPUTS, LABELS, LINF, NETWORK, essence, evaluate, sign_step
from tests.evaluations.subjects import spread


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
    files = [file for file in files if (top / state / file).stat().st_size]
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
    """Every kind of file."""
    top, expected = folders(name)
    kinds = {}
    for file in sorted((top / "finished").rglob("*")):
        if file.is_file():
            kinds[file.name.split("-")[0].split(".")[0], file.suffix] = file.relative_to(top / "finished")
    for file in kinds.values():
        path = shutil.copytree(top / "finished", tmp_path / file.name)
        (path / file).unlink()
        assert essence(evaluate(name, path)) == expected, file


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


def still(model, x, y):
    return x


ATTACKS = {"still": still, "step": sign_step}


def robust_accuracy(out, attacks, *, epsilon=0.1):
    threat_model = replace(LINF, epsilon=epsilon)
    return robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, threat_model, out=out, batch_size=4)


CALLS = {
    "other attacks": lambda out: robust_accuracy(out, {"another": still}),
    "fewer attacks": lambda out: robust_accuracy(out, {"still": still}),
    "another evaluation": lambda out: EVALUATIONS["test_time"](out, {"still": still}),
    "another budget": lambda out: robust_accuracy(out, ATTACKS, epsilon=0.2),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_second_evaluation_never_replaces_the_first(call, tmp_path):
    first = robust_accuracy(tmp_path, ATTACKS)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RunFolderError, match=r"holds (the result of|an evaluation of kind 'robust).*choose another"):
        CALLS[call](tmp_path)
    assert {file: file.read_bytes() for file in before} == before
    # The same one may be resumed, and may cover more.
    assert robust_accuracy(tmp_path, ATTACKS) == first
    assert set(robust_accuracy(tmp_path, {**ATTACKS, "another": still}).attacks) == {"still", "step", "another"}


def test_other_settings_of_a_result_and_other_detectors_are_refused(tmp_path):
    def mead(detectors, **more):
        given = {"detectors": detectors, "batch_size": 4, "resamples": 0, "out": tmp_path, **more}
        return robust_ext.mead(NETWORK, sign_step, INPUTS, LABELS, LINF, **given)

    mead({"spread": spread})
    with pytest.raises(RunFolderError, match="holds the result of detector spread, which this call leaves out"):
        mead({"other": spread})
    with pytest.raises(RunFolderError, match=r"with other settings \(resamples: 0 there, 9 now"):
        mead({"spread": spread}, resamples=9)


def test_other_attacks_of_a_diagnosis_are_refused(tmp_path):
    def diagnose(**attacks):
        return robust_ext.diagnose(NETWORK, attacks, INPUTS, LABELS, LINF, out=tmp_path, references=False, planted=0)

    diagnose(still=still)
    with pytest.raises(RunFolderError, match="holds the result of still, which this call leaves out"):
        diagnose(step=sign_step)


@pytest.mark.parametrize("name", [*EVALUATIONS, "diagnosis"])
def test_an_empty_name_of_a_folder_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    diagnosis = partial(robust_ext.diagnose, NETWORK, inputs=INPUTS, labels=LABELS, threat_model=LINF)
    calls = {**EVALUATIONS, "diagnosis": lambda out, attacks: diagnosis(attacks, out=out)}
    for out in ("", 5):
        with pytest.raises(robust_ext.InvalidArgumentError, match=f"out: got {out!r}, expected the name of a folder"):
            calls[name](out, {"still": still})
    assert not list(tmp_path.iterdir())


def test_a_folder_of_an_earlier_version_is_refused_as_such(tmp_path):
    (tmp_path / "run" / "attacks" / "clean").mkdir(parents=True)
    (tmp_path / "run" / "attacks" / "clean" / "run.json").write_text("{}")
    (tmp_path / "planted").mkdir()
    for name in ("judge.json", "run.json"):
        (tmp_path / "planted" / name).write_text("{}")
    for path, call in itertools.product(tmp_path.iterdir(), (*EVALUATIONS, show_run)):
        with pytest.raises(RunFolderError, match="was written by an earlier version of robust_ext"):
            call(path) if callable(call) else evaluate(call, path)


def test_nothing_is_written_where_a_link_leads(tmp_path):
    first = robust_accuracy(tmp_path / "run", ATTACKS)
    place = next((tmp_path / "run" / "attacks").iterdir())
    place.rename(tmp_path / "outside")
    place.symlink_to(tmp_path / "outside")
    with pytest.raises(RunFolderError, match=r"leads out of .* by a symbolic link"):
        robust_accuracy(tmp_path / "run", ATTACKS)
    place.unlink()
    assert robust_accuracy(tmp_path / "run", ATTACKS) == first


@pytest.mark.parametrize("name", ["result.json", "evaluation.json"])
def test_a_pipe_is_not_waited_for(name, tmp_path):
    robust_accuracy(tmp_path, ATTACKS)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(robust_ext.RobustExtError, match=rf"{name}: is a pipe or device"):
        show_run(tmp_path)


def wrong_contents(entry):
    """An entry with one of its values lost, or of another kind, likewise in what it holds."""
    for key, value in entry.items():
        yield {one: other for one, other in entry.items() if one != key}
        for other in ("x", None, -1, [5], {"a": 5}):
            yield {**entry, key: other}
        if isinstance(value, dict):
            yield from ({**entry, key: changed} for changed in itertools.islice(wrong_contents(value), 0, None, 7))


@pytest.mark.parametrize("name", every("robust_accuracy", "test_time"))
def test_wrong_content_under_a_right_checksum_is_a_clear_error(name, folders, tmp_path):
    """In whatever reads it: a resumed call, `show`, and `compare`."""
    top, _ = folders(name)
    path = shutil.copytree(top / "finished", tmp_path / "run")
    file = max(path.rglob("records.jsonl"), key=lambda file: file.stat().st_size)
    start, lines = SavedRun(file.parent)._start, file.read_bytes().splitlines(keepends=True)
    errors = []
    for begin in (b'{"index": 0', b'{"block": 0'):
        place = next(place for place, line in enumerate(lines) if line.startswith(begin))
        entry = unseal(lines[place].rstrip(), start)
        for changed in itertools.islice(wrong_contents(entry), 0, None, 3):
            file.write_bytes(b"".join([*lines[:place], seal(json.dumps(changed), start), *lines[place + 1 :]]))
            for read in (partial(evaluate, name), show_run, lambda path: robust_ext.compare(path, path)):
                try:
                    read(path)
                except robust_ext.RobustExtError as error:
                    errors.append(str(error))
    assert len(errors) > 20
    assert all(file.name in error for error in errors)
