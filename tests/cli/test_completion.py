"""What a shell completes."""

import os

import pytest
from typer.testing import CliRunner

from robust_ext.cli import app as cli

CASES = {
    "ben": [],
    "bin": ["binarization"],
    "binarization --calibrate": ["--calibrate"],
    "binarization --attack foo": ["foolbox:"],
    "binarization --attack foolbox:LinfProjectedGradientDescentA": ["foolbox:LinfProjectedGradientDescentAttack"],
    "robust-accuracy --attack art:AutoC": ["art:AutoConjugateGradient"],
    "diagnose --attack robust_ext:APG": ["robust_ext:APGD"],
    "binarization --attack nobody:A": [],
    "binarization --data cif": ["cifar10", "cifar100"],
    "binarization --model ti": ["timm:"],
    "binarization --norm l": ["linf", "l2", "l1"],
    "mead --suite paper": ["paper-cifar10", "paper-mnist"],
    "mead --detector ns": ["nss"],
    "test-time --defense bit": ["bit-depth"],
    "binarization --executor d": ["dask"],
}


@pytest.mark.parametrize("line", CASES)
def test_completion(line, monkeypatch):
    monkeypatch.setenv("COMP_WORDS", f"robust-ext {line}")
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ") + 1))
    environment = {**os.environ, "_ROBUST_EXT_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(cli.app, [], env=environment, prog_name="robust-ext")
    assert done.output.split() == CASES[line]
