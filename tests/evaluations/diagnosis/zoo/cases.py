"""Faults of models and attacks, each with the same without the fault, what it should be called, and what fixes it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from robust_ext import ThreatModel, as_attack
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.adapted import AdaptedAttack
from tests.evaluations.diagnosis.zoo import attacks, layers
from tests.evaluations.diagnosis.zoo.networks import batch_normalised, convolutional, resnet, scaled, trained, training

LINF = ThreatModel(norm="linf", epsilon=0.1)

SHORTER = "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)"
FOOLBOX = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"
ART = "art:ProjectedGradientDescent(max_iter=40, eps_step=0.01)"
TORCHATTACKS = "torchattacks:PGD(steps=40, alpha=0.01)"
ADV_LIB = "adv_lib:pgd_linf(steps=40)"
PGD, QUICK = attacks.pgd, partial(attacks.pgd, steps=10, step=0.25)


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
        return (self.model(faulty=True), self.model(faulty=False)) if self.of_model else (self.model(), self.model())

    def attacks(self) -> tuple[Any, Any]:
        return self.attack, self.attack if self.of_model else self.twin


def of_model(title, code, model, attack, layer=None, **other):
    """A fault of a model that is made by a function of whether it is faulty."""
    return Fault(name=title, code=code, layer=layer, model=model, attack=attack, **other)


def of_layer(title, code, name, layer, attack, **other):
    """A fault of a layer in front of the network, which the identity's gradient fixes."""
    found = f"net.{name}"

    def model(*, faulty):
        return convolutional(**{name: layer(faulty=faulty)})

    return of_model(title, code, model, attack, found, **{"remedy": {"bpda": found}, **other})


def of_attack(title, code, attack, twin=PGD, remedy=None, **other):
    """A fault of an attack; of :func:`attacks.pgd` where settings are given."""
    attack = partial(PGD, **attack) if isinstance(attack, dict) else attack
    return Fault(name=title, code=code, attack=attack, twin=twin, remedy=remedy, **other)


def of_update(title, code, fault, *, harm="score", sound=None, **settings):
    """A fault of an update by hand, and the same update without it."""
    faulty, settings = partial(attacks.ascending, fault=fault, **settings), settings if sound is None else sound
    return of_attack(
        title, code, faulty, partial(attacks.ascending, **settings) if settings else attacks.ascending, harm=harm
    )


def _after(layer, name, *, faulty):
    return scaled(20, **{name: layer}) if faulty else scaled(1)


def _in_training(make, name, *, faulty):
    return training(make(), name) if faulty else make()


def _dropping():
    return convolutional(before="head", dropout=nn.Dropout(0.95))


def _noisy(faulty):
    return convolutional(before="relu1", noise=layers.Noise(faulty=faulty))


def _hooked(faulty):
    network = convolutional()
    if faulty:
        network.net.conv2.register_full_backward_hook(layers.silence)
    return network


_REFUSED, _PROJECTED = {"harm": "refused"}, {"projected": True}
_SOFTMAX, _LOG = partial(_after, nn.Softmax(1), "softmax"), partial(_after, layers.LogSoftmax(), "log")
_DROPOUT, _BATCH = partial(_in_training, _dropping, "dropout"), partial(_in_training, batch_normalised, "norm")
_WINNERS, _FEWER = (partial(trained, "winners", layer) for layer in (layers.Winners, layers.Fewer))
_OF_WINNERS = {"layer": "net.winners", "remedy": {"noise": 0.5, "eot": 16}}
_OF_WAVES = {
    "model": partial(convolutional, wave=layers.Waves()),
    # A sixteenth, what grey levels of digits are apart.
    "threat_model": ThreatModel(norm="linf", epsilon=1 / 16),
    "harm": "accuracy",
}
_OF_CIFAR = {"threat_model": ThreatModel(norm="linf", epsilon=8 / 255), "published": True}
_AVERAGED = AdaptedAttack(attack=as_attack(SHORTER), eot=4)
_SMALL = "foolbox:LinfPGD(steps=20, rel_stepsize=0.02)"
_ABSOLUTE = "adv_lib:pgd_linf(steps=40, absolute_step_size=0.0005)"
_LEAPS, _SHORT = (f"foolbox:LinfPGD(steps=40, abs_stepsize={step})" for step in (0.125, 0.005))
_TINY = "foolbox:LinfPGD(steps=10, rel_stepsize=0.005, random_start=False)"
_SCALED = "torchattacks:PGD(eps=0.1/255, alpha=0.01/255, steps=40)"
_SWINGING = attacks.swinging, partial(attacks.swinging, keep="best")

FAULTS: tuple[Fault, ...] = (
    of_layer("rounding", "zero_gradient", "quantise", layers.Rounding, FOOLBOX),
    of_layer("zero backward pass", "zero_gradient", "guard", layers.Guard, ADV_LIB),
    # The identity only approximates it, and a last step may lead back out: this one returns its best point.
    of_layer("JPEG", "zero_gradient", "jpeg", layers.Compressed, "adv_lib:apgd(n_iter=40)"),
    of_layer("argmax and one-hot", "cut_gradient", "codebook", layers.Codebook, PGD),
    of_layer("detach", "cut_gradient", "contrast", layers.Detached, PGD),
    of_layer("no_grad", "cut_gradient", "denoise", layers.Denoised, PGD),
    of_layer("NumPy and back", "cut_gradient", "gamma", layers.Gamma, FOOLBOX),
    of_layer("root in an untaken branch", "non_finite_gradient", "compand", layers.Companded, ART),
    of_layer(
        "saturated sigmoid", "saturated_layer", "squash", layers.Staircase, foolbox.attacks.LinfPGD(rel_stepsize=0.1)
    ),
    of_model("k-winners", "wrong_gradient", _WINNERS, FOOLBOX, **_OF_WINNERS),
    of_model(
        "logits x 1000",
        "saturated_loss",
        lambda faulty: scaled(1000 if faulty else 1),
        FOOLBOX,
        remedy={"temperature": 1000.0},
    ),
    of_model("softmax outputs", "probabilities", _SOFTMAX, PGD, "net.softmax", **_REFUSED),
    of_model("log outputs", "saturated_loss", _LOG, TORCHATTACKS, harm="accuracy"),
    of_model("dropout on", "train_mode", _DROPOUT, QUICK, "net.dropout", **_REFUSED),
    of_model("batch statistics", "train_mode", _BATCH, PGD, "net.norm", **_REFUSED),
    of_layer("random resize", "random_output", "resize", layers.Resized, QUICK, remedy=None, **_REFUSED),
    of_model("noise", "random_output", _noisy, QUICK, "net.noise", **_REFUSED),
    of_layer("in place", "changes_input", "shift", layers.Shifted, PGD, remedy=None, **_REFUSED),
    of_attack("too few steps", "short_path", "art:ProjectedGradientDescent(max_iter=4, eps_step=0.01)", ART, ART),
    of_attack("steps too small", "short_path", _SMALL, FOOLBOX, FOOLBOX),
    of_attack("steps too small, absolute", "short_path", _ABSOLUTE, ADV_LIB, ADV_LIB),
    of_attack("step too large", "step_too_large", _LEAPS, _SHORT, "robust_ext:APGD(steps=50)", **_OF_WAVES),
    of_attack("last instead of best", "best_not_returned", *_SWINGING, {"keep_best": True}),
    of_attack("predicted labels", "predicted_labels", {"step": 0.4, "labels": "predicted"}),
    of_attack("wrong bounds", "wrong_bounds", {"bounds": (-1, 1)}, remedy=_PROJECTED),
    of_attack("stops for the batch", "stopped_early", {"stop": 0}, remedy={"one_by_one": True}),
    of_attack("targeted for untargeted", "toward_label", {"targeted": True}, remedy={"aimed": True}),
    of_attack("epsilon of another scale", "epsilon_scale", _SCALED, TORCHATTACKS, TORCHATTACKS),
    of_attack("wrong sign", "toward_label", {"step": -0.1}),
    of_attack("no projection", "left_ball", {"reach": math.inf}, remedy=_PROJECTED),
    of_update("momentum of the wrong sign", "off_gradient", "momentum"),
    of_update("inputs normalised twice", "other_points", "normalised", harm="accuracy"),
    of_update("rounded to 8 bits in the loop", "vanishing_steps", "rounded", step=0.018, steps=160),
    of_update("raises before it starts", "crashed", "named"),
    of_update("ten classes for granted", "crashed_planted", "ten"),
    of_update("step divided by the batch", "short_path", "batch"),
    # The settings of the fault would be one by themselves.
    of_update("ends by itself, with small steps", "short_path", "early", sound={}, step=0.01, steps=400),
    of_update("steps that fade", "short_path", "fading"),
    of_attack("wrong sign on large logits", "toward_label", {"step": -0.1}, model=partial(scaled, 2)),
    of_model("backward hook", "zero_gradient", _hooked, FOOLBOX, "net.conv2"),
    of_model("k-winners of channels", "wrong_gradient", _FEWER, TORCHATTACKS, **_OF_WINNERS),
    of_layer("rounding, with draws", "zero_gradient", "quantise", layers.Rounding, _AVERAGED),
    of_model(
        "rounding, ResNet-20",
        "zero_gradient",
        lambda faulty: resnet(quantise=layers.Rounding(faulty=faulty)),
        SHORTER,
        "quantise",
        remedy={"bpda": "quantise"},
        **_OF_CIFAR,
    ),
    of_attack("steps too small, ResNet-20", "short_path", _TINY, SHORTER, SHORTER, model=resnet, **_OF_CIFAR),
)
