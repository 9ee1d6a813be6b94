"""Which attacks get a certificate: those that find what is planted, as deep as others do."""

import pytest
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.evaluate.certificate import certificate_of
from tests.evaluations.binarization.test_depth import pgd
from tests.evaluations.subjects import Rounding

LINF = ThreatModel(norm="linf", epsilon=0.1)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits").take(range(64))


def test_one_that_works_on_this_model_gets_it(digits):
    result = robust_ext.evaluate(digits_network(), *digits, LINF, budget="quick", claim=10)
    certificate = result.content["certificate"]
    assert (result.verdict, certificate["certified"]) == ("passed", True)
    assert certificate["found"] == certificate["planted"] == 64
    assert certificate["depth"] >= 2
    assert certificate["attack"] in [one["name"] for one in result.content["steps"]]
    assert "certified: it finds 64 of 64" in result.headline
    assert "is lower than what these attacks leave" in result.claim
    assert "does not prove that no stronger attack exists" in result.to_html()


def test_none_that_sees_no_gradient_gets_it(digits):
    """Square breaks samples of the rounded network, and leaves the number uncertified: it is not the attack tested."""
    # As a part of a model: of one that is a test-time defense, the gradients are not taken as they are.
    model = nn.Sequential(Rounding(digits_network(), steps=1)).eval()
    result = robust_ext.evaluate(model, *digits, LINF, budget="quick", search=False, claim=60)
    certificate = result.content["certificate"]
    assert (result.verdict, certificate["certified"]) == ("failed", False)
    assert certificate["found"] < 32
    assert result.content["claim"]["outcome"] != "consistent"
    page = result.to_html()
    assert "no attack is certified" in page
    assert "the true robust accuracy may be far lower" in page
    assert 'class="certified' not in page


@pytest.mark.exhaustive
def test_one_that_falls_behind_gets_none(digits):
    """One step finds all that is planted at depth 1, and less than APGD does farther out."""
    model, attacks = digits_network(), {"one": pgd(1, 1.0), "twenty": pgd(20, 0.125)}
    certified = {}
    for name, attack in attacks.items():
        attack = robust_ext.as_attack(attack, name=name)
        result = robust_ext.binarization_test(model, attack, digits[0], ThreatModel(norm="l2", epsilon=1.0), seed=0)
        assert result.verdict == "passed"
        certificate = certificate_of(attack, result.content)
        certified[name] = certificate["certified"]
        assert certificate["words"].startswith("certified" if certified[name] else "not certified")
    assert certified == {"one": False, "twenty": True}
