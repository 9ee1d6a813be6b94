"""Models and attacks that other code raises at end in errors of this project that say what to do, or are evaluated."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx

from robust_ext import ThreatModel, binarization_test, diagnose, robust_accuracy
from robust_ext.core.errors import AttackError, RobustExtError
from robust_ext.engine import classifiers
from robust_ext.engine.isolation.messages import Unpickler, pickled

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


def quantised():
    ao = torch.ao.quantization
    network = nn.Sequential(
        ao.QuantStub(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3), ao.DeQuantStub()
    )
    network.eval().qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare(network)
    prepared(X)
    return ao.convert(prepared)


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
    "static int8": (quantised, None),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "hold no values yet"),
    "sparse": (lambda: Applied(lambda logits, x: logits.to_sparse()), "sparse tensor"),
    "nested": (lambda: Applied(lambda logits, x: torch.nested.nested_tensor(list(logits))), "nested tensor"),
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
    with pytest.raises(RobustExtError, match=words):
        EVALUATIONS[evaluation](model)


def test_an_error_without_words_shows_the_line_that_raised_it():
    def attack(model, x, y):
        raise AssertionError

    with pytest.raises(AttackError, match=r"raised AssertionError: at `raise AssertionError` .test_odd_models"):
        robust_accuracy(Applied(lambda logits, x: logits).eval(), attack, X, Y, LINF)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cells(x[:, 0])[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_eval_mode_have_gradients_on_a_gpu(kind):
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    result = robust_accuracy(Recurrent(kind).eval(), "robust_ext:APGD(steps=2)", X, Y, LINF, device="cuda")
    assert result.content["samples"] == len(X)


def test_cudnn_is_off_inside_them_alone(monkeypatch):
    seen = []
    model = Recurrent(nn.LSTM).eval()
    assert classifiers.as_classifier(model, X) is model
    monkeypatch.setattr(classifiers, "_on_cuda", lambda module: True)
    model.cells.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    wrapped = classifiers.as_classifier(model, X)
    torch.autograd.grad(wrapped(X.clone().requires_grad_()).sum(), wrapped.module.head.weight)
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.enabled
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    assert classifiers.as_classifier(plain, X) is plain


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
