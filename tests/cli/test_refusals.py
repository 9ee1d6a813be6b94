"""What cannot be evaluated ends with status 2 and a line that says why; status 0 stands for a result."""

import subprocess
import sys

import pytest

from robust_ext.cli import app as cli

FOREIGN = """
import sys
import torch
def quit(): sys.exit(0)
def detector(classifier): sys.exit(0)
def score(x): sys.exit(0)
def defense(classifier): sys.exit(0)
def purifier(x): sys.exit(0)
def attack(model, x, y): sys.exit(0)
def interrupted(): raise type("Stop", (BaseException,), {})("now")
def reads(): input()
class Quits(torch.nn.Module):
    def forward(self, x): sys.exit(0)
quits = Quits().eval()
"""
DATA = ("--data", "digits", "--samples", "3", "--no-progress", "--eps", "0.1")
MODEL = ("--model", "digits", *DATA)
ATTACK = ("--attack", "robust_ext:APGD(steps=2)")
ACCURACY = ("robust-accuracy", *ATTACK, *DATA, "--model")
BINARIZATION = ("binarization", *MODEL, *ATTACK, "--inner-points", "20", "--proven-rate", "0", "--canaries", "0")
TRAINING = ("--train-samples", "30", "--calibration-samples", "30")


@pytest.fixture
def main(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["robust-ext", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        *((*ACCURACY, f"foreign.py:{name}") for name in ("quit", "quits", "interrupted", "reads")),
        ("robust-accuracy", *MODEL, "--attack", "foreign.py:attack", "--in-process"),
        ("robust-accuracy", *MODEL, "--attack", "exits.py:attack"),
        *((*BINARIZATION, "--detector", f"foreign.py:{name}") for name in ("detector", "score")),
        ("mead", *MODEL[:-2], *TRAINING, "--detector", "foreign.py:detector"),
        *(("test-time", *MODEL, "--defense", f"foreign.py:{name}") for name in ("defense", "purifier")),
    ],
    ids=" ".join,
)
def test_code_that_ends_the_process_is_no_result(arguments, main, tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    (tmp_path / "exits.py").write_text("import os; os._exit(0)")
    monkeypatch.chdir(tmp_path)
    status, out, err = main(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "result" not in out


def test_names_in_progress_logs_and_tables_are_written_out(main, tmp_path, monkeypatch):
    monkeypatch.setattr("robust_ext.engine.progress._FIRST", 0.0)
    words = [word for word in MODEL if word != "--no-progress"]
    words += ["--norm", "l2", "--eps", "0.5", "--attack", "\x1b[31mred\x9b=foolbox:L2FMNAttack(steps=1)"]
    status, out, err = main("--verbose", "robust-accuracy", *words, "--out", str(tmp_path / "run"), "--in-process")
    assert status == 0
    assert "\\x1b[31mred" in out
    assert "\\x1b[31mred" in err
    assert all(char.isprintable() or char in "\n\r" for char in out + err)


def test_an_error_that_nobody_raised_on_purpose(main, monkeypatch):
    def broken(*_):
        raise KeyError("inside\x1b[31m")

    monkeypatch.setattr("robust_ext.cli.evaluations.labelled", broken)
    status, _, err = main(*ACCURACY, "digits")
    assert status == 1
    assert err.startswith("error: unexpected KeyError: 'inside\\x1b[31m'; robust-ext --verbose shows the traceback")
    assert "Traceback" not in err


@pytest.mark.exhaustive
def test_attacks_where_torchvision_is_broken(tmp_path):
    """As where it was built for another release of torch: the list is shown, and AdversarialPatch states the reason."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from robust_ext.cli.app import main; main()"
    listed, refused = (
        subprocess.run([sys.executable, "-c", start, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        for words in (["attacks"], ["robust-accuracy", *MODEL, "--attack", "art:AdversarialPatch"])
    )
    assert listed.returncode == 0, listed.stderr
    assert all(name in listed.stdout for name in ("adv_lib:ddn", "art:AdversarialPatch", "robust_ext:APGD"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "torchvision, which is installed but cannot be imported" in refused.stderr
