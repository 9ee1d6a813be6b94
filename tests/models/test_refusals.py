"""Wrong arguments of models raise by name, with what is expected or the next step."""

import pytest
import torch
from torch import nn

from robust_ext import BPDA, EoT, InvalidArgumentError, ModelError, SplitError, as_defense
from robust_ext.models.adaptive_features import DefendedFeatures, split_defense
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.defended import Defended
from robust_ext.models.features import split
from robust_ext.models.readouts.linear import fit_directions
from robust_ext.registry.readout import as_readout
from tests.models.cases import Controlled, Descent, data, network

NET, X, BODY = network(), data(3), nn.Flatten().eval()


class Together(Controlled):
    batch_level = True


class Probable(Descent):
    output = "probabilities"

    def readout(self, point, state):
        return super().readout(point, state).softmax(1)


class Twice(Controlled):
    def readout(self, point, state):
        return (super().readout(point, state) + super().readout(point / 2, state)) / 2


class Short(Descent):
    def readout(self, point, state):
        return super().readout(point, state)[0]


class Of(nn.Module):
    """A function of flat inputs as a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x):
        return self.function(x.flatten(1))


def of(function):
    return lambda: split(Of(function), X)


def readout(**parts):
    return {
        "weight": torch.ones(3, 6),
        "anchor": torch.ones(3, 6),
        **dict.fromkeys(("threshold", "scale", "offset"), torch.ones(3)),
        **parts,
    }


def broken(x):
    raise ValueError("no such thing")


def fits(features, planted, **ways):
    return lambda: fit_directions(features, torch.tensor(planted), **ways)


def unused():
    module = Of(lambda x: x)
    module.spare = nn.Identity()
    return BPDA(module, layer="spare")


LEAF = torch.rand(4, 3, requires_grad=True)
ALONE = "an AdaptiveDefense for that"
ARGUMENTS = [
    # Test-time defenses.
    (lambda: Descent(NET, steps=-1), "steps: got -1"),
    (lambda: Together(NET), "group_size: got None, expected the number of rows"),
    (lambda: Descent(NET, group_size=2), "group_size: got 2, expected None"),
    (lambda: Descent(NET)(torch.zeros(2, 6, dtype=torch.int64)), r"x: got dtype torch\.int64"),
    (lambda: Descent(NET)(torch.zeros(6)), r"x: got .*shape \(6,\)"),
    *(
        (lambda seeds=seeds: Descent(NET).trace(data(2), seeds=seeds), "seeds: .*2 integers")
        for seeds in ([1], [1, -1])
    ),
    # Backward passes and expectations.
    (lambda: BPDA(3), "forward: got int"),
    (lambda: BPDA(torch.round, backward="best"), "backward: got best"),
    *((lambda ways=ways: BPDA(torch.round, **ways), ALONE) for ways in ({"backward": "trajectory"}, {"steps": 2})),
    (lambda: BPDA(torch.round, layer="a"), "a module with layers"),
    (lambda: BPDA(NET, layer="1", backward="trajectory"), ALONE),
    (lambda: BPDA(Descent(NET), steps=-1), "steps: got -1"),
    (lambda: EoT(NET, draws=0), "draws: got 0"),
    (lambda: EoT(NET, draws=2, chunk=0), "chunk: got 0"),
    *((lambda key=key: EoT(NET, draws=2, **{key: "hope"}), f"{key}: got") for key in ("gradient", "loss", "decision")),
    (lambda: EoT(NET, draws=2, fixed=True), "fixed: got True, expected False, or a seed"),
    # Detectors and readouts.
    (lambda: Defended(NET, None, exposure="both"), "exposure: got 'both'"),
    (lambda: BinarizedClassifier(BODY, references=X, **readout(scale=torch.ones(2))), "scale: got shape .*3 rows"),
    (lambda: BinarizedClassifier(BODY, references=X, **readout(), batching="single"), "batching: got 'single'"),
    (lambda: BinarizedClassifier(BODY, references=X, **readout(training=torch.ones(3))), "called 'training'"),
    *(
        (lambda text=text, shape=shape: as_readout(text).check(shape), f"readout: got .*{words}")
        for text, shape, words in (
            ("logistic", (3, 4), r"\(N, F\); give"),
            ("ensemble", (4,), r"\(N, members, F\)"),
            ("code", (2, 3, 4), r"\(N, bits, F\)"),
            ("mixing", (4,), r"\(N, mixes, F\)"),
        )
    ),
    (fits(torch.zeros(3, 2), [True, False, False]), r"features: got shape \(3, 2\), expected shape \(B, n, F\)"),
    (fits(torch.zeros(1, 3, 2), [True, False]), r"planted: got shape \(2,\)"),
    (fits(torch.zeros(1, 3, 2), [1, 0, 0]), "planted: got .*int64, expected bool"),
    *((fits(torch.zeros(1, 3, 2), [one] * 3), "planted: .*both classes") for one in (True, False)),
    (fits(torch.zeros(1, 2, 2), [True, False], kind="svm"), "kind: got 'svm'"),
    (fits(torch.zeros(1, 2, 2), [True, False], C=0), "C: got 0"),
    # Pairs of features and readout.
    *(
        (lambda pair=pair: split(pair, X), r"model: got .*, expected a pair")
        for pair in ((BODY,), (BODY, 3), (BODY, "head"))
    ),
    (lambda: split(lambda x: x, X), "model: got function, expected a torch.nn.Module"),
]
MODELS = [
    (lambda: unused()(LEAF), "layer 'spare': a forward pass does not call it"),
    (lambda: as_defense(broken, NET, X), r"defense: broken, on .*shape \(3, 2, 3\), raised ValueError: no such"),
    (lambda: Short(NET)(X), "readout: got shape"),
    (lambda: BPDA(lambda x: x[:, :2])(LEAF), "give a differentiable substitute"),
    (
        lambda: BPDA(torch.round, backward=lambda x: x[:, :2])(LEAF).sum().backward(),
        r"substitute returned shape \(4, 2\)",
    ),
    (lambda: EoT(lambda x: x.detach() * 2, draws=2)(LEAF).sum().backward(), "no gradient comes back to the input"),
    (
        lambda: BPDA(nn.Sequential(nn.Identity(), nn.Linear(3, 2)), layer="1")(LEAF),
        r"'1' makes shape \(4, 2\) of \(4, 3\)",
    ),
    (lambda: DefendedFeatures(Together(NET, group_size=2), "classifier.3"), "Together: treats rows together"),
    (lambda: split_defense(Together(NET, group_size=2), X), "Together: treats rows together"),
    (of(lambda x: x[:, 0]), r"returned shape \(3,\) for 3 inputs"),
    (of(lambda x: x[:2]), r"returned shape \(2, 6\) for 3 inputs"),
    (of(lambda x: x[:, :1]), r"expected logits of shape \(3, K\)"),
    (of(lambda x: x.argmax(1)), "returned dtype torch.int64"),
    (of(lambda x: (x, x)), "returned tuple"),
    (of(lambda x: x / 0), "NaN or infinite logits on clean inputs"),
    (of(lambda x: x.softmax(1)), "leave out the softmax"),
    (of(lambda x: x.missing), "raised AttributeError on inputs of shape"),
    (lambda: split((BODY, nn.Linear(6, 4).train()), X), "is in train mode"),
    (lambda: split((BODY, nn.Linear(5, 4).eval()), X), "raised RuntimeError on inputs of shape"),
]
SPLITS = [
    (
        lambda: split((lambda x: x.flatten(1).sum(1), lambda z: torch.stack([z, -z], 1)), X),
        r"features: got shape \(3,\) for 3 inputs",
    ),
    (lambda: split_defense(Probable(NET), X, layer="classifier.3"), "returns probabilities, expected none"),
    (lambda: split_defense(Twice(NET), X), "Twice, at its end: "),
    (lambda: split_defense(Controlled(NET), X, layer="nowhere"), r"got 'defense\.nowhere'"),
]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (call, error, words)
        for error, cases in ((InvalidArgumentError, ARGUMENTS), (ModelError, MODELS), (SplitError, SPLITS))
        for call, words in cases
    ],
)
def test_what_is_wrong_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
