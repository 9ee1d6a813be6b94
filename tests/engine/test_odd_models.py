"""Models and attacks that other code raises at end in errors of this project that say what to do, or are evaluated."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx

from robust_ext import AdaptedAttack, ThreatModel, binarization_test, diagnose, robust_accuracy
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import AttackError, RobustExtError
from robust_ext.engine.isolation.messages import Unpickler, pickled
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.models.forms import float_twin

LINF = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
SQUARE = "robust_ext:Square(queries=4)"


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.network, self.function = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), function

    def forward(self, x):
        return self.function(self.network(x), x)


class Dispatching(torch.Tensor):
    """A tensor whose operations are its own."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values.detach())

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


def raising(error, after=0):
    """Logits as they are for some calls, then an error."""
    calls = iter(range(after))

    def function(logits, x):
        if next(calls, None) is None:
            raise error
        return logits

    return function


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


def quantised_layers():
    ao = torch.ao.quantization
    network = nn.Sequential(ao.QuantStub(), *convolutions(), ao.DeQuantStub()).eval()
    network.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare(network)
    prepared(X)
    return ao.convert(prepared)


def quantised_graph():
    ao = torch.ao.quantization
    mapping = ao.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = quantize_fx.prepare_fx(convolutions(), mapping, (X,))
    prepared(X)
    return quantize_fx.convert_fx(prepared)


MODELS = {
    "static int8": (quantised_layers, None),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "hold no values yet"),
    "sparse": (lambda: Applied(lambda logits, x: logits.to_sparse()), "of layout torch.sparse_coo"),
    "nested": (lambda: Applied(lambda logits, x: torch.nested.nested_tensor(list(logits))), "that is nested"),
    "float8": (lambda: Applied(lambda logits, x: logits.to(torch.float8_e4m3fn)), "of dtype torch.float8_e4m3fn"),
    "meta": (lambda: Applied(lambda logits, x: logits.to("meta")), "on the meta device"),
    "subclass": (lambda: Applied(lambda logits, x: Dispatching(logits)), "of Dispatching, a class that defines"),
    "exit": (lambda: Applied(raising(SystemExit(0))), "raised SystemExit: 0"),
    "late exit": (lambda: Applied(raising(SystemExit(0), after=8)), r"raised SystemExit( on a batch of \d rows)?: 0"),
    "generator": (lambda: Applied(raising(GeneratorExit())), "raised GeneratorExit"),
    "unreadable": (lambda: Applied(raising(UnreadableError())), "raised UnreadableError.*its text cannot be read"),
    "numpy": (lambda: Applied(lambda logits, x: torch.from_numpy(x.numpy().reshape(len(x), -1)[:, :3])), None),
}
EVALUATIONS = {
    "robust accuracy": lambda model: robust_accuracy(model, SQUARE, X, Y, LINF),
    "binarization": lambda model: binarization_test(model, SQUARE, X, LINF, inner_points=20, depths=(1,)),
    "diagnosis": lambda model: diagnose(model, SQUARE, X, Y, LINF, planted=0, references=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_no_exception_of_others_escapes(name, evaluation):
    make, words = MODELS[name]
    model = make().eval()
    if words is None:
        EVALUATIONS[evaluation](model)
        return
    if (name, evaluation) == ("unreadable", "diagnosis"):
        # A diagnosis reports what a forward pass raises as a finding.
        assert re.search(words, " ".join(str(EVALUATIONS[evaluation](model)).split()))
        return
    with pytest.raises(RobustExtError, match=words):
        EVALUATIONS[evaluation](model)


def test_an_exit_in_a_forward_does_not_end_a_script_with_status_0(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import sys, torch
from robust_ext import ThreatModel, robust_accuracy

class Leaving(torch.nn.Linear):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        sys.exit(0)

threat_model = ThreatModel(norm="linf", epsilon=0.1)
robust_accuracy(Leaving(4, 3).eval(), "robust_ext:APGD(steps=1)", torch.rand(2, 4), torch.zeros(2).long(), threat_model)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModelError" in done.stderr.splitlines()[-1]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cells(x[:, 0])[0][:, -1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_recurrent_layers_in_eval_mode_have_gradients_on_a_gpu():
    result = robust_accuracy(Recurrent().eval(), "robust_ext:APGD(steps=2)", X, Y, LINF, device="cuda")
    assert result.content["samples"] == len(X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", [quantised_layers, quantised_graph])
def test_quantised_convolutions_go_to_an_attacks_process(make):
    model = make()
    arrived = Unpickler(pickled(model, {}, to="it"), {}).load()
    assert torch.equal(arrived(X), model(X))
    assert [name for name, _ in arrived.named_modules()] == [name for name, _ in model.named_modules()]
    labels = model(X).argmax(1)
    there, here = (robust_accuracy(model, SQUARE, X, labels, LINF, isolate=isolate) for isolate in (True, False))
    assert there.robust_accuracy(0.1) == here.robust_accuracy(0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", [quantised_layers, quantised_graph])
def test_the_float_twin_of_a_quantised_network_computes_by_its_rounded_weights(make):
    model = make()
    inside = dict(model.named_modules())
    first = next(one for one in inside.values() if "Conv" in type(one).__name__)
    last = next(one for one in inside.values() if type(one).__name__ == "Linear")
    x = X.clone().requires_grad_()
    hidden = nn.functional.conv2d(x, first.weight().dequantize(), first.bias()).relu().flatten(1)
    expected = nn.functional.linear(hidden, last.weight().dequantize(), last.bias())
    seen = float_twin(model)(x)
    torch.testing.assert_close(seen, expected)
    slopes = [torch.autograd.grad(one[:, 0].sum(), x, retain_graph=True)[0] for one in (seen, expected)]
    torch.testing.assert_close(*slopes)
    assert float_twin(convolutions()) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::robust_ext.RobustExtWarning")
@pytest.mark.parametrize("make", [quantised_layers, quantised_graph])
def test_probes_of_a_quantised_network_name_the_gradients_of_its_twin_which_find_what_is_planted(make):
    model = make()
    labels = model(X).argmax(1)
    (found,) = probe_model(model, X, labels, threat_model=LINF, seed=0).findings
    view = found.remedies[0].view
    assert (found.code, view) == ("cut_gradient", {"gradient_mode": "float_twin"})
    attack = AdaptedAttack(attack=APGD(loss="margin"), **view)
    assert binarization_test(model, attack, X, LINF, inner_points=50, depths=(1,)).score == 1
    with pytest.raises(AttackError, match="gives no gradients"):
        binarization_test(model, APGD(loss="margin"), X, LINF, inner_points=50, depths=(1,))
