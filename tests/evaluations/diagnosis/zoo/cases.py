"""Faults of models and attacks, each with the same without the fault, what it should be called, and what fixes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from robust_ext import ThreatModel, as_attack
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.adapted import AdaptedAttack
from tests.evaluations.diagnosis.zoo import attacks, layers
from tests.evaluations.diagnosis.zoo.networks import batch_normalised, convolutional, scaled, trained, training
from tests.evaluations.diagnosis.zoo.published import resnet

LINF = ThreatModel(norm="linf", epsilon=0.1)
# A sixteenth, what grey levels of digits are apart.
LEVEL = ThreatModel(norm="linf", epsilon=1 / 16)
CIFAR = ThreatModel(norm="linf", epsilon=8 / 255)

SHORTER = "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)"
FOOLBOX = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"
ART = "art:ProjectedGradientDescent(max_iter=40, eps_step=0.01)"
TORCHATTACKS = "torchattacks:PGD(steps=40, alpha=0.01)"
QUICK = partial(attacks.pgd, steps=10, step=0.25)
ADV_LIB = "adv_lib:pgd_linf(steps=40)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """A fault, and its healthy twin.

    ``code`` and ``layer`` are what it should be called; ``model`` makes the model, with the fault or without, or the
    healthy one where there is a ``twin``, the ``attack`` without its fault. ``harm`` shows the fault: the ``"score"``
    of a binarization test, robust ``"accuracy"``, or, where evaluations refuse the faulty model, ``"refused"``: the
    accuracy of the healthy one on what is found by hand. ``remedy`` was found by hand: an attack, or settings of
    another view; None where the code has to be changed. ``published`` faults need the published network and CIFAR-10.
    """

    name: str
    code: str
    layer: str | None = None
    model: Callable[..., nn.Module] = convolutional
    attack: Any
    twin: Any = None
    threat_model: ThreatModel = LINF
    harm: str = "score"
    remedy: str | Mapping[str, Any] | None = None
    published: bool = False

    @property
    def of_model(self) -> bool:
        """Whether it is the model that is at fault."""
        return self.twin is None

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The model with the fault, and without."""
        return (self.model(faulty=True), self.model(faulty=False)) if self.of_model else (self.model(), self.model())

    def attacks(self) -> tuple[Any, Any]:
        """The attack with the fault, and without."""
        return self.attack, self.attack if self.of_model else self.twin


def _layered(name: str, layer: type[layers.Layer], *, faulty: bool) -> nn.Module:
    return convolutional(**{name: layer(faulty=faulty)})


def _loud(*, faulty: bool) -> nn.Module:
    return scaled(1000 if faulty else 1)


def _after(factor: float, layer: type[layers.Layer], name: str, *, faulty: bool) -> nn.Module:
    return scaled(factor, **{name: layer()}) if faulty else scaled(1)


def _in_training(make: Callable[[], nn.Module], name: str, *, faulty: bool) -> nn.Module:
    return training(make(), name) if faulty else make()


def _dropping() -> nn.Module:
    return convolutional(before="head", dropout=nn.Dropout(0.95))


def _noisy(*, faulty: bool) -> nn.Module:
    return convolutional(before="relu1", noise=layers.Noise(faulty=faulty))


def _hooked(*, faulty: bool) -> nn.Module:
    network = convolutional()
    if faulty:
        network.net.conv2.register_full_backward_hook(layers.silence)
    return network


def _louder() -> nn.Module:
    return scaled(2)


def _rounded_resnet(*, faulty: bool) -> nn.Module:
    return resnet(quantise=layers.Rounding(faulty=faulty))


def of_layer(title: str, code: str, name: str, layer: type[layers.Layer], attack: Any, **other: Any) -> Fault:
    """A fault of a layer in front of the network, which the identity's gradient fixes."""
    model, found = partial(_layered, name, layer), f"net.{name}"
    return Fault(name=title, code=code, layer=found, model=model, attack=attack, **{"remedy": {"bpda": found}, **other})


def of_model(
    title: str, code: str, model: Callable[..., nn.Module], attack: Any, layer: str | None = None, **other: Any
) -> Fault:
    """A fault of a model that is made by a function of whether it is faulty."""
    return Fault(name=title, code=code, layer=layer, model=model, attack=attack, **other)


_BLUR: dict[str, Any] = {"remedy": {"noise": 0.5, "eot": 16}}
_SQUASH = foolbox.attacks.LinfPGD(rel_stepsize=0.1)
_IN_MODEL = [
    of_layer("rounding", "zero_gradient", "quantise", layers.Rounding, FOOLBOX),
    of_layer("zero backward pass", "zero_gradient", "guard", layers.Guard, ADV_LIB),
    # The identity only approximates it, and a last step may lead back out: this one returns its best point.
    of_layer("JPEG", "zero_gradient", "jpeg", layers.Compressed, "adv_lib:apgd(n_iter=40)"),
    of_layer("argmax and one-hot", "cut_gradient", "codebook", layers.Codebook, attacks.pgd),
    of_layer("detach", "cut_gradient", "contrast", layers.Detached, attacks.pgd),
    of_layer("no_grad", "cut_gradient", "denoise", layers.Denoised, attacks.pgd),
    of_layer("NumPy and back", "cut_gradient", "gamma", layers.Gamma, FOOLBOX),
    of_layer("root in an untaken branch", "non_finite_gradient", "compand", layers.Companded, ART),
    of_layer("saturated sigmoid", "saturated_layer", "squash", layers.Staircase, _SQUASH),
    of_model(
        "k-winners", "wrong_gradient", partial(trained, "winners", layers.Winners), FOOLBOX, "net.winners", **_BLUR
    ),
    of_model("logits x 1000", "saturated_loss", _loud, FOOLBOX, remedy={"temperature": 1000.0}),
    of_model(
        "softmax outputs",
        "probabilities",
        partial(_after, 20, layers.Softmax, "softmax"),
        attacks.pgd,
        "net.softmax",
        harm="refused",
    ),
    of_model(
        "log outputs", "saturated_loss", partial(_after, 20, layers.LogSoftmax, "log"), TORCHATTACKS, harm="accuracy"
    ),
    of_model(
        "dropout on", "train_mode", partial(_in_training, _dropping, "dropout"), QUICK, "net.dropout", harm="refused"
    ),
    of_model(
        "batch statistics",
        "train_mode",
        partial(_in_training, batch_normalised, "norm"),
        attacks.pgd,
        "net.norm",
        harm="refused",
    ),
    of_layer("random resize", "random_output", "resize", layers.Resized, QUICK, harm="refused", remedy=None),
    of_model("noise", "random_output", _noisy, QUICK, "net.noise", harm="refused"),
    of_layer("in place", "changes_input", "shift", layers.Shifted, attacks.pgd, harm="refused", remedy=None),
]


def _of_attack(title: str, code: str, attack: Any, twin: Any, remedy: Any = None, **other: Any) -> Fault:
    """A fault of an attack; of :func:`attacks.pgd` where settings are given."""
    attack = partial(attacks.pgd, **attack) if isinstance(attack, dict) else attack
    return Fault(name=title, code=code, attack=attack, twin=twin, remedy=remedy, **other)


def _ascending(title: str, code: str, fault: str, *, harm: str = "score", **settings: Any) -> Fault:
    """A fault of an update by hand, and the same update without it."""
    # What the twin takes, where the settings of the fault would be one by themselves.
    sound = {**settings, "step": 0.1, "steps": 40} if fault == "early" else settings
    twin = partial(attacks.ascending, **sound)
    return Fault(
        name=title, code=code, harm=harm, attack=partial(attacks.ascending, fault=fault, **settings), twin=twin
    )


_PROJECTED, _SMALL = {"projected": True}, "foolbox:LinfPGD(steps=20, rel_stepsize=0.02)"
_TINY = "foolbox:LinfPGD(steps=10, rel_stepsize=0.005, random_start=False)"
_IN_ATTACK = [
    _of_attack("too few steps", "short_path", "art:ProjectedGradientDescent(max_iter=4, eps_step=0.01)", ART, ART),
    _of_attack("steps too small", "short_path", _SMALL, FOOLBOX, FOOLBOX),
    _of_attack(
        "steps too small, absolute",
        "short_path",
        "adv_lib:pgd_linf(steps=40, absolute_step_size=0.0005)",
        ADV_LIB,
        ADV_LIB,
    ),
    _of_attack(
        "step too large",
        "step_too_large",
        "foolbox:LinfPGD(steps=40, abs_stepsize=0.125)",
        "foolbox:LinfPGD(steps=40, abs_stepsize=0.005)",
        "robust_ext:APGD(steps=50)",
        model=partial(convolutional, wave=layers.Waves()),
        threat_model=LEVEL,
        harm="accuracy",
    ),
    _of_attack(
        "last instead of best",
        "best_not_returned",
        attacks.swinging,
        partial(attacks.swinging, keep="best"),
        {"keep_best": True},
    ),
    _of_attack("predicted labels", "predicted_labels", {"step": 0.4, "labels": "predicted"}, attacks.pgd),
    _of_attack("wrong bounds", "wrong_bounds", {"bounds": (-1, 1)}, attacks.pgd, _PROJECTED),
    _of_attack("stops for the batch", "stopped_early", {"stop": 0}, attacks.pgd, {"one_by_one": True}),
    _of_attack("targeted for untargeted", "toward_label", {"targeted": True}, attacks.pgd, {"aimed": True}),
    _of_attack(
        "epsilon of another scale",
        "epsilon_scale",
        "torchattacks:PGD(eps=0.1/255, alpha=0.01/255, steps=40)",
        TORCHATTACKS,
        TORCHATTACKS,
    ),
    _of_attack("wrong sign", "toward_label", {"sign": -1}, attacks.pgd),
    _of_attack("no projection", "left_ball", {"projected": False}, attacks.pgd, _PROJECTED),
]
_IN_UPDATE = [
    _ascending("momentum of the wrong sign", "off_gradient", "momentum"),
    _ascending("inputs normalised twice", "other_points", "normalised", harm="accuracy"),
    _ascending("rounded to 8 bits in the loop", "vanishing_steps", "rounded", step=0.018, steps=160),
    _ascending("raises before it starts", "crashed", "named"),
    _ascending("ten classes for granted", "crashed_planted", "ten"),
    _ascending("step divided by the batch", "short_path", "batch"),
    _ascending("ends by itself, with small steps", "short_path", "early", step=0.01, steps=400),
    _ascending("steps that fade", "short_path", "fading"),
    _of_attack("wrong sign on large logits", "toward_label", {"sign": -1}, attacks.pgd, model=_louder),
    of_model("backward hook", "zero_gradient", _hooked, FOOLBOX, "net.conv2"),
    of_model(
        "k-winners of channels",
        "wrong_gradient",
        partial(trained, "winners", layers.Fewer),
        TORCHATTACKS,
        "net.winners",
        **_BLUR,
    ),
    of_layer(
        "rounding, with draws",
        "zero_gradient",
        "quantise",
        layers.Rounding,
        AdaptedAttack(attack=as_attack(FOOLBOX), eot=16),
    ),
]
_OF_CIFAR: dict[str, Any] = {"threat_model": CIFAR, "published": True}
_PUBLISHED = [
    of_model(
        "rounding, ResNet-20",
        "zero_gradient",
        _rounded_resnet,
        SHORTER,
        "quantise",
        remedy={"bpda": "quantise"},
        **_OF_CIFAR,
    ),
    _of_attack("steps too small, ResNet-20", "short_path", _TINY, SHORTER, SHORTER, model=resnet, **_OF_CIFAR),
]
FAULTS: tuple[Fault, ...] = (*_IN_MODEL, *_IN_ATTACK, *_IN_UPDATE, *_PUBLISHED)
