"""The command line, as a person or a CI job uses it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from robust_ext.adapters.own import OwnAdapter
from robust_ext.cli import app as cli
from robust_ext.core.errors import DataError

DIGITS = "--model digits --data digits --no-progress"
BASE = f"binarization {DIGITS} --eps 0.1 --samples 6 --inner-points 30 --proven-rate 0 --canaries 2".split()
MEAD = f"mead {DIGITS} --samples 12 --resamples 20 --train-samples 120 --adversarial-samples 60".split()
MEAD += ["--calibration-samples", "60", "--arm", "linf:0.1,0.2=robust_ext:ObjectivePGD(steps=3)"]
DIAGNOSE = f"diagnose {DIGITS} --eps 0.1 --samples 8 --planted 4 --inner-points 20 --queries 5 --random-points 5"
FILES = {"result.json", "report.html", "badge.svg", "study.toml", ".lock"}


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def run(*arguments, out=None):
    done = invoke(*arguments, *([] if out is None else ["--out", out]))
    assert done.exit_code == 0, done.output
    return done.output, None if out is None else json.loads((out / "result.json").read_text())


def test_attacks_are_listed_and_the_matrix_of_one_library_is_run(tmp_path, monkeypatch):
    output, _ = run("attacks", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    names = {name for row in rows for name in (row["name"], *row["aliases"])}
    assert {"foolbox:LinfPGD", "art:ProjectedGradientDescent", "art:SquareAttack"} <= names
    assert all(name in output for name in names)
    # Its other attacks are run on both targets where the documented matrix is checked.
    listed = [entry for entry in OwnAdapter().list_attacks() if entry.name in ("APGD", "FeatureMatching")]
    monkeypatch.setattr(OwnAdapter, "list_attacks", lambda self: listed)
    files = ["--json", tmp_path / "rows.json", "--markdown", tmp_path / "page.md"]
    output, _ = run("attacks", "--matrix", "--library", "robust_ext", "--no-progress", *files)
    rows = json.loads((tmp_path / "rows.json").read_text())
    by_name = {(row["attack"], row["target"]): row for row in rows}
    ran, refused = by_name["APGD", "binarized"], by_name["FeatureMatching", "classifier"]
    assert (ran["outcome"], ran["verified"], refused["outcome"]) == ("ran", 4, "refused")
    assert "robust_ext:APGD" in output
    assert "## robust_ext" in (tmp_path / "page.md").read_text()


def test_a_detector_on_the_command_line(tmp_path, files):
    out = tmp_path / "run"
    detector = ["--attack", "robust_ext:APGD(steps=10)", "--detector", f"{files / 'mine.py'}:Bright"]
    output, content = run(*BASE, *detector, "--detector-fpr", "0.2", "--detector-samples", "100", out=out)
    assert set(content["attacks"][0]["tests"]) == {"regular", "inverted"}
    assert content["settings"]["detector_calibration"]["samples"] == 100
    assert "  inverted" in output
    assert {path.name for path in out.iterdir()} == {"regular", "inverted", "evaluation.json", *FILES}
    assert "at least 20 clean inputs" in str(invoke(*BASE, *detector, "--detector-samples", "5").exception)


@pytest.mark.parametrize(
    ("attack", "status", "words"),
    [
        ("robust_ext:APGD(steps=20,loss='margin')", 0, "None of the known causes applies"),
        ("robust_ext:ObjectivePGD(steps=10,step_size=0.005)", 3, "The likely cause: "),
    ],
)
def test_status_and_next_command_of_a_diagnosis(attack, status, words, tmp_path, monkeypatch):
    arguments = [*DIAGNOSE.split(), "--in-process", "--no-references", "--attack", attack, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["robust-ext", *arguments])
    done = invoke(*arguments)
    assert done.exit_code == status, done.output
    assert done.output.startswith(words)
    content = json.loads((tmp_path / "result.json").read_text())
    assert (content["kind"], content["likely"] is None) == ("diagnosis", status == 0)
    command = content["next"][0]["command"]
    assert command.startswith("robust-ext diagnose" if status else "robust-ext binarization")
    assert "--no-progress" not in command
    assert command in done.output


def test_fitted_and_own_detectors(tmp_path, files):
    """A supervised one is fitted on training data and kept; the same command again takes what is there."""
    out, unsure = tmp_path / "run", f"{files / 'mine.py'}:Unsure"
    command = [*MEAD, "--detector", "nss", "--detector", unsure, "--combine", "mean"]
    output, content = run(*command, out=out)
    assert [entry["name"] for entry in content["detectors"]] == ["nss", unsure, f"mean of nss, {unsure}"]
    assert "nss" in output
    assert "data:image/svg" in (out / "report.html").read_text()
    (fitted,) = (out / "detectors").iterdir()
    before = fitted.stat().st_mtime_ns
    assert "fitting" not in run(*command, out=out)[0]
    assert fitted.stat().st_mtime_ns == before
    damaged = bytearray(fitted.read_bytes())
    damaged[-5] ^= 1
    fitted.write_bytes(damaged)
    error = invoke(*command, "--out", out).exception
    assert isinstance(error, DataError)
    assert "does not match its checksum" in str(error)
    output, repaired = run(*command, "--repair", "--progress", out=out)
    assert "fitting nss" in output
    assert repaired["averages"] == content["averages"]
