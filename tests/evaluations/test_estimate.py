"""What an evaluation would cost against what it then took, and what the table of times adds up to."""

import re
import time

import pytest
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli.app import app
from robust_ext.core.threat import ThreatModel
from tests.evaluations.subjects import SMALL, random_classifier

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)
PGD, OTHER = "robust_ext:APGD(steps=10)", "foolbox:LinfPGD(steps=4)"


@pytest.fixture(scope="module")
def given():
    return random_classifier()


def rounded(x):
    return (x * 8).round() / 8


PLAIN = {"depths": (1,), "canaries": 0, **SMALL}
# Evaluations, and the phases whose rows are known exactly before; others take at most what is stated.
CALLS = {
    "binarization": (
        lambda model, x, y, out: robust_ext.binarization_test(model, PGD, x, THREAT_MODEL, out=out, **PLAIN),
        {"features", "attack", "verify"},
    ),
    "deeper": (
        lambda model, x, y, out: robust_ext.binarization_test(model, [PGD, OTHER], x, THREAT_MODEL, out=out, **SMALL),
        {"features"},
    ),
    "robust accuracy": (
        lambda model, x, y, out: robust_ext.robust_accuracy(
            model, [PGD], x, y, THREAT_MODEL, epsilons=(0.05, 0.1), out=out
        ),
        {"attack", "verify"},
    ),
    "mead": (
        lambda model, x, y, out: robust_ext.mead(
            model, [PGD], x, y, THREAT_MODEL, detectors=lambda x: x.flatten(1).std(1), out=out
        ),
        {"attack", "verify"},
    ),
    "test time": (
        lambda model, x, y, out: robust_ext.evaluate_defense(
            rounded, PGD, x, y, THREAT_MODEL, classifier=model, out=out
        ),
        {"attack", "verify"},
    ),
}


NAMES = [pytest.param(one, marks=pytest.mark.exhaustive) if one == "deeper" else one for one in CALLS]


@pytest.mark.parametrize("name", NAMES)
def test_rows_before_and_after(given, tmp_path, name):
    call, exact = CALLS[name]
    before = robust_ext.estimate(lambda: call(*given, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert before.done == 0
    content = call(*given, tmp_path / "run").content
    rows = {(row["phase"], row["of"]): row for row in content["time"]["phases"]}
    assert set(before.costs) <= {*rows, ("random", None)}
    for key, cost in before.costs.items():
        for way in ("forward", "backward"):
            stated, counted = getattr(cost, way), rows[key][way]
            assert counted == pytest.approx(stated) if key[0] in exact else counted <= stated + 1e-6
    total = content["time"]["total"]
    for column in ("forward", "backward", "seconds"):
        assert sum(row[column] for row in rows.values()) == pytest.approx(total[column])
    assert rows["rest", None]["seconds"] >= 0
    after = robust_ext.estimate(lambda: call(*given, tmp_path / "run"))
    assert (after.samples, after.done, after.total.forward) == (before.samples, before.samples, 0)
    taken = sum(file.stat().st_size for kind in ("records.jsonl", "arrays.bin") for file in tmp_path.rglob(kind))
    assert taken / 3 < before.size < taken * 3


@pytest.mark.parametrize("name", NAMES)
def test_seconds_add_up_to_those_of_the_clock(given, name):
    begun = time.perf_counter()
    found = CALLS[name][0](*given, None).content["time"]
    wall = time.perf_counter() - begun
    assert 0.7 * wall - 0.1 < found["total"]["seconds"] <= wall
    assert found["wall"] == found["total"]["seconds"]
    assert all(row["seconds"] >= 0 for row in found["phases"])


def test_results_are_equal_whatever_they_took(given):
    first, second = (CALLS["robust accuracy"][0](*given, None) for _ in range(2))
    assert first.content["time"] != second.content["time"]
    assert (first, hash(first)) == (second, hash(second))


@pytest.mark.exhaustive
def test_a_diagnosis_is_estimated_as_the_sum_of_what_it_runs(given):
    options = {"planted": 4, "inner_points": 20}
    found = robust_ext.estimate(lambda: robust_ext.diagnose(given[0], PGD, *given[1:], THREAT_MODEL, **options))
    counted = robust_ext.diagnose(given[0], PGD, *given[1:], THREAT_MODEL, **options).content["time"]["phases"]
    planted = next(row for row in counted if row["phase"] == "features")
    assert found.costs["features", None].forward == planted["forward"]
    references = [row["of"] for row in counted if row["phase"] == "attack"]
    # And larger budgets, of which nothing is known before.
    assert {of for phase, of in found.costs if phase == "attack"} < set(references)
    assert "larger budgets and remedies" in found.total.unknown


def run(*arguments):
    return CliRunner().invoke(app, [*arguments, "--model=digits", "--data=digits", "--in-process"])


COMMANDS = {
    "binarization": ("--attack", PGD, "--eps=0.1", "--samples=4"),
    "robust-accuracy": ("--attack", PGD, "--eps=0.1", "--samples=4"),
    "diagnose": ("--attack", PGD, "--eps=0.1", "--samples=4"),
    "mead": ("--detector=lid", "--arm=linf:0.1=robust_ext:APGD()", "--samples=4"),
    "test-time": ("--defense=hd(steps=2)", "--eps=0.1", "--samples=4"),
}


@pytest.mark.parametrize(
    "command", [one if one == "mead" else pytest.param(one, marks=pytest.mark.exhaustive) for one in COMMANDS]
)
def test_a_dry_run_of_a_command_prints_its_cost_and_writes_nothing(tmp_path, command):
    out = tmp_path / "run"
    found = run(command, *COMMANDS[command], "--dry-run", f"--out={out}")
    assert found.exit_code == 0, found.output
    assert re.search(r"^in all +[\d,]+ +[\d,]+ +[\d.]+$", found.output, re.M)
    assert "As passes of the network alone on this machine: at most" in found.output
    assert not out.exists()


def test_a_dry_run_of_a_study_refuses_another_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, study = tmp_path / "run", tmp_path / "study.toml"
    text = f'[robust-accuracy]\nmodel = "digits"\ndata = "digits"\nattack = "{PGD}"\neps = "0.1"\nsamples = 4\n'
    study.write_text(text + 'in-process = true\nout = "run"\n')
    invoke = CliRunner().invoke
    assert "4 samples in all runs, 0 of them done" in invoke(app, ["run", str(study), "--dry-run"]).output
    assert invoke(app, ["run", str(study), "--no-progress"]).exit_code == 0
    files = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert "4 samples in all runs, 4 of them done" in invoke(app, ["run", str(study), "--dry-run"]).output
    study.write_text(study.read_text() + "seed = 1\n")
    refused = invoke(app, ["run", str(study), "--dry-run"])
    assert "holds a run with other settings" in str(refused.exception)
    assert files == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
