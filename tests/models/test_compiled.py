"""Compiled, scripted and exported networks are evaluated without being compiled, and in eval mode alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from robust_ext import ModelError, ThreatModel, as_module, binarization_test, robust_accuracy
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import RobustExtWarning
from robust_ext.models.forms import Exported, Scripted
from robust_ext.models.wrapping import unwrapped

LINF = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(0))


# Torch's own, of its forms that are on their way out, and of what it calls itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning"),
]


@pytest.fixture
def network():
    torch.manual_seed(0)
    head = nn.Linear(32, 5)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), head).eval()


def exported(network, rows=None):
    shapes = ({0: torch.export.Dim.AUTO},) if rows is None else None
    return torch.export.export(network, (X[: rows or 2],), dynamic_shapes=shapes)


def in_place(network):
    made = copy.deepcopy(network)
    made.compile()
    return made


def inside(network):
    return nn.Sequential(nn.Identity(), torch.compile(network)).eval()


@pytest.mark.parametrize(
    "make", [torch.compile, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (in_place, inside))]
)
def test_torch_compile_is_undone_and_changes_no_result(make, network, tmp_path):
    made = make(network)
    plain = nn.Sequential(nn.Identity(), network).eval() if make is inside else network
    settings = {"inner_points": 40, "seed": 0, "depths": (1,)}
    with pytest.warns(RobustExtWarning, match="its originals are evaluated"):
        first = binarization_test(made, "robust_ext:APGD(steps=5)", X, LINF, out=tmp_path / "made", **settings)
    second = binarization_test(plain, "robust_ext:APGD(steps=5)", X, LINF, out=tmp_path / "plain", **settings)
    results = [first.content, second.content]
    scores, models = ([find(one) for one in results] for find in (_scores, lambda one: one["settings"]["model"]))
    assert scores[0] == scores[1]
    assert models[0] == models[1]
    assert len(first.content["warnings"]) == 1
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


def _scores(content):
    return [entry["score"] for entry in content["attacks"]]


FORMS = {
    "jit trace": lambda network: torch.jit.trace(network, X[:2]),
    "jit script": torch.jit.script,
    "export program": exported,
    "export module": lambda network: exported(network).module(),
    "export inside": lambda network: as_module(nn.Sequential(nn.Identity(), exported(network).module())).module.eval(),
}


@pytest.mark.parametrize("form", FORMS)
def test_jit_and_export_are_measured_like_the_network(form, network):
    labels = network(X).argmax(1)
    found = [
        robust_accuracy(one, "robust_ext:APGD(steps=5)", X, labels, LINF).robust_accuracy(0.1)
        for one in (FORMS[form](network), network)
    ]
    assert found[0] == found[1]
    module = as_module(FORMS[form](network)).module
    assert isinstance(module if "inside" not in form else module[1], (Scripted, Exported))
    module.train()
    module.eval()
    torch.testing.assert_close(check_classifier(copy.deepcopy(module), X), network(X).detach())


def test_an_export_of_train_mode_or_of_one_batch_size_is_refused(network):
    with pytest.raises(ModelError, match=r"exported in train mode \(aten.batch_norm.default, aten.dropout.default\)"):
        as_module(exported(network.train(), rows=4))
    with pytest.raises(ModelError, match=r"batches of one size; give torch.export.export dynamic_shapes"):
        robust_accuracy(exported(network.eval(), rows=4), "robust_ext:APGD()", X, torch.zeros(8).long(), LINF)


def test_jit_in_train_mode_is_refused_and_put_into_eval_mode_by_its_owner(network):
    scripted = torch.jit.script(network).train()
    with pytest.raises(ModelError, match=r"is in train mode.*call model.eval\(\)"):
        check_classifier(as_module(scripted).module, X)
    assert len(check_classifier(as_module(scripted.eval()).module, X)) == len(X)
    assert unwrapped(as_module(scripted).module) is scripted


def test_jit_is_sent_to_the_process_of_an_attack_and_export_is_refused_there(network):
    labels = network(X).argmax(1)
    found = [
        robust_accuracy(one, "robust_ext:APGD(steps=5)", X, labels, LINF, isolate=isolate).robust_accuracy(0.1)
        for one, isolate in ((torch.jit.script(network), True), (network, False))
    ]
    assert found[0] == found[1]
    with pytest.raises(ModelError, match=r"Exported: cannot be sent to the attack's process .*isolate=False"):
        robust_accuracy(exported(network), "robust_ext:APGD(steps=5)", X, labels, LINF, isolate=True)
