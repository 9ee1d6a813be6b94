"""``robust-ext diagnose``, as a person or a CI job uses it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from robust_ext.cli import app as cli

BASE = "diagnose --model digits --data digits --eps 0.1 --no-progress --samples 8 --planted 4 --inner-points 20"
SIZES = "--queries 5 --random-points 5 --in-process --no-references"


@pytest.mark.parametrize(
    ("attack", "status", "words"),
    [
        ("robust_ext:APGD(steps=20,loss='margin')", 0, "None of the known causes applies"),
        ("robust_ext:ObjectivePGD(steps=10,step_size=0.005)", 3, "The likely cause: "),
    ],
)
def test_status_and_files(attack, status, words, tmp_path, monkeypatch):
    arguments = [*BASE.split(), *SIZES.split(), "--attack", attack, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["robust-ext", *arguments])
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == status, done.output
    assert done.output.startswith(words)
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["kind"] == "diagnosis"
    assert (content["likely"] is None) == (status == 0)
    command = content["next"][0]["command"]
    assert command.startswith("robust-ext diagnose" if status else "robust-ext binarization")
    assert "--no-progress" not in command
    assert command in done.output
