"""The four evaluations on a network of a few weights, each in a tenth of a second, for tests of run folders."""

import json
import signal
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.core.target import PassCounter
from tests.evaluations.subjects import Rounding, spread

LINF = ThreatModel(norm="linf", epsilon=0.1)
DRAW = torch.Generator().manual_seed(1)
INPUTS = torch.rand(10, 1, 4, 4, generator=DRAW)


def make_network():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3)).eval()
    weights = torch.randn(sum(part.numel() for part in network.parameters()), generator=DRAW.manual_seed(2)) / 2
    nn.utils.vector_to_parameters(weights, network.parameters())
    return network.requires_grad_(False)


NETWORK = make_network()
LABELS = NETWORK(INPUTS).argmax(1)


def sign_step(model, x, y, threat_model):
    """One step of the sign of the gradient."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
    return (x + threat_model.epsilon * gradient.sign()).clamp(0, 1).detach()


KINDS = ("binarization", "robust_accuracy", "mead", "test_time", "diagnosis")


def call(kind, model, attack, x, y, threat_model=LINF, **given):
    """One evaluation of an attack, or several, with settings that make it short."""
    if kind == "binarization":
        return robust_ext.binarization_test(model, attack, x, threat_model, **{"inner_points": 30, **given})
    if kind == "test_time":
        given = {"defense": lambda x: x, "classifier": model, **given}
        return robust_ext.evaluate_defense(given.pop("defense"), attack, x, y, threat_model, **given)
    public = robust_ext.diagnose if kind == "diagnosis" else getattr(robust_ext, kind)
    short = {"mead": {"detectors": spread, "resamples": 0}, "diagnosis": {"planted": 0, "references": False}}
    return public(model, attack, x, y, threat_model, **{**short.get(kind, {}), **given})


TINY = {"random_inner": 10, "random_corners": 10, "calibrate_on": 2, "witness_steps": 4, "witness_queries": 8}
SETTINGS = {
    "binarization": TINY,
    "mead": {"detectors": {"spread": spread, "mean": lambda x: x.flatten(1).mean(1)}},
    "robust_accuracy": {},
    "test_time": {"defense": Rounding(NETWORK, steps=1)},
}


def in_folder(kind, out, attacks):
    attacks = attacks if kind in ("binarization", "robust_accuracy") else list(attacks.values())
    return call(kind, NETWORK, attacks, INPUTS, LABELS, out=out, batch_size=4, **SETTINGS.get(kind, {}))


EVALUATIONS = {kind: partial(in_folder, kind) for kind in SETTINGS}


@dataclass
class Calls(PassCounter):
    """Calls of an attack; a counter is no part of what identifies it."""

    stop_at: int = 0

    def count(self):
        self.forward += 1
        if self.forward == self.stop_at:
            signal.raise_signal(signal.SIGINT)


def evaluate(name, out, *, stop_at=0):
    """An evaluation with two attacks in a folder; it is stopped at the call of an attack with this number."""
    calls = Calls(stop_at=stop_at)

    def step(model, x, y, threat_model):
        calls.count()
        return sign_step(model, x, y, threat_model)

    return in_folder(name, out, {"step": robust_ext.as_attack(step, name="step"), "still": lambda model, x, y: x})


def timeless(part):
    """What a part of a result holds beside times."""
    if isinstance(part, dict):
        return {key: timeless(value) for key, value in part.items() if key not in ("seconds", "time", "cost")}
    return [timeless(value) for value in part] if isinstance(part, (list, tuple)) else part


def essence(result):
    """What a result holds beside times."""
    examples = [(one.attack, one.sample, one.outcome, one.candidate.tolist()) for one in result.examples]
    return json.dumps(timeless(result.to_dict())), examples
