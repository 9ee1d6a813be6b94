"""Samples that come as batches: the results of the concatenated arrays, without holding the batches."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from robust_ext import InvalidArgumentError, binarization_test, evaluate, robust_accuracy
from robust_ext.engine.inputs import read_samples
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK
from tests.evaluations.test_arrays import timeless

SPLIT = [*zip(INPUTS.split(3), LABELS.split(3), strict=True)]
ONE_HOT = nn.functional.one_hot(LABELS, 3)
WAYS = {
    "a DataLoader": lambda: DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4),
    "a list of pairs": lambda: SPLIT,
    "an iterator": lambda: iter(SPLIT),
    "arrays": lambda: ((x.numpy().astype(np.float64), y.numpy()) for x, y in SPLIT),
    "one-hot labels": lambda: [*zip(INPUTS.split(3), ONE_HOT.split(3), strict=True)],
}


class Noisy(nn.Module):
    def forward(self, x):
        return NETWORK(x) + 0.1 * torch.randn(len(x), 3)


def accuracy(*samples):
    attacks = ["robust_ext:APGD(steps=3)", "robust_ext:Square(queries=5)"]
    result = robust_accuracy(NETWORK, attacks, *samples, LINF, batch_size=4, keep_candidates=True)
    return timeless(result.content), result.records, result.candidates.tolist()


def planted(inputs, labels):
    settings = {"inner_points": 30, "random_inner": 10, "random_corners": 10, "depths": (1,)}
    result = binarization_test(NETWORK, "robust_ext:APGD(steps=3)", inputs, LINF, labels=labels, **settings)
    return timeless(result.content), result.records


def whole(*samples, model=NETWORK):
    return timeless(evaluate(model, *samples, LINF, budget="quick", planted=0, judge_seed=0).content)


@pytest.mark.parametrize("way", WAYS)
def test_batches_give_the_robust_accuracy_of_the_concatenated_arrays(way):
    assert accuracy(WAYS[way](), None) == accuracy(INPUTS, LABELS)


@pytest.mark.parametrize("evaluation", [planted, whole])
def test_other_evaluations_read_an_iterator_too(evaluation):
    assert evaluation(iter(SPLIT), None) == evaluation(INPUTS, LABELS)


@pytest.mark.exhaustive
def test_a_random_model_is_evaluated_on_an_iterator_that_is_read_once():
    model = Noisy().eval()
    read, held = whole(iter(SPLIT[:1]), None, model=model), whole(*SPLIT[0], model=model)
    assert [read[key] for key in ("samples", "worst_case")] == [held[key] for key in ("samples", "worst_case")]


def test_batches_are_let_go_before_the_next_ones_are_read():
    alive = []

    def batches():
        for number in range(5):
            batch = torch.rand(4, 1, 4, 4), torch.full((4,), number)
            alive.append(weakref.ref(batch[0]))
            yield batch
            del batch
            # The loop of the reader may still have the last one.
            assert all(one() is None for one in alive[:-1])

    samples = read_samples(batches(), None, LINF)
    assert samples.inputs.shape == (20, 1, 4, 4)
    assert samples.labels.tolist() == [number for number in range(5) for _ in range(4)]


def spent():
    used = iter(SPLIT)
    list(used)
    return used


@pytest.mark.parametrize(
    ("inputs", "labels", "argument", "step"),
    [
        (SPLIT, LABELS, "labels", "None"),
        (spent(), None, "inputs", "a list or DataLoader"),
        (TensorDataset(INPUTS, LABELS), None, "inputs", r"DataLoader\(data"),
        ((INPUTS, LABELS), None, "inputs", r"batches \(inputs, labels\)"),
        ([*INPUTS.split(3)], None, "inputs", r"batches \(inputs, labels\)"),
        ([{"x": INPUTS, "y": LABELS}], None, "inputs", r"batches \(inputs, labels\)"),
        ([(INPUTS, LABELS[:-1])], None, "inputs", r"batches \(inputs, labels\)"),
        ([SPLIT[0], (INPUTS[..., 1:], LABELS)], None, "inputs", "those of the batches before"),
        ([SPLIT[0], (INPUTS, ONE_HOT)], None, "inputs", "those of the batches before"),
        ([(2 * INPUTS, LABELS)], None, "inputs", "bounds"),
    ],
)
def test_what_is_no_batch_is_refused(inputs, labels, argument, step):
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: .*{step}"):
        robust_accuracy(NETWORK, "robust_ext:APGD(steps=1)", inputs, labels, LINF)
