"""Hooks that change gradients are named with their module; those that only look are not."""

import pytest
import torch
from torch import nn

from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.models import X, Y, digits_network
from tests.evaluations.diagnosis.traces import LINF

CHANGES = {
    "zero": (torch.zeros_like, "zero_gradient"),
    "turned round": (torch.neg, "wrong_gradient"),
    "signs": (torch.sign, "wrong_gradient"),
    "NaN": (lambda g: g * torch.nan, "non_finite_gradient"),
}
LOOKS = {"the same": torch.clone, "twice as much": lambda g: 2 * g, "nothing": lambda g: None}


class Blocks(nn.Module):
    """The digits network in two blocks, with a hook on a tensor between them or on the input."""

    def __init__(self, between=None, front=None):
        super().__init__()
        layers = list(digits_network())
        self.first, self.second = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])
        self.between, self.front = between, front
        self.eval()

    def forward(self, x):
        if self.front is not None and x.requires_grad:
            x.register_hook(self.front)
        h = self.first(x)
        if self.between is not None and h.requires_grad:
            h.register_hook(self.between)
        return self.second(h)


def hooked(place, change):
    """A model with a hook: of a module by its name, ``"before NAME"`` of one, on the input, or between the blocks."""
    if place in ("between", "front"):
        return Blocks(**{place: change}), ""
    model, name = Blocks(), place.removeprefix("before ")
    module = model.get_submodule("" if name == "model" else name)

    def changed(gradients):
        found = [None if one is None else change(one) for one in gradients]
        return None if any(one is None for one in found) else tuple(found)

    if place == name:
        module.register_full_backward_hook(lambda module, down, up: changed(down))
    else:
        module.register_full_backward_pre_hook(lambda module, up: changed(up))
    return model, "" if name == "model" else name


PLACES = ("first.2", "second.3", "first", "model", "before first.2", "between", "front")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_that_change_gradients_are_named_with_their_module(name, place):
    change, code = CHANGES[name]
    model, layer = hooked(place, change)
    before = [len(module._backward_hooks) + len(module._backward_pre_hooks) for module in model.modules()]
    found = probe_model(model, X, Y, threat_model=LINF).findings
    assert [(one.code, one.layer) for one in found] == [(code, layer)]
    assert [len(module._backward_hooks) + len(module._backward_pre_hooks) for module in model.modules()] == before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOOKS)
def test_hooks_that_look_or_scale_are_not(name, place):
    found = probe_model(hooked(place, LOOKS[name])[0], X, Y, threat_model=LINF).findings
    assert [one.code for one in found] == []


def test_the_remedy_removes_the_hook():
    model, _ = hooked("first.2", torch.neg)
    remedy = probe_model(model, X, Y, threat_model=LINF).findings[0].remedies[0]
    exec(remedy.paste.replace("{module}", "model"), {"model": model})  # noqa: S102 - our own remedy
    assert probe_model(model, X, Y, threat_model=LINF).findings == ()
