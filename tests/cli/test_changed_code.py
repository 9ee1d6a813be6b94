"""A run folder is gone on with by the same code only, whatever file of it changed; touching a file changes nothing."""

import sys

import pytest
from typer.testing import CliRunner

from robust_ext.cli import app as cli
from robust_ext.core.errors import RunFolderError

NET = """
import torch
from robust_ext.demo.network import digits_network
class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)
def make():
    return Net(*digits_network()).eval()
"""
SIGNS = """
STEPS = 3
def climb(model, x, y, threat_model):
    for _ in range(STEPS):
        model(x)
    return x
"""
DEFENSE = """
import rounding
def purify(x):
    return (x * rounding.LEVELS).round() / rounding.LEVELS
"""
DETECTOR = """
import weighing
from robust_ext.detectors import Detector
class Bright(Detector):
    def score_of(self, seen):
        return seen.inputs.flatten(1).mean(1) ** weighing.POWER
"""
FILES = {"net.py": NET, "other.py": NET, "signs.py": SIGNS, "attack.py": "from signs import climb as attack\n"}
FILES |= {"rounding.py": "LEVELS = 16\n", "defense.py": DEFENSE, "weighing.py": "POWER = 1.0\n"}
FILES |= {"detector.py": DETECTOR}
ATTACK, DETECTED = "--attack {0}/attack.py:attack", "--detector {0}/detector.py:Bright"
SMALL = "--samples 4 --inner-points 30 --proven-rate 0 --canaries 0"
ARM, FITTED = "--arm linf:0.1=", "--train-samples 60 --adversarial-samples 1 --calibration-samples 40 --resamples 0"
ARMS = [f"{ARM}{{0}}/attack.py:attack", f"{ARM}robust_ext:SelectivePGD(steps=2)"]
WEAK = "--samples 4 --steps 1 --queries 2 --repeats 1 --draws 1 --defense {0}/defense.py:purify"
# Options of a command, what changes, and what the error is to name; the weights are the same in all cases.
PROBED = "behaves differently on 4 of 4"
FORWARD = ("net.py", "super().forward(x)", "super().forward((x * 2).round() / 2)")
MODEL = (*FORWARD, f"model code: changed (net.py); model: {PROBED}")
WEIGHING = ("weighing.py", "1.0", "2.0", f"detector code: changed (weighing.py); detector: {PROBED}")
HELPER = ("signs.py", "STEPS = 3", "STEPS = 0", "code: changed (signs.py)")
DEFENDED = [
    (*FORWARD, f"model: {PROBED}"),
    ("rounding.py", "16", "2", f"defense code: changed (rounding.py); defense: {PROBED}"),
    ("other.py", "forward(x)", "forward(1 - x)", f"surrogate {{0}}/other.py:make: {PROBED}"),
]
COMMANDS = {
    f"binarization --eps 0.1 {SMALL} {ATTACK}": [MODEL, HELPER],
    f"binarization --eps 0.1 --in-process {SMALL} {ATTACK} {DETECTED} --detector-samples 50": [WEIGHING, HELPER],
    f"mead --samples 6 --in-process {FITTED} {ARMS[0]} {ARMS[1]} {DETECTED}": [MODEL, WEIGHING, HELPER],
    f"robust-accuracy --eps 0.1 --in-process --samples 4 {ATTACK}": [MODEL, HELPER],
    f"test-time --eps 0.1 --in-process {WEAK} --surrogate {{0}}/other.py:make": DEFENDED,
}


def invoke(command, folder):
    for name in ("signs", "rounding", "weighing"):
        sys.modules.pop(name, None)
    shared = "--data digits --no-progress --model {0}/net.py:make --out {0}/run"
    return CliRunner().invoke(cli.app, f"{command} {shared}".format(folder).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_changed_code_is_refused_and_touched_code_is_not(command, tmp_path):
    """Whether a forward changed or a module that the attack, the detector or the defense imports."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = invoke(command, tmp_path)
    assert done.exit_code == 0, done.output
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("records.jsonl")}
    for name in FILES:
        (tmp_path / name).touch()
    assert invoke(command, tmp_path).exit_code == 0
    for file, old, new, words in COMMANDS[command]:
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
        refused = invoke(command, tmp_path)
        assert isinstance(refused.exception, RunFolderError), refused.output
        assert words.format(tmp_path) in str(refused.exception)
        assert "choose another folder, or go back to what it was begun with" in str(refused.exception)
        (tmp_path / file).write_text(text)
    assert invoke(command, tmp_path).exit_code == 0
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("records.jsonl")} == before
