"""Every gradient attack of the hosts, on test-time defenses whose own gradient is zero, through the wrappers."""

import importlib

import pytest
import torch
from torch import nn

from robust_ext import BPDA, EoT, MissingDependencyError
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.registry.base import adapters
from robust_ext.testing.networks import digits, network, threat_model
from tests.adapters.common import Downhill
from tests.models.cases import NoisyRounding, Rounding

SAMPLES = 2
WRAPPED = {
    "plain": lambda classifier: Rounding(classifier, steps=2),
    "bpda": lambda classifier: BPDA(Rounding(classifier, steps=2), backward="trajectory"),
    "eot": lambda classifier: EoT(BPDA(NoisyRounding(classifier, steps=2)), draws=2, chunk=2, seed=0),
    # Foolbox's Brendel-Bethge stops where a point on the boundary is classified otherwise when it is queried again.
    "fixed": lambda classifier: EoT(BPDA(NoisyRounding(classifier, steps=2)), draws=2, chunk=2, seed=0, fixed=True),
}


class Watched(nn.Module):
    """Notes the largest gradient that comes back to an input."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.largest = 0.0
        self.eval()

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._note)
        return self.module(x)

    def _note(self, gradient):
        if gradient.numel():
            self.largest = max(self.largest, float(gradient.abs().max()))


def gradient_attacks(library):
    try:
        listings = adapters()[library].list_attacks()
    except MissingDependencyError:
        return []
    # What the matrix refuses (other tasks than classifying images) carries a reason.
    chosen = [one for one in listings if one.traits.gradients and not one.reason and not one.traits.detector]
    return [(library, one) for one in chosen]


ATTACKS = gradient_attacks("foolbox") + gradient_attacks("art")
QUICK = ("LinfPGD", "DDNAttack", "ProjectedGradientDescent")


def case(library, listing, wrapped):
    marks = () if listing.name in QUICK else pytest.mark.exhaustive
    return pytest.param(library, listing, wrapped, id=f"{library}:{listing.name}-{wrapped}", marks=marks)


CASES = [
    case(*one, wrapped)
    for one in ATTACKS
    for wrapped in ("bpda", "eot", "plain")
    # Averages differ from what they average over in nothing that depends on the attack.
    if wrapped == "bpda" or one[1].name in QUICK or (wrapped, one[1].name) == ("eot", "L2BrendelBethgeAttack")
]


def attacked(library, listing, wrapped):
    attack = adapters()[library].build_attack(listing.name, listing.trial, name=f"{library}:{listing.name}")
    norm = next((norm for norm in ("linf", "l2", "l1") if norm in attack.traits.norms), "linf")
    ball = threat_model(norm, listing.channels)
    try:
        attack.check(threat_model=ball)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    inputs, labels = digits(listing.channels)
    inputs, labels = inputs[:SAMPLES], labels[:SAMPLES]
    module = Watched(WRAPPED[wrapped](network(listing.channels)))
    shape = tuple(inputs.shape[1:])
    target = Target(module=module, bounds=(0.0, 1.0), classes=10, input_shape=shape, device=inputs.device)
    generator = stream(0, "host attacks", attack.name)
    found = run_attack(attack, target, inputs, labels, threat_model=ball, generator=generator)
    assert found.shape == inputs.shape
    return found, module


def without_compiler(library, name, monkeypatch):
    """numba would compile for a minute; all that queries the model stays as it is."""
    if library == "foolbox":
        attacks = importlib.import_module("foolbox.attacks")
        monkeypatch.setattr(getattr(attacks, name), "instantiate_optimizer", lambda self: Downhill())
    else:
        module = importlib.import_module("art.attacks.evasion.brendel_bethge")
        for norm in ("L0", "L1", "L2", "Linf"):
            monkeypatch.setattr(module, f"{norm}Optimizer", Downhill)


@pytest.mark.parametrize(("library", "listing", "wrapped"), CASES)
def test_gradients_arrive_through_the_wrappers_alone(library, listing, wrapped, monkeypatch):
    if listing.name.endswith("BrendelBethgeAttack"):
        without_compiler(library, listing.name, monkeypatch)
        wrapped = {"eot": "fixed"}.get(wrapped, wrapped)
    found, module = attacked(library, listing, wrapped)
    assert bool(torch.isfinite(found).all())
    assert float(found.min()) >= -1e-6
    assert float(found.max()) <= 1 + 1e-6
    assert (module.largest > 0) == (wrapped != "plain")
