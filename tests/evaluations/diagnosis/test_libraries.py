"""The same fault has the same name whatever library attacks it, in this process and in one of its own."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

LINF = robust_ext.ThreatModel(norm="linf", epsilon=0.1)


class Quantise(nn.Module):
    def forward(self, x):
        return (x * 15).round() / 15


class Enlarge(nn.Module):
    def forward(self, logits):
        return logits * 1000


def plain(model, x, y, *, epsilon, steps=40, step=0.1):
    point = x
    for _ in range(steps):
        point = point.detach().clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(point), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, point)
        moved = point.detach() + step * epsilon * gradient.sign()
        point = (x + (moved - x).clamp(-epsilon, epsilon)).clamp(0, 1)
    return point


def plain_tiny(model, x, y, *, epsilon):
    return plain(model, x, y, epsilon=epsilon, steps=20, step=0.02)


# Without random starts, so that a path ends where its steps end.
GOOD = {
    "foolbox": "foolbox:LinfPGD(steps=40, rel_stepsize=0.1, random_start=False)",
    "art": "art:ProjectedGradientDescent(max_iter=40, eps_step=0.01)",
    "torchattacks": "torchattacks:PGD(steps=40, alpha=0.01, random_start=False)",
    "adv_lib": "adv_lib:pgd_linf(steps=40, relative_step_size=0.1, random_init=False)",
    "plain": plain,
}
TINY = {
    "foolbox": "foolbox:LinfPGD(steps=20, rel_stepsize=0.02, random_start=False)",
    "art": "art:ProjectedGradientDescent(max_iter=20, eps_step=0.002)",
    "torchattacks": "torchattacks:PGD(steps=20, alpha=0.002, random_start=False)",
    "adv_lib": "adv_lib:pgd_linf(steps=20, relative_step_size=0.02, random_init=False)",
    "plain": plain_tiny,
}
PACKAGES = {"foolbox": "foolbox", "art": "art", "torchattacks": "torchattacks", "adv_lib": "adv_lib"}


def rounded():
    return nn.Sequential(OrderedDict(quantise=Quantise(), network=digits_network())).eval()


def enlarged():
    return nn.Sequential(OrderedDict(network=digits_network(), enlarge=Enlarge())).eval()


FAULTS = {
    "rounding layer": (rounded, GOOD, ("zero_gradient", "quantise")),
    "steps too small": (digits_network, TINY, ("short_path", None)),
    "logits x 1000": (enlarged, GOOD, ("saturated_loss", None)),
}


def first_finding(fault, library, *, isolate, samples=16, **settings):
    make, attacks, expected = FAULTS[fault]
    if library in PACKAGES:
        pytest.importorskip(PACKAGES[library])
    digits = load_dataset("digits")
    inputs, labels = digits.take(digits.choose(samples, seed=0))
    found = robust_ext.diagnose(make(), attacks[library], inputs, labels, LINF, isolate=isolate, **settings)
    first = found.findings[0]
    return (first.code, first.layer), expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("library", GOOD)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_library_has_the_same_first_finding(fault, library, isolate):
    first, expected = first_finding(fault, library, isolate=isolate)
    assert first == expected


def test_a_plain_function_has_it():
    first, expected = first_finding("rounding layer", "plain", isolate=False, samples=6, planted=0, references=False)
    assert first == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", GOOD)
def test_without_a_fault_nothing_is_found(library):
    if library in PACKAGES:
        pytest.importorskip(PACKAGES[library])
    digits = load_dataset("digits")
    inputs, labels = digits.take(digits.choose(16, seed=0))
    assert robust_ext.diagnose(digits_network(), GOOD[library], inputs, labels, LINF).likely is None
