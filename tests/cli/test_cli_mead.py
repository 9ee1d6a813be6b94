"""``robust-ext mead``, as a person uses it."""

import json
import sys
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from robust_ext.cli import app as cli
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.evaluations.mead import MeadSettings

BASE = ["mead", "--model", "digits", "--data", "digits", "--samples", "12", "--resamples", "20", "--no-progress"]
DETECTOR = """
from robust_ext.detectors import Detector

class Unsure(Detector):
    def score_of(self, seen):
        first, second = seen.logits.topk(2).values.unbind(1)
        return second - first
"""
SIZES = ["--train-samples", "120", "--adversarial-samples", "60", "--calibration-samples", "60"]
ARM = ["--arm", "linf:0.1,0.2=robust_ext:ObjectivePGD(steps=3)"]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def without_clocks(path):
    content = json.loads(path.read_text())
    for part in (content, *content["detectors"], *content["arms"]):
        part.pop("seconds")
    return content


@pytest.fixture
def unsure(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(DETECTOR)
    return f"{file}:Unsure"


def test_fitted_and_own_detectors(tmp_path, unsure):
    """A supervised one is fitted on training data and kept; the same command again takes what is there."""
    out = tmp_path / "run"
    command = [*BASE, *SIZES, *ARM, "--detector", "nss", "--detector", unsure, "--combine", "mean", "--out", str(out)]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    content = json.loads((out / "result.json").read_text())
    assert [entry["name"] for entry in content["detectors"]] == ["nss", unsure, f"mean of nss, {unsure}"]
    assert all(entry["threshold"] is not None for entry in content["detectors"])
    assert content["settings"]["training_data_origin"].startswith("digits-train, 120 samples")
    assert "nss" in done.output
    assert "<svg" in (out / "report.html").read_text()
    (fitted,) = (out / "detectors").iterdir()
    before = fitted.stat().st_mtime_ns
    again = invoke(*command)
    assert again.exit_code == 0, again.output
    assert "fitting" not in again.output
    assert fitted.stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine.py"}


@pytest.mark.slow
def test_jobs_change_nothing(tmp_path, unsure, monkeypatch):
    for name, extra in (("one", []), ("two", ["--jobs", "2"])):
        command = [*BASE, *SIZES, *ARM, "--detector", unsure, "--suite", "quick", "--out", str(tmp_path / name), *extra]
        # What the processes are given is read from the command line.
        monkeypatch.setattr(sys, "argv", ["robust-ext", *command])
        done = invoke(*command)
        assert done.exit_code == 0, done.output
    assert without_clocks(tmp_path / "one" / "result.json") == without_clocks(tmp_path / "two" / "result.json")


def test_every_setting_has_an_option():
    text = CliRunner().invoke(cli.app, ["mead", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for entry in fields(MeadSettings):
        assert f"--{entry.name.replace('_', '-')}" in text, entry.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "2"], "--out"),
        (["--arm", "nonsense"], "NORM:EPSILON=ATTACK"),
        (["--suite", "paper"], "suite"),
        (["--train-samples", "5000"], "at most"),
        (["--naturals", "some"], "naturals"),
        (["--samples", "0"], "--samples"),
        (["--train-data", "nowhere.npz"], "nowhere.npz"),
        (["--data-split", "train"], "--train-data"),
    ],
)
def test_bad_arguments(arguments, words, unsure):
    done = invoke(*BASE, "--detector", unsure, *SIZES, *arguments)
    assert done.exit_code != 0
    assert words in str(done.exception)


def test_a_detector_that_is_none(tmp_path):
    done = invoke(*BASE, *SIZES, *ARM, "--detector", "nsss")
    assert isinstance(done.exception, InvalidArgumentError)
    assert "did you mean nss?" in str(done.exception)
