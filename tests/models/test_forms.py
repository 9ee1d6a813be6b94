"""Models that are no plain modules: functions of numpy arrays; compiled, scripted and exported networks."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, as_module, binarization_test, black_box, evaluate, robust_accuracy
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import AttackRefusedError, ModelError, RobustExtWarning, SplitError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models.forms import Exported, Scripted
from robust_ext.models.wrapping import unwrapped

LINF = ThreatModel(norm="linf", epsilon=0.1)
NETWORK = digits_network()
DIGITS, TRUE = load_dataset("digits").take(range(48))
X = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(0))
APGD = "robust_ext:APGD(steps=5)"
# Torch's own, of its forms that are on their way out, and of what it calls itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning"),
]


def logits(x):
    with torch.no_grad():
        return NETWORK(torch.from_numpy(x)).numpy()


def probabilities(x):
    return torch.from_numpy(logits(x)).softmax(1).numpy()


def labels(x):
    return logits(x).argmax(1)


def emptied(x):
    found = logits(x)
    x[:] = 0
    return found


SCORES = black_box(logits, returns="logits")
BY_LABELS = black_box(labels, returns="labels", classes=10)


def test_logits_are_those_of_the_function():
    x = DIGITS.clone()
    expected = NETWORK(x)
    for function in (logits, emptied):
        assert torch.equal(black_box(function, returns="logits")(x), expected)
    assert torch.equal(x, DIGITS)
    found = black_box(probabilities, returns="probabilities")(x)
    torch.testing.assert_close(found, expected.log_softmax(1), rtol=1e-4, atol=1e-3)
    floored = black_box(probabilities, returns="probabilities", floor=1e-3)(x)
    assert float(floored.min()) == pytest.approx(np.log(1e-3))
    assert torch.equal(floored.argmax(1), expected.argmax(1))
    one_hot = black_box(lambda x: np.eye(10)[labels(x)], returns="labels", classes=10)
    for given in (BY_LABELS, one_hot):
        assert torch.equal(given(x), 2 * torch.eye(10)[expected.argmax(1)] - 1)
    assert not SCORES(x.requires_grad_()).requires_grad
    # One score is of two classes.
    x = torch.tensor([[0.25], [0.75]])
    p = black_box(lambda x: x, returns="probabilities")(x)
    torch.testing.assert_close(p.exp(), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))


def test_outputs_that_are_not_what_was_stated_are_refused():
    for predict, returns, words in (
        (lambda x: 3 * x, {"returns": "probabilities"}, "expected probabilities"),
        (lambda x: x[:, 0].astype(int), {"returns": "logits"}, "state returns='labels'"),
        (lambda x: np.full(len(x), 3), {"returns": "labels", "classes": 3}, "whole numbers from 0 to 2"),
        (lambda x: 1 / 0, {"returns": "logits"}, "raised ZeroDivisionError"),
    ):
        with pytest.raises(ModelError, match=words):
            black_box(predict, **returns)(torch.rand(4, 3))


def robust(model, attack, x, y, **options):
    return robust_accuracy(model, attack, x, y, LINF, **options).robust_accuracy(0.1)


def test_a_crippled_attack_is_told_from_a_good_one():
    attacks = [f"robust_ext:Square(queries={queries})" for queries in (500, 3)]
    found = [binarization_test(SCORES, attack, DIGITS, LINF, inner_points=199) for attack in attacks]
    assert [one.verdict for one in found] == ["passed", "failed"]
    assert any("planted in its 10 scores" in one for one in found[0].content["warnings"])
    # That there is no gradient to be followed is known.
    assert not {one["code"] for one in found[1].content["findings"]} & {"cut_gradient", "zero_gradient"}


def test_gradients_and_planting_in_labels_are_refused():
    words = r"APGD needs gradients.*use an attack by scores.*robust_ext:Square"
    with pytest.raises(AttackRefusedError, match=words):
        binarization_test(SCORES, "robust_ext:APGD", DIGITS, LINF)
    with pytest.raises(SplitError, match="returns labels alone, in which nothing can be planted"):
        binarization_test(BY_LABELS, "robust_ext:RayS", DIGITS, LINF)


@pytest.mark.parametrize("model", [SCORES, pytest.param(BY_LABELS, marks=pytest.mark.exhaustive)])
def test_a_whole_evaluation_takes_what_can_run(model):
    content = evaluate(model, DIGITS, TRUE, LINF, budget="quick").content
    assert [one["name"] for one in content["steps"]] == ["Square", "RayS"]
    certificate = content["certificate"]
    assert ("labels alone" in certificate["words"], certificate["certified"]) == (model is BY_LABELS, model is SCORES)
    assert "attack search" in {one["name"] for one in content["not_tried"]}


@pytest.fixture
def network():
    torch.manual_seed(0)
    head = nn.Linear(32, 5)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), head).eval()


def exported(network, rows=None):
    shapes = ({0: torch.export.Dim.AUTO},) if rows is None else None
    return torch.export.export(network, (X[: rows or 2],), dynamic_shapes=shapes)


def test_torch_compile_is_undone_and_changes_no_result(network, tmp_path):
    settings = {"inner_points": 40, "seed": 0, "depths": (1,)}
    with pytest.warns(RobustExtWarning, match="its originals are evaluated"):
        first = binarization_test(torch.compile(network), APGD, X, LINF, out=tmp_path / "made", **settings).content
    second = binarization_test(network, APGD, X, LINF, out=tmp_path / "plain", **settings).content
    assert [one["score"] for one in first["attacks"]] == [one["score"] for one in second["attacks"]]
    assert first["settings"]["model"] == second["settings"]["model"]
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


FORMS = {
    "jit trace": lambda network: torch.jit.trace(network, X[:2]),
    "jit script": torch.jit.script,
    "export program": exported,
    "export module": lambda network: exported(network).module(),
    "export inside": lambda network: as_module(nn.Sequential(nn.Identity(), exported(network).module())).module.eval(),
}


@pytest.mark.parametrize("form", FORMS)
def test_jit_and_export_are_measured_like_the_network(form, network):
    y = network(X).argmax(1)
    assert robust(FORMS[form](network), APGD, X, y) == robust(network, APGD, X, y)
    module = as_module(FORMS[form](network)).module
    assert isinstance(module if "inside" not in form else module[1], (Scripted, Exported))
    module.train()
    module.eval()
    torch.testing.assert_close(check_classifier(copy.deepcopy(module), X), network(X).detach())


def test_train_mode_and_one_batch_size_are_refused(network):
    with pytest.raises(ModelError, match=r"exported in train mode \(aten.batch_norm.default, aten.dropout.default\)"):
        as_module(exported(network.train(), rows=4))
    with pytest.raises(ModelError, match=r"batches of one size; give torch.export.export dynamic_shapes"):
        robust(exported(network.eval(), rows=4), "robust_ext:APGD()", X, torch.zeros(8).long())
    scripted = torch.jit.script(network).train()
    with pytest.raises(ModelError, match=r"is in train mode.*call model.eval\(\)"):
        check_classifier(as_module(scripted).module, X)
    assert len(check_classifier(as_module(scripted.eval()).module, X)) == len(X)
    assert unwrapped(as_module(scripted).module) is scripted


def test_jit_is_sent_to_the_process_of_an_attack_and_export_is_refused_there(network):
    y = network(X).argmax(1)
    assert robust(torch.jit.script(network), APGD, X, y, isolate=True) == robust(network, APGD, X, y)
    with pytest.raises(ModelError, match=r"Exported: cannot be sent to the attack's process .*isolate=False"):
        robust(exported(network), APGD, X, y, isolate=True)
