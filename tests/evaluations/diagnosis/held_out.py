"""Ten faults, each with its healthy twin, that no threshold of the diagnosis was chosen on.

The expected code and layer follow from how the fault was made. In the twin everything is the same but for the fault.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from robust_ext import ThreatModel
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.models import Apply

LINF = ThreatModel(norm="linf", epsilon=0.1)
L2 = ThreatModel(norm="l2", epsilon=0.5)
STEPS = 40
Attack = Callable[..., Tensor]
Function = Callable[[Tensor], Tensor]
Place = Callable[[str, Function], nn.Module]


def before(name: str, function: Function) -> nn.Module:
    """The digits network behind a module of this name."""
    return nn.Sequential(OrderedDict([(name, Apply(function)), ("network", digits_network())])).eval()


def within(name: str, function: Function) -> nn.Module:
    """The digits network with a module of this name after its second activation."""
    layers = [(f"layer{number}", layer) for number, layer in enumerate(digits_network())]
    return nn.Sequential(OrderedDict([*layers[:4], (name, Apply(function)), *layers[4:]])).eval()


LEVELS = torch.linspace(1 / 32, 31 / 32, 16)


def thermometer(x: Tensor) -> Tensor:
    """How many of 16 thresholds lie below (thermometer encoding, Buckman et al. 2018, and the mean over its code)."""
    return (x.unsqueeze(-1) > LEVELS).float().mean(-1)


def soft_thermometer(x: Tensor) -> Tensor:
    """The same with ramps for thresholds, each as wide as they lie apart."""
    return ((x.unsqueeze(-1) - LEVELS) * 16 + 0.5).clamp(0, 1).mean(-1)


def decoy(x: Tensor) -> Tensor:
    """The input, with the gradient of an image that is shifted and turned upside down."""
    other = x.roll(3, -1).flip(-2)
    return x.detach() + (other - other.detach())


class Alternating(nn.Module):
    """Two sets of features, one for every even and one for every odd call; it draws nothing."""

    def __init__(self, *, alternate: bool) -> None:
        super().__init__()
        self.calls, self.alternate = 0, alternate

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.alternate
        return x.roll(1, -1) if self.calls % 2 else x


def alternating(*, alternate: bool) -> nn.Module:
    layers = [("alternate", Alternating(alternate=alternate)), ("network", digits_network())]
    return nn.Sequential(OrderedDict(layers)).eval()


def standardised(x: Tensor) -> Tensor:
    """Pixels with the batch's mean and deviation moved to those of the digits."""
    return (x - x.mean()) / x.std() * 0.376 + 0.306


def fixed_standardised(x: Tensor) -> Tensor:
    return (x - 0.306) / 0.376 * 0.376 + 0.306


def in_half(x: Tensor) -> Tensor:
    """Activations in a unit that half precision cannot hold all of: what lies above 4.85 is infinite."""
    return (x * 13_500).half().float() / 13_500


def in_single(x: Tensor) -> Tensor:
    return (x * 13_500).float() / 13_500


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), x)[0]


def into_ball(point: Tensor, x: Tensor, epsilon: float) -> Tensor:
    return (x + (point - x).clamp(-epsilon, epsilon)).clamp(0, 1)


def pgd(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """Steps by the sign of the gradient, the twin of the faulty attacks on linf."""
    point = x
    for _ in range(STEPS):
        point = into_ball(point + epsilon / 8 * gradient(model, point, y).sign(), x, epsilon)
    return point


def from_the_start(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """Every step sets out from the clean input, so the path is one step long."""
    point = x
    for _ in range(STEPS):
        point = into_ball(x + epsilon / 8 * gradient(model, point, y).sign(), x, epsilon)
    return point


def lost_update(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """The step goes to a variable that nothing reads."""
    point = x
    for _ in range(STEPS):
        moved = point + epsilon / 8 * gradient(model, point, y).sign()
        into_ball(moved, x, epsilon)
    return point


def labels_from_one(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """Classes counted from one, as in data with a background class."""
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    return pgd(model, x, (y + 1) % classes, epsilon=epsilon)


def inverted_mask(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """Returns what it found where it found nothing, and the inputs elsewhere."""
    point = pgd(model, x, y, epsilon=epsilon)
    with torch.no_grad():
        fooled = model(point).argmax(1) != y
    return torch.where(fooled.view(-1, 1, 1, 1), x, point)


def l2_step(model: nn.Module, point: Tensor, y: Tensor, epsilon: float) -> Tensor:
    slope = gradient(model, point, y)
    # Squares of the gradients of cross-entropy far from the decision boundary round to 0.
    slope = slope / slope.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-38)
    return point + epsilon / 8 * slope / slope.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)


def l2_pgd(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    point = x
    for _ in range(STEPS):
        moved = l2_step(model, point, y, epsilon) - x
        length = moved.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
        point = (x + moved * (epsilon / length).clamp_max(1)).clamp(0, 1)
    return point


def cube_for_sphere(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
    """Steps in l2, and a projection into the linf ball of the same radius."""
    point = x
    for _ in range(STEPS):
        point = into_ball(l2_step(model, point, y, epsilon), x, epsilon)
    return point


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, its twin, and what a diagnosis has to state first."""

    name: str
    code: str
    layer: str | None = None
    model: Callable[[], nn.Module] = digits_network
    attack: Attack = pgd
    healthy_model: Callable[[], nn.Module] = digits_network
    healthy_attack: Attack = pgd
    threat_model: ThreatModel = LINF


def of_layer(name: str, code: str, layer: str, faulty: Function, sound: Function, place: Place = before) -> Fault:
    """A fault of a module of this name in the digits network."""
    return Fault(
        name=name,
        code=code,
        layer=layer,
        model=partial(place, layer, faulty),
        healthy_model=partial(place, layer, sound),
    )


FAULTS = (
    of_layer("thermometer encoding", "cut_gradient", "encode", thermometer, soft_thermometer),
    of_layer("gradient of a decoy", "wrong_gradient", "align", decoy, torch.clone),
    Fault(
        name="another model at every other call",
        code="random_output",
        layer="alternate",
        model=partial(alternating, alternate=True),
        healthy_model=partial(alternating, alternate=False),
    ),
    of_layer("inputs standardised by their batch", "batch_dependent", "standardise", standardised, fixed_standardised),
    of_layer("half precision overflows", "non_finite_logits", "halves", in_half, in_single, within),
    Fault(name="every step from the clean input", code="short_path", attack=from_the_start),
    Fault(name="update lost", code="unmoved", attack=lost_update),
    Fault(name="labels counted from one", code="predicted_labels", attack=labels_from_one),
    Fault(name="success mask inverted", code="best_not_returned", attack=inverted_mask),
    Fault(
        name="linf ball for an l2 ball",
        code="left_ball",
        attack=cube_for_sphere,
        healthy_attack=l2_pgd,
        threat_model=L2,
    ),
)
