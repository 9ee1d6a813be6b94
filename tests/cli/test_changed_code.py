"""A run folder is gone on with by the same code only, whatever file of it changed; touching a file changes nothing."""

import sys

import pytest
from typer.testing import CliRunner

from robust_ext.cli import app as cli
from robust_ext.core.errors import RunFolderError

FILES = {
    "net.py": """
import torch
from robust_ext.demo.network import digits_network

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = digits_network()

    def forward(self, x):
        return self.network(x)

def make():
    return Net().eval()
""",
    "signs.py": """
import torch

STEPS = 3

def climb(model, x, y, threat_model):
    out = x.clone()
    for _ in range(STEPS):
        out = out.detach().requires_grad_(True)
        loss = torch.nn.functional.cross_entropy(model(out), y)
        out = out + threat_model.epsilon / 2 * torch.autograd.grad(loss, out)[0].sign()
        out = (x + (out - x).clamp(-threat_model.epsilon, threat_model.epsilon)).clamp(*threat_model.bounds)
    return out.detach()
""",
    "attack.py": """
from signs import climb as attack
""",
    "rounding.py": "LEVELS = 16\n",
    "defense.py": """
import rounding

def purify(x):
    return (x * rounding.LEVELS).round() / rounding.LEVELS
""",
    "weighing.py": "POWER = 1.0\n",
    "detector.py": """
import weighing
from robust_ext.detectors import Detector

class Bright(Detector):
    def score_of(self, seen):
        return seen.inputs.flatten(1).mean(1) ** weighing.POWER
""",
}
DIGITS = ["--data", "digits", "--no-progress", "--model", "{0}/net.py:make"]
ATTACK = ["--attack", "{0}/attack.py:attack"]
SMALL = ["--samples", "4", "--inner-points", "30", "--proven-rate", "0", "--canaries", "0", "--eps", "0.1"]
WEAK = ["--eps", "0.1", "--samples", "4", "--steps", "1", "--queries", "2", "--repeats", "1", "--draws", "1"]
FITTED = ["--train-samples", "60", "--adversarial-samples", "1", "--calibration-samples", "40"]
ARMS = ["--arm", "linf:0.1={0}/attack.py:attack", "--arm", "linf:0.1=robust_ext:SelectivePGD(steps=2)"]
COMMANDS = {
    "binarization": [*SMALL, *ATTACK],
    "binarization of a detector": [*SMALL, *ATTACK, "--detector", "{0}/detector.py:Bright", "--detector-samples", "50"],
    "mead": [*FITTED, *ARMS, "--samples", "6", "--resamples", "0", "--detector", "{0}/detector.py:Bright"],
    "robust-accuracy": ["--samples", "4", "--eps", "0.1", *ATTACK],
    "test-time": [*WEAK, "--defense", "{0}/defense.py:purify", "--surrogate", "{0}/other.py:make"],
}
# What changes, and what the error is to name; the weights are the same in all cases.
FORWARD = ("net.py", "self.network(x)", "self.network((x * 2).round() / 2)")
CHANGES = {
    "binarization": [(*FORWARD, "model code: changed (net.py); model: behaves differently on 4 of 4 probe inputs")],
    "binarization of a detector": [
        ("weighing.py", "1.0", "2.0", "detector code: changed (weighing.py); detector: behaves differently on 4 of 4")
    ],
    "mead": [
        (*FORWARD, "model code: changed (net.py); model: behaves differently on 4 of 4"),
        ("weighing.py", "1.0", "2.0", "detector code: changed (weighing.py); detector: behaves differently on 4 of 4"),
    ],
    "robust-accuracy": [(*FORWARD, "model code: changed (net.py); model: behaves differently on 4 of 4")],
    "test-time": [
        (*FORWARD, "model: behaves differently on 4 of 4"),
        ("rounding.py", "16", "2", "defense code: changed (rounding.py); defense: behaves differently on 4 of 4"),
        ("other.py", "(x)", "(1 - x)", "surrogate {0}/other.py:make: behaves differently on 4 of 4"),
    ],
}
HELPER = ("signs.py", "STEPS = 3", "STEPS = 0", "code: changed (signs.py)")


@pytest.fixture
def folder(tmp_path):
    for name, text in {**FILES, "other.py": FILES["net.py"]}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def invoke(command, folder):
    for name in ("signs", "rounding", "weighing"):
        sys.modules.pop(name, None)
    arguments = [*DIGITS, *COMMANDS[command], "--out", "{0}/run"]
    if command != "binarization":
        arguments.append("--in-process")
    name = command.split()[0]
    return CliRunner().invoke(cli.app, [name, *(argument.format(folder) for argument in arguments)])


def records(folder):
    return {file: file.read_bytes() for file in (folder / "run").rglob("records.jsonl")}


@pytest.mark.parametrize("command", COMMANDS)
def test_changed_code_is_refused_and_touched_code_is_not(command, folder):
    """Whether a forward changed or a module that the attack, the detector or the defense imports."""
    done = invoke(command, folder)
    assert done.exit_code == 0, done.output
    before = records(folder)
    for name in FILES:
        (folder / name).touch()
    assert invoke(command, folder).exit_code == 0
    changes = CHANGES[command] if command == "test-time" else [*CHANGES[command], HELPER]
    for file, old, new, words in changes:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        refused = invoke(command, folder)
        assert isinstance(refused.exception, RunFolderError), refused.output
        assert words.format(folder) in str(refused.exception)
        assert "choose another folder, or go back to what it was begun with" in str(refused.exception)
        (folder / file).write_text(text)
    assert invoke(command, folder).exit_code == 0
    assert records(folder) == before
