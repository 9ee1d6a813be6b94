"""Warnings reach Python users once, with their line; the result keeps them, and the command line shows them once."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.demo.network import digits_network
from tests.evaluations.small import KINDS, call

LINF = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class Outputs(nn.Module):
    """Logits, and features of another width."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return self.network(x), x.flatten(1)


class Flat(nn.Module):
    """Logits that no input changes."""

    def forward(self, x):
        return x.flatten(1)[:, :3] * 0 + torch.tensor([2.0, 0, 0])


def dies(model, x, y):
    os._exit(0)


def threads(model, x, y):
    torch.set_num_threads(3 - torch.get_num_threads() if torch.get_num_threads() < 3 else 1)
    return x


def make():
    torch.manual_seed(1)
    return Outputs().eval()


def issued_by(call):
    """The texts that a call warned with, all of them this package's and at a line of these tests, and its result."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        result = call()
    assert {(one.category, Path(one.filename).parent) for one in issued} <= {(RobustExtWarning, Path(__file__).parent)}
    return [str(one.message) for one in issued], result


def labels(model):
    output = model(X)
    return (output[0] if isinstance(output, tuple) else output).argmax(1)


def accuracy(model, attack, **settings):
    return call("robust_accuracy", model, attack, X, labels(model), LINF, batch_size=4, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_evaluation_warns_of_is_issued_once_and_kept(kind):
    model = make()
    own = {"labels": labels(model)} if kind == "binarization" else {}
    texts, result = issued_by(lambda: call(kind, model, threads, X, labels(model), LINF, **own))
    assert len(texts) == len(set(texts))
    assert set(result.content["warnings"]) <= set(texts)
    for words in ("is taken as the logits", "left the number of threads changed"):
        assert sum(words in text for text in result.content["warnings"]) == 1, words


@pytest.mark.parametrize("given", ["lost", "own process", "resumed"])
def test_wherever_they_come_from(given, tmp_path):
    """The result's own, those of an attack's process, and those of blocks that were finished before."""
    if given == "lost":
        texts, result = issued_by(lambda: accuracy(Flat().eval(), dies, isolate=True))
    else:
        keywords = {"isolate": given != "resumed", "out": tmp_path}
        attack = "robust_ext:APGD(steps=2)"
        texts, result = issued_by(lambda: accuracy(Flat().eval(), attack, **keywords))
        assert any("the gradient of some rows" in text for text in texts)
        if given == "resumed":
            assert issued_by(lambda: accuracy(Flat().eval(), attack, **keywords)) == (texts, result)
    assert texts == result.content["warnings"]
    assert len(texts) == 1


def test_as_errors_they_end_the_call_when_its_files_are_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RobustExtWarning) as raised:
            accuracy(make(), lambda model, x, y: x, out=tmp_path)
    assert str(raised.value) == robust_ext.load_result(tmp_path).content["warnings"][0]


@pytest.mark.parametrize("more", [[], pytest.param(["--attack", "nowhere:attack"], marks=pytest.mark.exhaustive)])
def test_the_command_line_shows_each_once(more):
    """With the result, or on stderr where there is none."""
    command = ["robust-accuracy", "--model", f"{__file__}:network", "--data", "digits", "--eps", "0.1", "--in-process"]
    command += ["--samples", "16", "--no-progress", "--attack", f"{__file__}:threads", *more]
    found = subprocess.run([sys.executable, "-m", "robust_ext", *command], capture_output=True, text=True, check=False)
    words = "is taken as the logits"
    assert (found.stdout.count(words), found.stderr.count(words)) == ((0, 1) if more else (1, 0)), found
    assert "RobustExtWarning" not in found.stderr


def network():
    """For the command line."""
    model = Outputs()
    model.network = digits_network()
    return model.eval()
