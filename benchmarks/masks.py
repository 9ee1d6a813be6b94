"""Twelve masks on a plain network and thirteen held out, each with a twin of the same weights without it."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from robust_ext.casestudies.networks import small_features
from robust_ext.models.forms import evaluable
from tests.evaluations.diagnosis.held_out import decoy, soft_thermometer, thermometer
from tests.evaluations.diagnosis.models import jpeg
from tests.evaluations.diagnosis.zoo.layers import Detached, Layer, Rounding
from tests.evaluations.evaluate.test_separate import Denoise, Purify

EPSILON = 0.2
_FLOAT16 = 60_000  # Just below the largest number of half precision


class Ripple(Layer):
    """A sine of 120 periods in the range of a pixel, small next to what it is added to; its slope is up to 15."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return x + 0.02 * torch.sin(2 * torch.pi * 120 * x) if self.faulty else x


class Noise(Layer):
    """Noise of twice the budget."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return x + 2 * EPSILON * torch.randn_like(x) if self.faulty else x


class Resized(Layer):
    """The image at 70 to 100% of its size, somewhere on a black canvas; one draw a batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        if not self.faulty:
            return x
        full = x.shape[-1]
        size = int(torch.randint(round(0.7 * full), full + 1, ()))
        left, top = (int(torch.randint(0, full + 1 - size, ())) for _ in range(2))
        small = F.interpolate(x, size=(size, size), mode="bilinear")
        return F.pad(small, (left, full - size - left, top, full - size - top))


class Half(Layer):
    """Inputs in half precision and in a unit of their own: small gradients fall below its smallest number."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return (x * _FLOAT16).half().float() / _FLOAT16 if self.faulty else x


class Int8(Layer):
    """A ReLU whose results are stored in eight bits, in steps of a 127th of the largest of each row."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        x = x.relu()
        if not self.faulty:
            return x
        step = x.flatten(1).amax(1).clamp_min(1e-9).view(-1, *[1] * (x.dim() - 1)) / 127
        return (x / step).round().to(torch.int8).float() * step


class Winners(Layer):
    """The largest eighth of the activations, the others zero; or a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        if not self.faulty:
            return x.relu()
        flat = x.flatten(1)
        least = flat.topk(max(flat.shape[1] // 8, 1), 1).values[:, -1:]
        return (flat * (flat >= least)).view_as(x)


class Scaled(Layer):
    """Logits times a factor: the softmax is exactly one-hot, or the same for all classes."""

    def __init__(self, factor: float, *, faulty: bool) -> None:
        super().__init__(faulty=faulty)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return x * self.factor if self.faulty else x


class Ensemble(nn.Module):
    """The sum of the logits of a linear model and of a network, which has no gradient and five times the weight."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return self.first(x) + 5 * self.second(x)


class Switched(Layer):
    """One function with the fault, another without."""

    def __init__(self, fault: Callable[[Tensor], Tensor], sound: Callable[[Tensor], Tensor], *, faulty: bool) -> None:
        super().__init__(faulty=faulty)
        self.fault, self.sound = fault, sound

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return self.fault(x) if self.faulty else self.sound(x)


class Steps(Layer):
    """A sigmoid in sixteen steps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        x = x.sigmoid()
        return (15 * x).round() / 15 if self.faulty else x


class Cropped(Layer):
    """A window without two rows and columns, somewhere on a black canvas of the size of the image; one draw a batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        if not self.faulty:
            return x
        size = x.shape[-1] - 2
        left, top, right, bottom = (int(torch.randint(0, 3, ())) for _ in range(4))
        window = x[..., top : top + size, left : left + size]
        return F.pad(window, (right, 2 - right, bottom, 2 - bottom))


class Sharp(Layer):
    """A softmax at temperature .02 in the middle of the network, over groups of eight features."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return (x.view(len(x), -1, 8) / 0.02).softmax(2).flatten(1) if self.faulty else x


class Median(Layer):
    """The median of each pixel's neighbourhood of 3 x 3."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        if not self.faulty:
            return x
        return F.unfold(F.pad(x, (1, 1, 1, 1)), 3).view(*x.shape[:2], 9, -1).median(2).values.view_as(x)


class _Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, cotangent: Tensor) -> Tensor:
        return -cotangent


class Flipped(Layer):
    """The identity, whose gradient has the other sign."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return _Negated.apply(x) if self.faulty else x  # type: ignore[no-untyped-call, no-any-return]


class Dropped(Layer):
    """Dropout of a third of the pixels, which goes on after training."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        return F.dropout(x, 1 / 3, training=True) if self.faulty else x


class Neighbours(nn.Module):
    """How often each class is among the 15 nearest training images, by features (Papernot and McDaniel 2018).

    The twin weighs all of them by a Gaussian of the mean distance to the nearest.
    """

    def __init__(self, known: Tensor, labels: Tensor, *, faulty: bool) -> None:
        super().__init__()
        self.known, self.classes, self.faulty = known, F.one_hot(labels, 10).float(), faulty

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        squares = torch.cdist(x, self.known).square()
        nearest, rows = squares.topk(15, 1, largest=False)
        if self.faulty:
            return self.classes[rows].sum(1)
        return 15 * (-squares / nearest.mean(1, keepdim=True)).softmax(1) @ self.classes


class Codes(nn.Module):
    """Each eight features as the nearest of 16 that training images have (vector quantisation)."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known.view(len(known), -1, 8)[:: len(known) // 16][:16]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the class says."""
        parts = x.view(len(x), -1, 8)
        nearest = (parts[:, None] - self.known).square().sum(3).argmin(1)
        return self.known[nearest, torch.arange(parts.shape[1])].flatten(1)


class HalfWeights(nn.Module):
    """A network of float16 weights, computed in float16 from its inputs on."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.half()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits in float32."""
        out: Tensor = self.network(x.half())
        return out.float()


Build = Callable[[tuple[int, ...], bool], nn.Module]
Convert = Callable[[nn.Sequential, Tensor, Tensor], tuple[nn.Module, nn.Module]]


def _network(
    shape: tuple[int, ...], *, front: nn.Module | None = None, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    features = small_features(shape, activation=activation)
    return nn.Sequential(OrderedDict(mask=front or nn.Identity(), features=features, head=nn.Linear(64, 10)))


def _front(layer: Callable[..., nn.Module]) -> Build:
    return lambda shape, faulty: _network(shape, front=layer(faulty=faulty))


def _int8(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    return _network(shape, activation=partial(Int8, faulty=faulty))  # type: ignore[arg-type]


def _loud(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    network = _network(shape)
    network.add_module("scale", Scaled(1e5, faulty=faulty))
    return network


def _half(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    network = _network(shape, front=Half(faulty=faulty))
    network.add_module("scale", Scaled(1e-3, faulty=faulty))
    return network


def _winners(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    return _network(shape, activation=partial(Winners, faulty=faulty))  # type: ignore[arg-type]


def _steps(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    return _network(shape, activation=partial(Steps, faulty=faulty))  # type: ignore[arg-type]


def _sharp(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    network = _network(shape)
    network.head = nn.Sequential(Sharp(faulty=faulty), nn.Linear(64, 10))
    return network


def _ensemble(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 10))
    return Ensemble(linear, _network(shape, front=Detached(faulty=faulty)))


def _rounding(*, faulty: bool) -> nn.Module:
    layer = Rounding(faulty=faulty)
    layer.levels = 8
    return layer


def _plain(shape: tuple[int, ...], faulty: bool) -> nn.Module:
    return _network(shape)


def _half_weights(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    return HalfWeights(copy.deepcopy(network)).eval(), network


def _static(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    tools = torch.ao.quantization
    made = nn.Sequential(
        OrderedDict(enter=tools.QuantStub(), **dict(network.named_children()), leave=tools.DeQuantStub())
    )
    made = copy.deepcopy(made).eval()
    made.qconfig = tools.get_default_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tools.prepare(made, inplace=True)
        made(x[:256])
        return tools.convert(made), network


def _dynamic(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluable(torch.ao.quantization.quantize_dynamic(copy.deepcopy(network), {nn.Linear})), network


def _neighbours(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    known = network.features(x)
    hard, soft = (nn.Sequential(network.features, Neighbours(known, y, faulty=one)).eval() for one in (True, False))
    return hard, soft


def _codes(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    codes = Codes(network.features(x))
    return nn.Sequential(OrderedDict(features=network.features, codes=codes, head=network.head)).eval(), network


def _purified(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Sequential(Purify(network), network)).eval(), network


def _denoised(network: nn.Sequential, x: Tensor, y: Tensor) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Sequential(Denoise()), network).eval(), network


@dataclass(frozen=True, kw_only=True)
class Mask:
    """How to make a masked network and its twin.

    Args:
        build: Makes the network for a shape of inputs, with the fault or without.
        convert: Makes both of a trained network, training images and their labels, where the fault follows from these.
        trains: Whether the network is trained with the fault; else its weights are those of the twin.
        own: Whether the gradients that lead around the fault are the model's own, averaged over ``draws``.
    """

    build: Build = _plain
    convert: Convert | None = None
    trains: bool = False
    own: bool = False
    random: bool = False
    draws: int = 1
    blur: float = 0.0


MASKS = {
    "rounding": Mask(build=_front(_rounding)),
    "k-winners": Mask(build=_winners, trains=True, own=True, draws=20, blur=0.5),
    "JPEG": Mask(build=_front(partial(Switched, jpeg, torch.clone))),
    "thermometer": Mask(build=_front(partial(Switched, thermometer, soft_thermometer))),
    "detach": Mask(build=_front(partial(Switched, decoy, torch.clone))),
    "saturated logits": Mask(build=_loud),
    "ripple": Mask(build=_front(Ripple)),
    "noise": Mask(build=_front(Noise), trains=True, own=True, random=True, draws=20),
    "resize": Mask(build=_front(Resized), trains=True, own=True, random=True, draws=20),
    "float16": Mask(build=_half),
    "int8": Mask(build=_int8),
    "ensemble": Mask(build=_ensemble),
}
# Written once, after the search was finished, and measured as they are.
HELD_OUT = {
    "sigmoid steps": Mask(build=_steps),
    "crop": Mask(build=_front(Cropped), trains=True, own=True, random=True, draws=20),
    "softmax inside": Mask(build=_sharp, trains=True, own=True, draws=5, blur=0.5),
    "median": Mask(build=_front(Median), trains=True, own=True, draws=5, blur=0.5),
    "gradient sign": Mask(build=_front(Flipped)),
    "dropout": Mask(build=_front(Dropped), trains=True, own=True, random=True, draws=20),
    "half weights": Mask(convert=_half_weights),
    "static int8": Mask(convert=_static),
    "dynamic int8": Mask(convert=_dynamic),
    "nearest neighbours": Mask(convert=_neighbours),
    "vector codes": Mask(convert=_codes),
    "purifier": Mask(convert=_purified),
    "denoiser": Mask(convert=_denoised, random=True),
}
