"""The command line, as a person uses it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from robust_ext.adapters.own import OwnAdapter
from robust_ext.cli import app as cli
from robust_ext.cli.models import load_model
from robust_ext.core.errors import DataError

BASE = ["binarization", "--model", "digits", "--data", "digits", "--eps", "0.1", "--no-progress"]
QUICK = ["--samples", "6", "--inner-points", "30", "--proven-rate", "0", "--canaries", "2"]

MEAD = ["mead", "--model", "digits", "--data", "digits", "--samples", "12", "--resamples", "20", "--no-progress"]
SIZES = ["--train-samples", "120", "--adversarial-samples", "60", "--calibration-samples", "60"]
ARM = ["--arm", "linf:0.1,0.2=robust_ext:ObjectivePGD(steps=3)"]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def run(*arguments, out=None):
    """What a command prints, and the content of ``result.json`` in ``out``."""
    done = invoke(*arguments, *([] if out is None else ["--out", str(out)]))
    assert done.exit_code == 0, done.output
    return done.output, None if out is None else json.loads((out / "result.json").read_text())


def test_binarization(tmp_path):
    out = tmp_path / "run"
    attacks = ["foolbox:LinfPGD(steps=10, rel_stepsize=0.25)", "art:FastGradientMethod"]
    output, content = run(*BASE, *QUICK, "--attack", attacks[0], "--attack", attacks[1], out=out)
    assert "verdict" in output
    assert [attack["name"] for attack in content["attacks"]] == attacks
    assert (content["settings"]["epsilon"], content["settings"]["inner_points"]) == (0.1, 30)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert "data:image/svg" in (out / "report.html").read_text()


def test_attacks_are_listed(tmp_path):
    output, _ = run("attacks", "--json", str(tmp_path / "list.json"))
    rows = json.loads((tmp_path / "list.json").read_text())
    names = {name for row in rows for name in (row["name"], *row["aliases"])}
    assert {"foolbox:LinfPGD", "art:ProjectedGradientDescent", "art:SquareAttack"} <= names
    assert all(name in output for name in names)


def test_the_matrix_of_one_library(tmp_path, monkeypatch):
    # Its other attacks are run on both targets where the documented matrix is checked.
    listed = [entry for entry in OwnAdapter().list_attacks() if entry.name in ("APGD", "FeatureMatching")]
    monkeypatch.setattr(OwnAdapter, "list_attacks", lambda self: listed)
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "page.md")]
    output, _ = run("attacks", "--matrix", "--library", "robust_ext", "--no-progress", *files)
    rows = json.loads((tmp_path / "rows.json").read_text())
    wanted = {"library", "attack", "target", "outcome", "reason", "verified", "seconds", "passes"}
    assert all(wanted <= set(row) for row in rows)
    by_name = {(row["attack"], row["target"]): row for row in rows}
    ran, refused = by_name["APGD", "binarized"], by_name["FeatureMatching", "classifier"]
    assert (ran["outcome"], ran["verified"], refused["outcome"]) == ("ran", 4, "refused")
    assert "has none; choose an attack on classifiers" in refused["reason"]
    assert "robust_ext:APGD" in output
    assert "## robust_ext" in (tmp_path / "page.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.json", "page.md"}


def test_a_detector_on_the_command_line(tmp_path, files):
    out = tmp_path / "run"
    detector = ["--detector", f"{files / 'mine.py'}:Bright"]
    sizes = ["--detector-fpr", "0.2", "--detector-samples", "100"]
    output, content = run(*BASE, *QUICK, "--attack", "robust_ext:APGD(steps=10)", *detector, *sizes, out=out)
    assert set(content["attacks"][0]["tests"]) == {"regular", "inverted"}
    assert content["settings"]["detector_calibration"]["samples"] == 100
    assert content["settings"]["detector_calibration"]["achieved"] <= 0.2
    assert "  inverted" in output
    assert {path.name for path in out.iterdir()} == {
        *("regular", "inverted", "result.json", "report.html", "badge.svg", "study.toml", "evaluation.json", ".lock")
    }
    refused = invoke(*BASE, *QUICK, "--attack", "robust_ext:APGD", *detector, "--detector-samples", "5")
    assert "at least 20 clean inputs" in str(refused.exception)


def test_bad_weights(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    torch.save(Harm(), tmp_path / "harmful.pt")
    (tmp_path / "damaged.pt").write_bytes(b"\x00\x01")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x00\x01")
    torch.save({"0.weight": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("harmful.pt", "damaged.pt", "damaged.safetensors", "other.pt", "list.pt"):
        with pytest.raises(DataError, match=name):
            load_model("digits", weights=str(tmp_path / name))
    assert not (tmp_path / "harm").exists()


def without_clocks(value):
    if isinstance(value, dict):
        return {key: without_clocks(one) for key, one in value.items() if key not in ("seconds", "time", "cost")}
    return [without_clocks(one) for one in value] if isinstance(value, list) else value


@pytest.fixture
def unsure(files):
    return f"{files / 'mine.py'}:Unsure"


def test_fitted_and_own_detectors(tmp_path, unsure):
    """A supervised one is fitted on training data and kept; the same command again takes what is there."""
    out = tmp_path / "run"
    command = [*MEAD, *SIZES, *ARM, "--detector", "nss", "--detector", unsure, "--combine", "mean"]
    output, content = run(*command, out=out)
    assert [entry["name"] for entry in content["detectors"]] == ["nss", unsure, f"mean of nss, {unsure}"]
    assert all(entry["threshold"] is not None for entry in content["detectors"])
    assert content["settings"]["training_data_origin"].startswith("digits-train, 120 samples")
    assert "nss" in output
    assert "data:image/svg" in (out / "report.html").read_text()
    (fitted,) = (out / "detectors").iterdir()
    before = fitted.stat().st_mtime_ns
    assert "fitting" not in run(*command, out=out)[0]
    assert fitted.stat().st_mtime_ns == before
    damaged = bytearray(fitted.read_bytes())
    damaged[-5] ^= 1
    fitted.write_bytes(damaged)
    error = invoke(*command, "--out", str(out)).exception
    assert isinstance(error, DataError)
    assert "nss-" in str(error)
    assert "does not match its checksum" in str(error)
    output, repaired = run(*command, "--repair", "--progress", out=out)
    assert "fitting nss" in output
    assert repaired["averages"] == content["averages"]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.exhaustive
def test_jobs_change_nothing(tmp_path, unsure):
    """Nor where a file of the user's is among what they get; of other commands tests/engine has it."""
    command, contents = [*MEAD, *SIZES, *ARM, "--detector", unsure, "--suite", "quick", "--judge-seed", "0"], []
    for jobs in ("1", "2"):
        contents.append(without_clocks(run(*command, "--jobs", jobs, out=tmp_path / jobs)[1]))
    assert contents[0] == contents[1]
