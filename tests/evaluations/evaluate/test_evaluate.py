"""A whole evaluation: where it stops, what is resumed, where its attacks run, and which attacks are certified."""

import pytest
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.evaluate.certificate import certificate_of
from tests.evaluations import small
from tests.evaluations.binarization.test_depth import pgd
from tests.evaluations.diagnosis.models import Apply
from tests.run_folders import records_of

GIVEN = {"budget": "quick", "planted": 8, "batch_size": 4, "claim": 60, "judge_seed": 1}


def evaluate(*, samples=10, labels=small.LABELS, **given):
    return robust_ext.evaluate(
        small.NETWORK, small.INPUTS[:samples], labels[:samples], small.LINF, **{**GIVEN, **given}
    )


class Stopped(BaseException):
    """As a key press stops it."""


class Stop(robust_ext.Callback):
    """Stops after so many records."""

    def __init__(self, after):
        self.left = after

    def on_record(self, record):
        self.left -= 1
        if not self.left:
            raise Stopped


@pytest.mark.parametrize("after", [2, 11, 18])
def test_what_was_stopped_goes_on_to_the_same_result(after, tmp_path):
    whole = evaluate(out=tmp_path / "whole")
    with pytest.raises(Stopped):
        evaluate(out=tmp_path / "stopped", callbacks=[Stop(after)])
    assert not (tmp_path / "stopped" / "result.json").exists()
    resumed = evaluate(out=tmp_path / "stopped")
    assert small.essence(resumed) == small.essence(whole)
    assert records_of(tmp_path / "stopped") == records_of(tmp_path / "whole")
    assert robust_ext.load_result(tmp_path / "stopped") == whole == evaluate()


@pytest.mark.slow
def test_attacks_in_their_own_process_find_the_same():
    here, there = (evaluate(planted=0, isolate=isolate) for isolate in (False, True))
    assert there.content["isolated"]
    for key in ("worst_case", "found_by", "curve", "claim"):
        assert here.content[key] == there.content[key]


def test_wrong_labels_stop_it_with_the_reason(tmp_path):
    inputs, labels = small.INPUTS.repeat(3, 1, 1, 1), small.LABELS.repeat(3)
    result = robust_ext.evaluate(small.NETWORK, inputs, (labels + 1) % 3, small.LINF, out=tmp_path, **GIVEN)
    assert (result.verdict, result.robust_accuracy, result.content["steps"]) == ("inconclusive", None, [])
    assert result.claim == ""
    assert "labels" in result.content["stopped"]
    assert not (tmp_path / "attacks").exists()
    assert robust_ext.load_result(tmp_path) == result
    accepted = robust_ext.evaluate(
        small.NETWORK, inputs, (labels + 1) % 3, small.LINF, out=tmp_path, **GIVEN, accept_setup=True
    )
    assert accepted.robust_accuracy == 0.0
    assert [one["code"] for one in accepted.content["findings"]][:1] == ["label_offset"]


def test_one_sample_proves_little():
    one = evaluate(samples=1)
    low, high = one.content["worst_case"]["interval"]
    assert (one.content["samples"], one.verdict) == (1, "inconclusive")
    assert high - low > 0.9


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


def test_none_that_sees_no_gradient_gets_it(digits):
    """Square breaks samples of the rounded network, and leaves the number uncertified: it is not the attack tested."""
    model = nn.Sequential(Apply(lambda x: ((x + 0.02 * (0.5 - x)) * 31).round() / 31), digits_network()).eval()
    result = robust_ext.evaluate(model, *digits, LINF, budget="quick", search=False, claim=60)
    certificate = result.content["certificate"]
    assert (result.verdict, certificate["certified"]) == ("failed", False)
    assert certificate["found"] < 32
    assert result.content["claim"]["outcome"] != "consistent"
    assert 'class="certified' not in result.to_html()


@pytest.mark.exhaustive
def test_one_that_falls_behind_gets_none(digits):
    """One step finds all that is planted at depth 1, and less than APGD does farther out."""
    model, attacks = digits_network(), {"one": pgd(1, 1.0), "twenty": pgd(20, 0.125)}
    certified = {}
    for name, attack in attacks.items():
        attack = robust_ext.as_attack(attack, name=name)
        result = robust_ext.binarization_test(model, attack, digits[0], ThreatModel(norm="l2", epsilon=1.0), seed=0)
        assert result.verdict == "passed"
        certified[name] = certificate_of(attack, result.content)["certified"]
    assert certified == {"one": False, "twenty": True}
