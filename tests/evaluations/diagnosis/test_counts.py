"""What a finding counts is said: labelled samples, or these and the problems planted in some of them."""

import pytest
import torch

from robust_ext import ThreatModel, binarization_test, diagnose, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

LINF = ThreatModel(norm="linf", epsilon=0.1)
X, Y = load_dataset("digits").take(range(12))
EVALUATIONS = {
    "diagnosis": lambda attack: diagnose(digits_network(), attack, X, Y, LINF, inner_points=50),
    "planted alone": lambda attack: binarization_test(digits_network(), attack, X, LINF, inner_points=50),
    "samples alone": lambda attack: robust_accuracy(digits_network(), attack, X, Y, LINF),
}
ATTACKS = {
    "leaves the ball": lambda model, x, y: (x + 0.3 * torch.rand_like(x)).clamp(0, 1),
    "returns the input": lambda model, x, y: x,
    "other bounds": lambda model, x, y: x - 0.1,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_no_more_samples_are_counted_than_were_given(attack, evaluation):
    result = EVALUATIONS[evaluation](ATTACKS[attack])
    counted = [one for one in result.findings if one.of is not None]
    assert counted
    for one in counted:
        assert one.of <= len(X) or one.unit == "samples and planted problems", one
        text = " ".join(str(result).split())
        assert f"{one.of} samples" not in text.replace("samples and planted", "") or one.of <= len(X)
    if evaluation != "diagnosis":
        assert {one.unit for one in counted} == {"samples"}
