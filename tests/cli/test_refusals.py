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
DATA = ("--data", "digits", "--samples", "3", "--no-progress")
MODEL = ("--model", "digits", *DATA)
ACCURACY = ("robust-accuracy", "--eps", "0.1", "--attack", "robust_ext:APGD(steps=2)")
BINARIZATION = (
    *("binarization", *MODEL, "--eps", "0.1", "--inner-points", "20", "--proven-rate", "0", "--canaries", "0"),
    *("--attack", "robust_ext:APGD(steps=2)"),
)
TRAINING = ("--train-samples", "30", "--calibration-samples", "30")


@pytest.fixture
def main(monkeypatch, capsys):
    """Run the command line as the installed program does: its status, and what it wrote to stdout and stderr."""

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
        (*ACCURACY, "--model", "foreign.py:quit", *DATA),
        (*ACCURACY, "--model", "foreign.py:quits", *DATA),
        (*ACCURACY, "--model", "foreign.py:interrupted", *DATA),
        (*ACCURACY, "--model", "foreign.py:reads", *DATA),
        ("robust-accuracy", "--eps", "0.1", "--attack", "foreign.py:attack", *MODEL, "--in-process"),
        (*BINARIZATION, "--detector", "foreign.py:detector"),
        (*BINARIZATION, "--detector", "foreign.py:score"),
        ("mead", *MODEL, "--detector", "foreign.py:detector", *TRAINING),
        ("test-time", *MODEL, "--eps", "0.1", "--defense", "foreign.py:defense"),
        ("test-time", *MODEL, "--eps", "0.1", "--defense", "foreign.py:purifier"),
    ],
    ids=lambda arguments: " ".join(arguments).split("foreign.py:")[1].split()[0] + "-" + arguments[0],
)
def test_code_that_ends_the_process_is_no_result(arguments, main, tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    status, out, err = main(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "result" not in out


@pytest.mark.exhaustive
def test_a_real_process_that_is_ended_by_the_model(tmp_path):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    command = [sys.executable, "-m", "robust_ext", *ACCURACY, "--model", "foreign.py:quits", *DATA]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "SystemExit" in done.stderr


LONG = "w" * 5000
MEAD = ("mead", *MODEL, "--detector", "foreign.py:score")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Of an option that is given twice, the last counts.
        ((*BINARIZATION, "--attack", "foolbox:LinfPDG"), "LinfPGD"),
        ((*BINARIZATION, "--attack", "foolbox:LinfPGD(step=3)"), "steps"),
        ((*BINARIZATION, "--attack", "nolibrary:Thing"), "nolibrary"),
        ((*BINARIZATION, "--eps", "eight"), "--eps: got 'eight'"),
        ((*BINARIZATION, "--samples", "9999", "--no-sequential"), "500"),
        (("attacks", "--library", "nobody"), "library: got 'nobody'"),
        (("attacks", "--matrix", "--library", "nobody"), "libraries: got 'nobody'"),
        (("attacks", "--markdown", "page.md"), "--markdown: got page.md, expected to be given together with --matrix"),
        (("attacks", "--seed", "-1"), "--seed: got -1"),
        ((*MEAD, "--arm", "nonsense"), "NORM:EPSILON=ATTACK"),
        ((*MEAD, "--data-split", "train"), "--train-data"),
        ((*MEAD, *TRAINING, "--detector", "nsss"), "did you mean nss?"),
        ((*BINARIZATION, "--exposure", "reject"), "exposure: got reject, expected 'classifier' where"),
        (("robust-accuracy", *MODEL, "--eps", "1", "--attack", "robust_ext:OrthogonalPGD()"), "this target has none"),
        ((*ACCURACY, "--model", "os.path:join", *DATA), "--model: got os.path:join without a"),
        ((*ACCURACY, *MODEL, "--out", LONG), "File name too long"),
        ((*ACCURACY, *MODEL, "--out", ""), "got '', expected a name; '.' is the current folder"),
        ((*ACCURACY, *MODEL, "--devices", ""), "--devices: got an empty text"),
        ((*ACCURACY, *MODEL, "--weights", "a\0b"), "no such file"),
        ((*ACCURACY, *MODEL, "--data", "a\0b.npz"), "not found"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_one_line(arguments, message, main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = main(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert len(err) < 2200
    assert list(tmp_path.iterdir()) == []


def test_names_in_progress_logs_and_tables_are_written_out(main, tmp_path, monkeypatch):
    monkeypatch.setattr("robust_ext.engine.progress._FIRST", 0.0)
    label = "\x1b[31mred\x9b"
    attack = f"{label}=foolbox:L2FMNAttack(steps=1)"
    words = [word for word in MODEL if word != "--no-progress"]
    command = (*words, "--norm", "l2", "--eps", "0.5", "--out", str(tmp_path / "run"), "--in-process")
    status, out, err = main("--verbose", "robust-accuracy", *command, "--attack", attack)
    assert status == 0
    assert "\\x1b[31mred" in out
    assert "\\x1b[31mred" in err
    assert all(char.isprintable() or char in "\n\r" for char in out + err)


def test_an_error_that_nobody_raised_on_purpose(main, monkeypatch):
    def broken(*_):
        raise KeyError("inside\x1b[31m")

    monkeypatch.setattr("robust_ext.cli.evaluations.labelled", broken)
    status, _, err = main(*ACCURACY, *MODEL)
    assert status == 1
    assert err.startswith("error: unexpected KeyError: 'inside\\x1b[31m'; robust-ext --verbose shows the traceback")
    assert "Traceback" not in err


@pytest.mark.exhaustive
def test_attacks_where_torchvision_is_broken(tmp_path):
    """As where it was built for another release of torch: the list is shown, and AdversarialPatch states the reason."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    refusing = ["robust-accuracy", *MODEL, "--eps", "0.1", "--attack", "art:AdversarialPatch"]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from robust_ext.cli.app import main\n"
        f"for words in (['attacks'], {refusing}):\n"
        "    sys.argv[1:] = words\n"
        "    try: main()\n"
        "    except SystemExit as ended: print('status', ended.code or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    listed, _, rest = done.stdout.partition("status 0\n")
    assert all(name in listed for name in ("adv_lib:ddn", "art:AdversarialPatch", "robust_ext:APGD")), done.stderr
    assert rest == "status 2\n"
    assert "torchvision, which is installed but cannot be imported" in done.stderr
    assert "pip install --force-reinstall torchvision" in done.stderr
    assert "settings it accepts" not in done.stderr
