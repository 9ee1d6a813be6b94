"""Samples in any form: numpy arrays, one-hot labels, a device, batches; and a model that returns more than logits."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import robust_ext
from robust_ext import InvalidArgumentError, binarization_test, evaluate, robust_accuracy
from robust_ext.engine.inputs import read_samples
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, call, timeless
from tests.evaluations.subjects import rounded, spread

SPLIT = [*zip(INPUTS.split(3), LABELS.split(3), strict=True)]
ONE_HOT = nn.functional.one_hot(LABELS, 3)


class Output(nn.Module):
    """A classifier that returns its logits in a dict, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = NETWORK[:3], NETWORK[3]
        self.eval()

    def forward(self, x):
        features = self.body(x)
        return {"logits": self.head(features), "hidden_states": features}


CASES = {
    "binarization": {"depths": (1,), "layer": "head"},
    "binarization with a detector": {"detector": spread, "detector_data": INPUTS, "detector_fpr": 0.2},
    "robust_accuracy": {},
    "mead": {"detector_data": INPUTS, "detector_fpr": 0.2},
    "test_time": {"defense": rounded},
    "diagnosis": {"inner_points": 30, "planted": 4, "judge_seed": 0},
}


@pytest.mark.parametrize("name", CASES)
def test_numpy_arrays_on_a_device_give_the_run_of_tensors_for_a_model_with_an_hf_output(name):
    def outcome(x, y, **given):
        """What a result holds, without times."""
        result = call(name.split()[0], Output(), "robust_ext:APGD(steps=3)", x, y, LINF, **CASES[name], **given)
        keys = ("verdict", "static", "defended", "robust_accuracy", "detectors", "likely", "samples")
        inside = result.content.get("tests", {"": result.content}).values()
        return [one["settings"]["inputs"] for one in inside], timeless([result.content.get(key) for key in keys])

    assert outcome(INPUTS.numpy().astype(np.float64), ONE_HOT.numpy(), device="cpu") == outcome(INPUTS, LABELS)
    planted = robust_ext.plant(Output(), INPUTS.numpy(), LINF, inner_points=30, device="cpu")
    assert planted.score(planted.planted[:, 0].numpy()) == 1


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


@pytest.mark.parametrize(
    ("evaluation", "batches"),
    [
        (accuracy, lambda: DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)),
        (accuracy, lambda: SPLIT),
        (accuracy, lambda: ((x.numpy().astype(np.float64), y.numpy()) for x, y in SPLIT)),
        (accuracy, lambda: [*zip(INPUTS.split(3), ONE_HOT.split(3), strict=True)]),
        (planted, lambda: iter(SPLIT)),
        (whole, lambda: iter(SPLIT)),
    ],
)
def test_batches_give_the_results_of_the_concatenated_arrays(evaluation, batches):
    assert evaluation(batches(), None) == evaluation(INPUTS, LABELS)


class Noisy(nn.Module):
    def forward(self, x):
        return NETWORK(x) + 0.1 * torch.randn(len(x), 3)


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
    ("inputs", "labels", "words"),
    [
        (SPLIT, LABELS, "labels: .*None"),
        (spent(), None, "inputs: .*a list or DataLoader"),
        (TensorDataset(INPUTS, LABELS), None, r"inputs: .*DataLoader\(data"),
        ([*INPUTS.split(3)], None, r"inputs: .*batches \(inputs, labels\)"),
        ([(INPUTS, LABELS[:-1])], None, r"inputs: .*batches \(inputs, labels\)"),
        ([SPLIT[0], (INPUTS, ONE_HOT)], None, "inputs: .*those of the batches before"),
        ([(2 * INPUTS, LABELS)], None, "inputs: .*bounds"),
    ],
)
def test_what_is_no_batch_is_refused(inputs, labels, words):
    with pytest.raises(InvalidArgumentError, match=f"^{words}"):
        robust_accuracy(NETWORK, "robust_ext:APGD(steps=1)", inputs, labels, LINF)
