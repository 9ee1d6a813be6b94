"""Findings in the four evaluations: what is wrong, the layer, what to do; nothing where nothing is."""

import re
from collections import OrderedDict
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from robust_ext import ThreatModel, binarization_test, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes import attaching
from robust_ext.reports import report_text
from tests.evaluations.diagnosis.zoo import published
from tests.evaluations.small import call
from tests.evaluations.subjects import Unsure

LINF = ThreatModel(norm="linf", epsilon=0.1)
FAST = {"inner_points": 100, "random_inner": 20, "random_corners": 20, "canaries": 2, "witness_queries": 8}
SHORT = "foolbox:LinfPGD(steps=20, random_start=False)"
HEALTHY = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"


class Rounded(nn.Module):
    """Rounds to eighths."""

    def forward(self, x):
        return (x * 8).round() / 8


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    x = torch.tensor(data.images[1500:1512] / 16, dtype=torch.float32)[:, None]
    return x, torch.tensor(data.target[1500:1512])


@pytest.fixture(scope="module")
def rounding():
    return nn.Sequential(OrderedDict(quantise=Rounded(), network=digits_network())).eval()


def codes(result, *, low=False):
    return [one["code"] for one in result.content["findings"] if low or one["weight"] != "low"]


def evaluate(kind, model, attack, digits, out=None):
    """The result of an evaluation of an attack on a model."""
    own = {"binarization": FAST, "test_time": {"draws": 2, "repeats": 1}}.get(kind, {})
    return call(kind, model, attack, *digits, LINF, out=out, **own)


KINDS = pytest.mark.parametrize("kind", ["binarization", "robust_accuracy", "mead", "test_time"])


@KINDS
def test_a_rounding_layer_is_named_in_every_result(rounding, digits, kind):
    """With BPDA as remedy."""
    result = evaluate(kind, rounding, HEALTHY, digits)
    first = result.content["findings"][0]
    assert (first["code"], first["weight"]) == ("zero_gradient", "high")
    assert first["layer"].endswith("quantise")
    paste = first["remedies"][0]["paste"]
    assert "bpda" in paste or "straight_through" in paste
    assert all(line in report_text(result.content) for line in paste.splitlines())


@pytest.mark.exhaustive
@KINDS
def test_findings_come_from_the_run_folder_and_are_on_the_page(rounding, digits, kind, tmp_path):
    """The same from records that are there already."""
    first, again = (evaluate(kind, rounding, HEALTHY, digits, tmp_path).content["findings"] for _ in range(2))
    assert first == again
    assert "AdaptedAttack" in " ".join((tmp_path / "report.html").read_text().split())


@KINDS
def test_a_healthy_attack_has_no_findings_and_no_probe(digits, kind, monkeypatch):
    monkeypatch.setattr(attaching, "probe_model", Mock(side_effect=AssertionError))
    result = evaluate(kind, digits_network(), HEALTHY, digits)
    assert result.content["findings"] == []
    without = {key: value for key, value in result.content.items() if key != "findings"}
    assert report_text(without) == report_text(result.content), "results of earlier versions have no findings"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("attack", "exposure"),
    [
        (HEALTHY, "reject"),
        ("robust_ext:Square(queries=500)", "reject"),
        ("robust_ext:Square(queries=500)", "classifier"),
    ],
)
def test_an_untargeted_attack_is_shown_the_detector_in_the_margin(digits, attack, exposure):
    """Not as a class, which it would take for a success."""
    settings = {**FAST, "detector": Unsure, "detector_data": load_dataset("digits").take(range(100, 200))[0]}
    given = (digits_network(), attack, digits[0], replace(LINF, epsilon=0.15))
    (entry,) = binarization_test(*given, **settings, exposure=exposure).content["attacks"]
    (proposed,) = set(re.findall(r'exposure="(\w+)"', entry["reason"]))
    (fixed,) = binarization_test(*given, **settings, exposure=proposed).content["attacks"]
    before, after = (sum(test["score"] for test in one["tests"].values()) for one in (entry, fixed))
    assert after > before


@pytest.mark.exhaustive
@pytest.mark.skipif(not published.available(), reason="needs the published network and CIFAR-10")
def test_the_cause_is_told_on_a_resnet():
    """Behind a rounding layer, in both evaluations, and with steps that do not reach the edge of the ball."""
    network, (x, y) = published.resnet(), published.cifar()
    rounded = nn.Sequential(OrderedDict(quantise=Rounded(), network=network)).eval()
    few, ball = {"inner_points": 99, "random_inner": 20, "random_corners": 20}, replace(LINF, epsilon=8 / 255)
    for result in (binarization_test(rounded, HEALTHY, x, ball, **few), robust_accuracy(rounded, HEALTHY, x, y, ball)):
        assert (codes(result)[0], result.findings[0].layer) == ("zero_gradient", "quantise")
    fixed = f"robust_ext:AdaptedAttack(attack='{HEALTHY}', bpda='quantise')"
    assert binarization_test(rounded, fixed, x, ball, **few).score >= 0.95
    assert robust_accuracy(rounded, fixed, x, y, ball).robust_accuracy(8 / 255) <= 0.1
    # Short of the edge of a ball that holds adversarial examples.
    ball = replace(LINF, epsilon=1 / 255)
    short = robust_accuracy(network, SHORT, x, y, ball)
    assert codes(short) == ["short_path"]
    fixed = robust_accuracy(network, short.content["findings"][0]["remedies"][0]["attack"], x, y, ball)
    assert codes(fixed) == []
    assert fixed.robust_accuracy(1 / 255) < short.robust_accuracy(1 / 255)
