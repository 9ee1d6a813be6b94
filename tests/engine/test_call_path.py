"""From the call of an evaluation to the host's attack call: how many frames of this project lie between."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy

PACKAGE = Path(robust_ext.__file__).parent
ADAPTERS = Path(__file__).parents[2] / "adapters"
LINF = ThreatModel(norm="linf", epsilon=0.1)
FRAMES = []


def note():
    """Names of this project's frames on the stack, the outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in (PACKAGE, ADAPTERS)):
            found.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    FRAMES.append(found)


def callable_probe():
    def attack(model, x, y):
        note()
        return x

    return attack


def foolbox_probe():
    foolbox = pytest.importorskip("foolbox")

    class Probe(foolbox.attacks.LinfFastGradientAttack):
        def __call__(self, *arguments, **keywords):
            note()
            return super().__call__(*arguments, **keywords)

    return Probe()


def art_probe():
    pytest.importorskip("art")
    from robust_ext.adapters.art.library import art

    evasion = art.attacks.evasion

    class Probe(evasion.FastGradientMethod):
        def generate(self, *arguments, **keywords):
            note()
            return super().generate(*arguments, **keywords)

    return Probe, {}


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    x = torch.rand(4, 1, 4, 4)
    return network, x, network(x).argmax(1)


EVALUATIONS = {
    "binarization_test": lambda network, x, y, probe: binarization_test(network, probe, x, LINF, inner_points=10),
    "robust_accuracy": lambda network, x, y, probe: robust_accuracy(network, probe, x, y, LINF),
    "mead": lambda network, x, y, probe: mead(network, [probe], x, y, LINF, detectors=lambda x: x.flatten(1).std(1)),
    "evaluate_defense": lambda network, x, y, probe: evaluate_defense(
        lambda x: x, [probe], x, y, LINF, classifier=network
    ),
}


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("probe", [callable_probe, foolbox_probe, art_probe])
def test_at_most_five_frames(subject, evaluation, probe):
    FRAMES.clear()
    EVALUATIONS[evaluation](*subject, probe())
    assert FRAMES
    for path in FRAMES:
        assert path[0] == evaluation
        assert len(path) <= 5, path
