"""A whole evaluation: where it stops, what is resumed, and where its attacks run."""

import pytest

import robust_ext
from tests.evaluations import small
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


@pytest.mark.parametrize("after", [2, 9, 11, 18])
def test_what_was_stopped_goes_on_to_the_same_result(after, tmp_path):
    whole = evaluate(out=tmp_path / "whole")
    with pytest.raises(Stopped):
        evaluate(out=tmp_path / "stopped", callbacks=[Stop(after)])
    assert not (tmp_path / "stopped" / "result.json").exists()
    resumed = evaluate(out=tmp_path / "stopped")
    assert small.essence(resumed) == small.essence(whole)
    assert records_of(tmp_path / "stopped") == records_of(tmp_path / "whole")
    assert robust_ext.load_result(tmp_path / "stopped") == whole == evaluate()


def test_a_claim_may_change_in_the_same_folder(tmp_path):
    evaluate(out=tmp_path)
    other = evaluate(out=tmp_path, claim=1)
    assert other.content["claim"] == {"claimed": 1.0, "outcome": other.content["claim"]["outcome"]}
    assert robust_ext.load_result(tmp_path).content["claim"]["claimed"] == 1.0


@pytest.mark.slow
def test_attacks_in_their_own_process_find_the_same():
    here, there = evaluate(), evaluate(isolate=True)
    assert there.content["isolated"]
    for key in ("worst_case", "found_by", "curve", "verdict", "claim", "recipe"):
        assert here.content[key] == there.content[key]


def test_wrong_labels_stop_it_with_the_reason(tmp_path):
    inputs, labels = small.INPUTS.repeat(3, 1, 1, 1), small.LABELS.repeat(3)
    result = robust_ext.evaluate(small.NETWORK, inputs, (labels + 1) % 3, small.LINF, out=tmp_path, **GIVEN)
    assert (result.verdict, result.robust_accuracy, result.content["steps"]) == ("inconclusive", None, [])
    assert result.claim == ""
    assert "labels" in result.content["stopped"]
    assert "No attack was run" in str(result)
    assert "(labels + 2) % 3" in str(result)
    assert "No attack was run" in result.to_html()
    assert "To publish" not in result.to_html()
    assert not (tmp_path / "attacks").exists()
    assert robust_ext.load_result(tmp_path) == result
    accepted = robust_ext.evaluate(
        small.NETWORK, inputs, (labels + 1) % 3, small.LINF, out=tmp_path, **GIVEN, accept_setup=True
    )
    assert accepted.robust_accuracy == 0.0
    assert [one["code"] for one in accepted.content["findings"]][:1] == ["label_offset"]


def test_one_sample_proves_little_and_none_is_refused():
    one = evaluate(samples=1)
    low, high = one.content["worst_case"]["interval"]
    assert (one.content["samples"], one.verdict) == (1, "inconclusive")
    assert high - low > 0.9
    assert "n = 1" in one.claim
    with pytest.raises(robust_ext.InvalidArgumentError, match="at least one sample"):
        evaluate(samples=0)


def test_nothing_is_said_twice_on_the_terminal():
    """Paragraphs of its text, put back on one line, share no sentence."""
    for result in (evaluate(), evaluate(claim=None), evaluate(planted=0)):
        sentences = [one.strip() for part in str(result).split("\n\n") for one in " ".join(part.split()).split(". ")]
        assert len(set(sentences)) == len(sentences)
        assert len(str(result).splitlines()) < 50
