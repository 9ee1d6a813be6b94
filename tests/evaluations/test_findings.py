"""Findings in the four evaluations: what is wrong, the layer, what to do; nothing where nothing is."""

import re
from collections import OrderedDict
from dataclasses import replace
from unittest.mock import Mock

import pytest
from torch import nn

from robust_ext import binarization_test, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes import attaching
from robust_ext.reports import report_text
from tests.evaluations.diagnosis.zoo import published
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.small import LINF, call
from tests.evaluations.subjects import Unsure

FAST = {"inner_points": 100, "random_inner": 20, "random_corners": 20, "canaries": 2, "witness_queries": 8}
SHORT = "foolbox:LinfPGD(steps=20, random_start=False)"
HEALTHY = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"
X, Y = load_dataset("digits").take(range(12))
OWN = {"binarization": FAST, "robust_accuracy": {}, "mead": {}, "test_time": {"draws": 2, "repeats": 1}}
every_kind = pytest.mark.parametrize("kind", OWN)


def behind_rounding(network):
    return nn.Sequential(OrderedDict(quantise=Rounding(), network=network)).eval()


@every_kind
def test_a_rounding_layer_is_named_in_every_result_with_a_remedy(kind, tmp_path):
    """The same from records that are there already, and on the page."""
    given = kind, behind_rounding(digits_network()), HEALTHY, X, Y
    result = call(*given, out=tmp_path, **OWN[kind])
    first = result.content["findings"][0]
    assert (first["code"], first["weight"]) == ("zero_gradient", "high")
    assert first["layer"].endswith("quantise")
    paste = first["remedies"][0]["paste"]
    assert "bpda" in paste or "straight_through" in paste
    assert all(line in report_text(result.content) for line in paste.splitlines())
    assert call(*given, out=tmp_path, **OWN[kind]).content["findings"] == result.content["findings"]
    assert "AdaptedAttack" in " ".join((tmp_path / "report.html").read_text().split())


@every_kind
def test_a_healthy_attack_has_no_findings_and_no_probe(kind, monkeypatch):
    monkeypatch.setattr(attaching, "probe_model", Mock(side_effect=AssertionError))
    content = call(kind, digits_network(), HEALTHY, X, Y, **OWN[kind]).content
    assert content["findings"] == []
    without = {key: value for key, value in content.items() if key != "findings"}
    assert report_text(without) == report_text(content), "results of earlier versions have no findings"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("attack", "exposure"),
    [(HEALTHY, "reject"), *(("robust_ext:Square(queries=500)", exposure) for exposure in ("reject", "classifier"))],
)
def test_an_untargeted_attack_is_shown_the_detector_in_the_margin(attack, exposure):
    """Not as a class, which it would take for a success."""
    settings = {**FAST, "detector": Unsure, "detector_data": load_dataset("digits").take(range(100, 200))[0]}
    given = digits_network(), attack, X, replace(LINF, epsilon=0.15)
    (entry,) = binarization_test(*given, **settings, exposure=exposure).content["attacks"]
    (proposed,) = set(re.findall(r'exposure="(\w+)"', entry["reason"]))
    (fixed,) = binarization_test(*given, **settings, exposure=proposed).content["attacks"]
    before, after = (sum(test["score"] for test in one["tests"].values()) for one in (entry, fixed))
    assert after > before


@pytest.mark.exhaustive
@pytest.mark.skipif(not published.available(), reason="needs the published network and CIFAR-10")
def test_the_cause_is_told_on_a_resnet():
    """Behind a rounding layer, in both evaluations, and with steps that do not reach the edge of the ball."""

    def codes(result):
        return [one["code"] for one in result.content["findings"] if one["weight"] != "low"]

    network, (x, y) = published.resnet(), published.cifar()
    rounded, few = behind_rounding(network), {"inner_points": 99, "random_inner": 20, "random_corners": 20}
    ball = replace(LINF, epsilon=8 / 255)
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
