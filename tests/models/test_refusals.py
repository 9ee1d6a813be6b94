"""Wrong arguments of models raise by name, with what is expected or the next step."""

import pytest
import torch
from torch import nn

from robust_ext import BPDA, EoT, InvalidArgumentError, ModelError, SplitError, as_defense
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.features import split
from robust_ext.models.readouts.linear import fit_directions
from robust_ext.registry.readout import as_readout
from tests.models.cases import Controlled, Descent, Net, Probable, data, network

NET, X, BODY = network(), data(3), nn.Flatten().eval()


class Together(Controlled):
    batch_level = True


class Twice(Controlled):
    def readout(self, point, state):
        return (super().readout(point, state) + super().readout(point / 2, state)) / 2


class Short(Descent):
    def readout(self, point, state):
        return super().readout(point, state)[0]


def binarized(**options):
    parts = {"weight": torch.ones(3, 6), "anchor": torch.ones(3, 6)}
    parts |= dict.fromkeys(("threshold", "scale", "offset"), torch.ones(3))
    return lambda: BinarizedClassifier(BODY, references=X, **{**parts, **options})


def bpda(forward, **settings):
    return lambda: BPDA(forward, **settings)


def fits(planted):
    return lambda: fit_directions(torch.zeros(1, 3, 2), torch.tensor(planted))


def pair(*parts):
    return lambda: split(parts, X)


def broken(x):
    raise ValueError("no such thing")


def cut(x):
    return x[:, :2]


LEAF = torch.rand(4, 3, requires_grad=True)
ALONE = "an AdaptiveDefense for that"
ARGUMENTS = [
    # Test-time defenses.
    (lambda: Together(NET), "group_size: got None, expected the number of rows"),
    (lambda: Descent(NET, group_size=2), "group_size: got 2, expected None"),
    (lambda: Descent(NET)(torch.zeros(2, 6, dtype=torch.int64)), r"x: got dtype torch\.int64"),
    (lambda: Descent(NET).trace(data(2), seeds=[1]), "seeds: .*2 integers"),
    # Backward passes and expectations.
    (bpda(3), "forward: got int"),
    *((bpda(torch.round, **ways), ALONE) for ways in ({"backward": "trajectory"}, {"steps": 2})),
    (bpda(NET, layer="1", backward="trajectory"), ALONE),
    (lambda: EoT(NET, draws=2, fixed=True), "fixed: got True, expected False, or a seed"),
    # Detectors and readouts.
    (binarized(scale=torch.ones(2)), "scale: got shape .*3 rows"),
    (binarized(training=torch.ones(3)), "called 'training'"),
    (lambda: as_readout("ensemble").check((4,)), r"readout: got .*\(N, members, F\)"),
    (fits([True, False]), r"planted: got shape \(2,\)"),
    *((fits([one] * 3), "planted: .*both classes") for one in (True, False)),
    # Pairs of features and readout.
    *((pair(*parts), r"model: got .*, expected a pair") for parts in ((BODY,), (BODY, 3), (BODY, "head"))),
    (lambda: split(lambda x: x, X), "model: got function, expected a torch.nn.Module"),
]
MODELS = [
    (lambda: BPDA(Net(lambda net, x: x, spare=BODY), layer="spare")(LEAF), "'spare': a forward pass does not call it"),
    (lambda: as_defense(broken, NET, X), r"defense: broken, on .*shape \(3, 2, 3\), raised ValueError: no such"),
    (lambda: Short(NET)(X), "readout: got shape"),
    (lambda: BPDA(cut)(LEAF), "give a differentiable substitute"),
    (lambda: BPDA(torch.round, backward=cut)(LEAF).sum().backward(), r"substitute returned shape \(4, 2\)"),
    (lambda: EoT(lambda x: x.detach() * 2, draws=2)(LEAF).sum().backward(), "no gradient comes back to the input"),
    (lambda: BPDA(nn.Sequential(nn.Linear(3, 2)), layer="0")(LEAF), r"'0' makes shape \(4, 2\) of \(4, 3\)"),
    (lambda: split_defense(Together(NET, group_size=2), X), "Together: treats rows together"),
    (pair(BODY, nn.Linear(6, 4).train()), "is in train mode"),
    (pair(BODY, nn.Linear(5, 4).eval()), "raised RuntimeError on inputs of shape"),
]
SPLITS = [
    (pair(lambda x: x.flatten(1).sum(1), lambda z: torch.stack([z, -z], 1)), r"features: got shape \(3,\) for 3"),
    (lambda: split_defense(Probable(NET), X, layer="classifier.3"), "returns probabilities, expected none"),
    (lambda: split_defense(Twice(NET), X), "Twice, at its end: "),
    (lambda: split_defense(Controlled(NET), X, layer="nowhere"), r"got 'defense\.nowhere'"),
]
ALL = ((InvalidArgumentError, ARGUMENTS), (ModelError, MODELS), (SplitError, SPLITS))


def test_what_is_wrong_is_refused():
    for error, call, words in ((error, *case) for error, cases in ALL for case in cases):
        with pytest.raises(error, match=words):
            call()
