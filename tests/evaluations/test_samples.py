"""Samples in any form, batches, and models that return more than logits or anything else."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import robust_ext
from robust_ext import (
    ModelError,
    RobustExtError,
    RobustExtWarning,
    ThreatModel,
    binarization_test,
    evaluate,
    robust_accuracy,
)
from robust_ext.engine.inputs import prepare_inputs
from robust_ext.models.outputs import LogitsOf, TwoClass
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


def whole(*samples):
    return timeless(evaluate(NETWORK, *samples, LINF, budget="quick", planted=0, judge_seed=0).content)


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


# Outputs that are anything but logits: taken by agreement with the labels, or refused by the name of their task.
X = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
NEAR = ThreatModel(norm="linf", epsilon=0.05)
ATTACK = "robust_ext:APGD(steps=20)"


def network():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    with torch.no_grad():
        made[3].bias -= made(X).mean(0)
        made[3].weight *= 10
        made[3].bias *= 10
    return made


Y = network()(X).argmax(1)
BINARY = (Y == 1).long()


class Returns(nn.Module):
    """A network whose features and logits go through a function."""

    def __init__(self, function):
        super().__init__()
        self.network, self.function = network(), function
        self.eval()

    def forward(self, x):
        features = self.network[:3](x)
        return self.function(self.network[3](features), features)


def margin(z):
    """The logit of class 1 against the others."""
    return z[:, 1] - z[:, [0, 2]].amax(1)


def prepared(model, labels=Y):
    return prepare_inputs(model, X, labels, threat_model=NEAR, sample_ids=None, batch_size=16)


def flawed(z):
    """Logits of a weaker head, right on about every second sample."""
    return torch.where((torch.arange(len(z)) % 2 == 0)[:, None], z, z.roll(1, 1))


AGREE, TWO_CLASSES = "which the labels agree with", "TwoClass"
TAKEN = {
    "features first": (lambda z, f: (f, z), Y, AGREE),
    "in a dict": (lambda z, f: {"embedding": f, "scores": z}, Y, AGREE),
    "an early exit": (lambda z, f: [flawed(z), z], Y, AGREE),
    "beside an uncertainty": (lambda z, f: (z.std(1, keepdim=True), z, f), Y, AGREE),
    "one sigmoid in a tuple": (lambda z, f: (f, margin(z).sigmoid()), BINARY, AGREE),
    "a sigmoid": (lambda z, f: margin(z).sigmoid(), BINARY, TWO_CLASSES),
    "half precision": (lambda z, f: margin(z).half().sigmoid(), BINARY, TWO_CLASSES),
    "named": (lambda z, f: SimpleNamespace(logits=margin(z)[:, None]), BINARY, TWO_CLASSES),
    "a logit": (lambda z, f: margin(z), BINARY, TWO_CLASSES),
}


@pytest.mark.parametrize("name", TAKEN)
def test_of_several_outputs_the_one_that_the_labels_agree_with_is_taken_and_one_means_two_classes(name):
    function, labels, words = TAKEN[name]
    with pytest.warns(RobustExtWarning, match=words):
        given = prepared(Returns(function), labels)
    assert given.correct.mean() == 1
    assert bool(given.logits.isfinite().all())
    assert words == TWO_CLASSES or any(isinstance(part, LogitsOf) for part in given.module.modules())
    if name == "a sigmoid":
        expected = torch.stack([-margin(network()(X)), margin(network()(X))], 1).sigmoid().log()
        torch.testing.assert_close(given.logits, expected.detach(), rtol=1e-3, atol=1e-4)


def test_a_sigmoid_that_rounds_to_0_or_1_has_finite_logits_and_gradients():
    z = torch.tensor([[-200.0], [-80.0], [0.0], [16.0], [200.0]], requires_grad=True)
    logits = TwoClass(nn.Sequential(nn.Sigmoid()), probability=True)(z)
    (gradient,) = torch.autograd.grad((logits[:, 1] - logits[:, 0]).sum(), z)
    assert bool(logits.isfinite().all() & gradient.isfinite().all())
    torch.testing.assert_close(gradient[1:4], torch.ones(3, 1), rtol=0.2, atol=0)
    assert logits.argmax(1)[[0, 1, 3, 4]].tolist() == [0, 0, 1, 1]


REFUSED = {
    "heads alike": (lambda z, f: (z, z * 2), Y, r"LogitsOf\(model, 0\) or"),
    "sigmoid for each class": (lambda z, f: z.sigmoid(), Y, "multi-label"),
    "softmax": (lambda z, f: z.softmax(1), Y, "probabilities"),
    "counts": (lambda z, f: z[:, :1], Y * 7, "regression"),
    "soft labels": (lambda z, f: z, network()(X).softmax(1).detach(), r"labels.argmax\(1\)"),
    "segmentation": (lambda z, f: z[:, :, None, None].expand(-1, -1, 8, 8), Y, "segmentation"),
    "a map of labels": (lambda z, f: z, torch.zeros(40, 8, 8, dtype=torch.int64), "segmentation"),
    "an image": (lambda z, f: f[:, :16].view(-1, 1, 4, 4), Y, "autoencoder"),
    "language": (lambda z, f: SimpleNamespace(logits=z[:, None].expand(-1, 7, -1)), Y, "language model"),
    "detection": (lambda z, f: [{"boxes": f[:, :4], "scores": f[:, 0], "labels": Y} for _ in z], Y, "detection"),
    "embeddings": (lambda z, f: SimpleNamespace(last_hidden_state=f[:, None], pooler_output=f), Y, "embeddings"),
    "predicted classes": (lambda z, f: z.argmax(1), Y, "argmax"),
    "a loss": (lambda z, f: z.sum(), Y, "loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tasks_are_refused_by_name_by_the_diagnosis_too(name):
    function, labels, words = REFUSED[name]
    with pytest.raises(RobustExtError, match=words):
        prepared(Returns(function), labels)
    if name != "softmax":  # A finding of its own
        with pytest.raises(RobustExtError, match=words):
            robust_ext.diagnose(Returns(function), ATTACK, X, labels, NEAR)


def test_without_labels_several_candidates_are_refused_and_named_and_with_them_tested():
    model = Returns(TAKEN["features first"][0])
    with pytest.raises(ModelError, match="LogitsOf"):
        robust_ext.binarization_test(model, ATTACK, X, NEAR)
    with pytest.warns(RobustExtWarning, match=AGREE):
        result = robust_ext.binarization_test(model, ATTACK, X[:16], NEAR, labels=Y[:16], inner_points=50)
    named = robust_ext.binarization_test(LogitsOf(model, 1), ATTACK, X[:16], NEAR, inner_points=50)
    assert (result.verdict, result.score) == (named.verdict, named.score)
