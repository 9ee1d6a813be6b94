"""Functions of numpy arrays as models: what they return, what is refused, and evaluations of them."""

import numpy as np
import pytest
import torch

from robust_ext import (
    AttackRefusedError,
    ModelError,
    SplitError,
    ThreatModel,
    binarization_test,
    black_box,
    evaluate,
    robust_accuracy,
)
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

LINF = ThreatModel(norm="linf", epsilon=0.1)
NETWORK = digits_network()


def logits(x):
    with torch.no_grad():
        return NETWORK(torch.from_numpy(x)).numpy()


def probabilities(x):
    return torch.from_numpy(logits(x)).softmax(1).numpy()


def labels(x):
    return logits(x).argmax(1)


@pytest.fixture
def digits():
    return load_dataset("digits").take(range(48))


def test_logits_are_those_of_the_function(digits):
    x, _ = digits
    expected = NETWORK(x)
    assert torch.equal(black_box(logits, returns="logits")(x), expected)
    torch.testing.assert_close(
        black_box(probabilities, returns="probabilities")(x), expected.log_softmax(1), rtol=1e-4, atol=1e-3
    )
    floored = black_box(probabilities, returns="probabilities", floor=1e-3)(x)
    assert float(floored.min()) == pytest.approx(np.log(1e-3))
    assert torch.equal(floored.argmax(1), expected.argmax(1))
    for given in (labels, lambda x: np.eye(10)[labels(x)]):
        assert torch.equal(black_box(given, returns="labels", classes=10)(x), 2 * torch.eye(10)[expected.argmax(1)] - 1)
    assert not black_box(logits, returns="logits")(x.clone().requires_grad_()).requires_grad


def test_one_score_is_of_two_classes():
    x = torch.tensor([[0.25], [0.75]])
    z = black_box(lambda x: x[:, 0] - 0.5, returns="logits")(x)
    assert torch.equal(z, torch.tensor([[0.0, -0.25], [0.0, 0.25]]))
    p = black_box(lambda x: x, returns="probabilities")(x)
    torch.testing.assert_close(p.exp(), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))


WRONG = {
    "scores as probabilities": (lambda x: 3 * x, {"returns": "probabilities"}, "expected probabilities"),
    "labels as scores": (lambda x: x[:, 0].astype(int), {"returns": "logits"}, "state returns='labels'"),
    "one row": (lambda x: x[:1], {"returns": "logits"}, r"float32 of shape \(1, 3\) for 4 inputs"),
    "labels too high": (lambda x: np.full(len(x), 3), {"returns": "labels", "classes": 3}, "whole numbers from 0 to 2"),
    "raises": (lambda x: 1 / 0, {"returns": "logits"}, "raised ZeroDivisionError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_outputs_that_are_not_what_was_stated_are_refused(name):
    predict, settings, text = WRONG[name]
    with pytest.raises(ModelError, match=text):
        black_box(predict, **settings)(torch.rand(4, 3))


def test_a_function_that_changes_its_input_changes_a_copy(digits):
    def emptied(x):
        found = logits(x)
        x[:] = 0
        return found

    x, y = digits
    assert robust_accuracy(
        black_box(emptied, returns="logits"), "robust_ext:RandomSearch(points=5)", x[:4], y[:4], LINF
    )


def test_attacks_without_gradients_do_as_on_the_network(digits):
    """Robust accuracy by labels and by scores, and the planted problems at the scores."""
    x, y = digits
    attacks = {"scores": "robust_ext:Square(queries=60)", "labels": "robust_ext:RayS(queries=100)"}
    model = black_box(logits, returns="logits")
    rows = [
        [
            one["robust_accuracy"][0]["robust"]
            for one in robust_accuracy(each, dict(attacks), x, y, LINF).content["attacks"]
        ]
        for each in (model, NETWORK)
    ]
    assert rows[0] == rows[1]
    by_labels = robust_accuracy(black_box(labels, returns="labels", classes=10), attacks["labels"], x, y, LINF)
    assert by_labels.content["attacks"][0]["robust_accuracy"][0]["robust"] == rows[0][1]


def test_a_crippled_attack_is_told_from_a_good_one(digits):
    x, _ = digits
    model = black_box(logits, returns="logits")
    found = [
        binarization_test(model, f"robust_ext:Square(queries={queries})", x, LINF, inner_points=199)
        for queries in (1000, 3)
    ]
    assert [one.verdict for one in found] == ["passed", "failed"]
    assert any("planted in its 10 scores" in one for one in found[0].content["warnings"])
    # That there is no gradient to be followed is known.
    assert not {one["code"] for one in found[1].content["findings"]} & {"cut_gradient", "zero_gradient"}


def test_gradients_are_refused_with_what_to_use_instead(digits):
    x, y = digits
    model = black_box(logits, returns="logits")
    for run in (
        lambda: binarization_test(model, "robust_ext:APGD", x, LINF),
        lambda: robust_accuracy(model, "robust_ext:APGD", x, y, LINF),
    ):
        with pytest.raises(
            AttackRefusedError, match=r"APGD needs gradients.*use an attack by scores.*robust_ext:Square"
        ):
            run()
    assert robust_accuracy(model, lambda model, x, y: x, x[:4], y[:4], LINF)


def test_nothing_is_planted_in_labels(digits):
    model = black_box(labels, returns="labels", classes=10)
    with pytest.raises(SplitError, match="returns labels alone, in which nothing can be planted"):
        binarization_test(model, "robust_ext:RayS", digits[0], LINF)


@pytest.mark.parametrize("returns", ["logits", pytest.param("labels", marks=pytest.mark.exhaustive)])
def test_a_whole_evaluation_takes_what_can_run(returns, digits):
    x, y = digits
    model = black_box({"logits": logits, "labels": labels}[returns], returns=returns, classes=10)
    result = evaluate(model, x, y, LINF, budget="quick")
    steps = [one["name"] for one in result.content["steps"]]
    assert steps == ["Square", "RayS"]
    assert result.robust_accuracy < result.content["clean_accuracy"]
    certificate = result.content["certificate"]
    assert certificate["attack"] in steps
    assert ("labels alone" in certificate["words"]) == (returns == "labels")
    assert certificate["certified"] == (returns == "logits")
    assert "attack search" in {one["name"] for one in result.content["not_tried"]}
