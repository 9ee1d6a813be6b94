"""From the call of an evaluation to the host's attack call: how many frames of this project lie between."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy

FOLDERS = (Path(robust_ext.__file__).parent, Path(__file__).parents[2] / "adapters")
LINF = ThreatModel(norm="linf", epsilon=0.1)
FRAMES = []


def note():
    """Names of this project's frames on the stack, the outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in FOLDERS):
            found.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    FRAMES.append(found)


def noted(base, method):
    """A class of attacks that notes from where it is called."""

    def call(self, *arguments, **keywords):
        note()
        return getattr(base, method)(self, *arguments, **keywords)

    return type("Probe", (base,), {method: call})


def callable_probe():
    return lambda model, x, y: (note(), x)[1]


def foolbox_probe():
    return noted(pytest.importorskip("foolbox").attacks.LinfFastGradientAttack, "__call__")()


def art_probe():
    pytest.importorskip("art")
    from robust_ext.adapters.art.library import art

    return noted(art.attacks.evasion.FastGradientMethod, "generate"), {}


EVALUATIONS = {
    "binarization_test": lambda net, x, y, probe: binarization_test(net, probe, x, LINF, inner_points=10),
    "robust_accuracy": lambda net, x, y, probe: robust_accuracy(net, probe, x, y, LINF),
    "mead": lambda net, x, y, probe: mead(net, [probe], x, y, LINF, detectors=lambda x: x.flatten(1).std(1)),
    "evaluate_defense": lambda net, x, y, probe: evaluate_defense(lambda x: x, [probe], x, y, LINF, classifier=net),
}


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("probe", [callable_probe, foolbox_probe, art_probe])
def test_at_most_five_frames(evaluation, probe):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    x = torch.rand(4, 1, 4, 4)
    FRAMES.clear()
    EVALUATIONS[evaluation](network, x, network(x).argmax(1), probe())
    assert FRAMES
    for path in FRAMES:
        assert path[0] == evaluation
        assert len(path) <= 5, path
