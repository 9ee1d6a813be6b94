"""Warnings reach users once and are kept in the result; findings name the layer and the remedy of what is wrong."""

import os
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes import attaching
from robust_ext.reports import report_text
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.small import INPUTS, KINDS, call
from tests.evaluations.subjects import gradient

every_kind = pytest.mark.parametrize("kind", KINDS)


class Outputs(nn.Module):
    """Logits, and features of another width."""

    def __init__(self, network=None):
        super().__init__()
        torch.manual_seed(1)
        self.network = network or nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        self.eval()

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


def issued_by(kind, model, attack, **given):
    """The texts that an evaluation warned with, all of them at a line of these tests, and its result."""
    output = model(INPUTS)
    labels = (output[0] if isinstance(output, tuple) else output).argmax(1)
    given |= {"labels": labels} if kind == "binarization" else {}
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        result = call(kind, model, attack, INPUTS, labels, **given)
    assert {(one.category, Path(one.filename).parent) for one in issued} <= {(RobustExtWarning, Path(__file__).parent)}
    return [str(one.message) for one in issued], result


@every_kind
def test_what_an_evaluation_warns_of_is_issued_once_and_kept(kind):
    texts, result = issued_by(kind, Outputs(), threads)
    assert len(texts) == len(set(texts))
    assert set(result.content["warnings"]) <= set(texts)
    for words in ("is taken as the logits", "left the number of threads changed"):
        assert sum(words in text for text in result.content["warnings"]) == 1, words


@pytest.mark.parametrize("isolate", [True, False])
def test_those_of_an_attacks_process_and_of_an_earlier_run_are_issued_too(isolate, tmp_path):
    given = "robust_accuracy", Flat().eval(), "robust_ext:APGD(steps=2)"
    texts, result = issued_by(*given, isolate=isolate, out=tmp_path)
    (text,) = result.content["warnings"]
    assert texts == [text]
    assert "the gradient of some rows" in text
    if isolate:
        texts, result = issued_by("robust_accuracy", Flat().eval(), dies, isolate=True)
        assert texts == result.content["warnings"]
        assert len(texts) == 1
    else:
        assert issued_by(*given, isolate=isolate, out=tmp_path) == (texts, result)


def test_as_errors_they_end_the_call_when_its_files_are_written(tmp_path):
    labels = Outputs()(INPUTS)[0].argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RobustExtWarning) as raised:
            call("robust_accuracy", Outputs(), lambda model, x, y: x, INPUTS, labels, out=tmp_path)
    assert str(raised.value) == robust_ext.load_result(tmp_path).content["warnings"][0]


X, Y = load_dataset("digits").take(range(8))


def step(size, lowest=0.0, highest=1.0):
    return lambda model, x, y: (x + size * gradient(model, x, y).sign()).clamp(lowest, highest)


OUTSIDE = {
    "no projection": (step(0.25), "beyond epsilon"),
    "no clipping": (step(0.1, -1.0, 2.0), "out of the bounds"),
    "images in [-1, 1]": (lambda model, x, y: 2 * x - 1, "out of the bounds"),
}


def outside(result):
    return [text for text in result.content["warnings"] if "Candidates lay" in text]


@every_kind
def test_candidates_outside_the_threat_model_are_a_warning_in_every_evaluation(kind):
    """No more samples are counted than were given, or these and the problems planted in some of them."""
    given = {"planted": 6, "inner_points": 30} if kind == "diagnosis" else {}
    with pytest.warns(RobustExtWarning, match="Candidates lay beyond epsilon"):
        result = call(kind, digits_network(), OUTSIDE["no projection"][0], X, Y, **given)
    assert len(outside(result)) == 1
    for one in result.findings:
        planted = kind == "diagnosis" and one.unit == "samples and planted problems"
        assert planted or one.of is None or (one.of <= len(X) and one.unit == "samples"), one


@pytest.mark.parametrize("case", OUTSIDE)
def test_it_is_said_how_many_lie_outside_and_how_far(case):
    attack, what = OUTSIDE[case]
    (text,) = outside(call("robust_accuracy", digits_network(), {case: attack}, X, Y))
    candidates = attack(digits_network(), X, Y)
    distances = (candidates - X).flatten(1).abs().amax(1) / 0.1
    out = (candidates.flatten(1).amin(1) < -1e-5) | (candidates.flatten(1).amax(1) > 1 + 1e-5)
    rows = out if what == "out of the bounds" else (distances > 1.001) & ~out
    counts = re.search(r": (\d+) of (\d+), at ([\d.]+) .* and ([\d.]+) at most", text).groups()
    expected = [int(rows.sum()), len(X), float(distances[rows].quantile(0.5)), float(distances[rows].max())]
    assert [float(one) for one in counts] == pytest.approx(expected, rel=0.01)


def test_nothing_is_said_of_sound_attacks_and_of_perturbations_that_have_to_be_larger():
    for attack in ("foolbox:LinfPGD(steps=3)", "foolbox:LinfDeepFoolAttack(steps=20)", step(0.1)):
        assert outside(call("robust_accuracy", digits_network(), attack, X, Y)) == []


FAST = {"inner_points": 50, "random_inner": 10, "random_corners": 10, "canaries": 2, "depths": (1,)}
HEALTHY = "foolbox:LinfPGD(steps=20, rel_stepsize=0.1)"
OWN = {"binarization": FAST, "robust_accuracy": {}, "mead": {}, "test_time": {"draws": 2, "repeats": 1}}


@pytest.mark.parametrize("kind", OWN)
def test_a_rounding_layer_is_named_in_every_result_with_a_remedy(kind, tmp_path):
    """The same from records that are there already, and on the page."""
    model = nn.Sequential(OrderedDict(quantise=Rounding(), network=digits_network())).eval()
    given = kind, model, HEALTHY, X, Y
    result = call(*given, out=tmp_path, **OWN[kind])
    first = result.content["findings"][0]
    assert (first["code"], first["weight"]) == ("zero_gradient", "high")
    assert first["layer"].endswith("quantise")
    paste = first["remedies"][0]["paste"]
    assert "bpda" in paste or "straight_through" in paste
    assert all(line in report_text(result.content) for line in paste.splitlines())
    assert call(*given, out=tmp_path, **OWN[kind]).content["findings"] == result.content["findings"]
    assert "AdaptedAttack" in " ".join((tmp_path / "report.html").read_text().split())


@pytest.mark.parametrize("kind", OWN)
def test_a_healthy_attack_has_no_findings_and_no_probe(kind, monkeypatch):
    monkeypatch.setattr(attaching, "probe_model", Mock(side_effect=AssertionError))
    assert call(kind, digits_network(), HEALTHY, X, Y, **OWN[kind]).content["findings"] == []
