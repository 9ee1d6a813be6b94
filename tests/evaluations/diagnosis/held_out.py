"""Ten faults, each with its healthy twin, that no threshold of the diagnosis was chosen on.

The expected code and layer follow from how the fault was made. In the twin everything is the same but for the fault.
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.models import Apply
from tests.evaluations.diagnosis.zoo.cases import Fault
from tests.evaluations.subjects import climb, gradient, into_ball

LEVELS = torch.linspace(1 / 32, 31 / 32, 16)


def thermometer(x):
    """How many of 16 thresholds lie below (thermometer encoding, Buckman et al. 2018, and the mean over its code)."""
    return (x.unsqueeze(-1) > LEVELS).float().mean(-1)


def soft_thermometer(x):
    """The same with ramps for thresholds, each as wide as they lie apart."""
    return ((x.unsqueeze(-1) - LEVELS) * 16 + 0.5).clamp(0, 1).mean(-1)


def decoy(x):
    """The input, with the gradient of an image that is shifted and turned upside down."""
    other = x.roll(3, -1).flip(-2)
    return x.detach() + (other - other.detach())


class Alternating(nn.Module):
    """Two sets of features, one for every even and one for every odd call; it draws nothing."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.roll(1, -1) if self.calls % 2 else x


def standardised(x):
    """Pixels with the batch's mean and deviation moved to those of the digits."""
    return (x - x.mean()) / x.std() * 0.376 + 0.306


def in_half(x):
    """Activations in a unit that half precision cannot hold all of: what lies above 4.85 is infinite."""
    return (x * 13_500).half().float() / 13_500


pgd = partial(climb, steps=40)


def from_the_start(model, x, y, *, epsilon):
    """Every step sets out from the clean input, so the path is one step long."""
    point = x
    for _ in range(40):
        point = into_ball(x + epsilon / 8 * gradient(model, point, y).sign(), x, epsilon)
    return point


def lost_update(model, x, y, *, epsilon):
    """The step goes to a variable that nothing reads."""
    point = x
    for _ in range(40):
        into_ball(point + epsilon / 8 * gradient(model, point, y).sign(), x, epsilon)
    return point


def labels_from_one(model, x, y, *, epsilon):
    """Classes counted from one, as in data with a background class."""
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    return pgd(model, x, (y + 1) % classes, epsilon=epsilon)


def inverted_mask(model, x, y, *, epsilon):
    """Returns what it found where it found nothing, and the inputs elsewhere."""
    point = pgd(model, x, y, epsilon=epsilon)
    with torch.no_grad():
        fooled = model(point).argmax(1) != y
    return torch.where(fooled.view(-1, 1, 1, 1), x, point)


def _length(x):
    return x.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)


def l2_pgd(model, x, y, *, epsilon, cube=False):
    """Steps in l2, and a projection into its ball, or into the linf ball (a ``cube``) of the same radius."""
    point = x
    for _ in range(40):
        slope = gradient(model, point, y)
        # Squares of the gradients of cross-entropy far from the decision boundary round to 0.
        slope = slope / slope.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-38)
        moved = point + epsilon / 8 * slope / _length(slope) - x
        moved = moved.clamp(-epsilon, epsilon) if cube else moved * (epsilon / _length(moved)).clamp_max(1)
        point = (x + moved).clamp(0, 1)
    return point


def of_layer(title, code, name, broken, sound, place=0):
    """A fault of a module of this name in the digits network, and the sound one in its place."""

    def model(*, faulty):
        layers = [(f"layer{number}", layer) for number, layer in enumerate(digits_network())]
        layers.insert(place, (name, broken() if faulty else Apply(sound)))
        return nn.Sequential(OrderedDict(layers)).eval()

    return Fault(name=title, code=code, layer=name, model=model, attack=pgd)


def of_attack(title, code, attack, twin=pgd, **more):
    return Fault(name=title, code=code, model=digits_network, attack=attack, twin=twin, **more)


L2 = ThreatModel(norm="l2", epsilon=0.5)
FAULTS = (
    of_layer("thermometer encoding", "cut_gradient", "encode", partial(Apply, thermometer), soft_thermometer),
    of_layer("gradient of a decoy", "wrong_gradient", "align", partial(Apply, decoy), torch.clone),
    of_layer("another model at every other call", "random_output", "alternate", Alternating, torch.clone),
    of_layer(
        *("inputs standardised by their batch", "batch_dependent", "standardise"),
        *(partial(Apply, standardised), lambda x: (x - 0.306) / 0.376 * 0.376 + 0.306),
    ),
    of_layer(
        *("half precision overflows", "non_finite_logits", "halves"),
        *(partial(Apply, in_half), lambda x: x * 13_500 / 13_500, 4),
    ),
    # Written down as a path that is too short, before there was a code for steps that are not kept.
    of_attack("every step from the clean input", "vanishing_steps", from_the_start),
    of_attack("update lost", "unmoved", lost_update),
    of_attack("labels counted from one", "predicted_labels", labels_from_one),
    of_attack("success mask inverted", "best_not_returned", inverted_mask),
    of_attack("linf ball for an l2 ball", "left_ball", partial(l2_pgd, cube=True), l2_pgd, threat_model=L2),
)
