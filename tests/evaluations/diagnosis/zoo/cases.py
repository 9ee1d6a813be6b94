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

    Args:
        name: What is wrong, in a few words.
        code: What it should be called.
        layer: The module at fault; None where it is none.
        model: Makes the model, with the fault or without; a fault of the attack has one healthy model.
        attack: With the fault; also without it where the model is at fault.
        twin: The attack without the fault; the same where left out.
        threat_model: The norm, epsilon and bounds.
        harm: What shows the fault: the ``"score"`` of a binarization test, or robust ``"accuracy"``. ``"refused"``: the
            accuracy of the healthy model on what is found by hand, as evaluations refuse the one with the fault.
        remedy: What fixes it, found by hand: an attack, or settings of another view of the model; None where the code
            has to be changed.
        published: Whether it needs the published network and CIFAR-10, which are not part of the project.
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


_IN_MODEL = [
    of_layer("rounding", "zero_gradient", "quantise", layers.Rounding, FOOLBOX),
    of_layer("zero backward pass", "zero_gradient", "guard", layers.Guard, ADV_LIB),
    of_layer(
        "JPEG",
        "zero_gradient",
        "jpeg",
        layers.Compressed,
        # The identity only approximates it, and a last step may lead back out: this one returns its best point.
        "adv_lib:apgd(n_iter=40)",
    ),
    of_layer("argmax and one-hot", "cut_gradient", "codebook", layers.Codebook, attacks.pgd),
    of_layer("detach", "cut_gradient", "contrast", layers.Detached, attacks.pgd),
    of_layer("no_grad", "cut_gradient", "denoise", layers.Denoised, attacks.pgd),
    of_layer("NumPy and back", "cut_gradient", "gamma", layers.Gamma, FOOLBOX),
    of_layer("root in an untaken branch", "non_finite_gradient", "compand", layers.Companded, ART),
    of_layer(
        "saturated sigmoid", "saturated_layer", "squash", layers.Staircase, foolbox.attacks.LinfPGD(rel_stepsize=0.1)
    ),
    Fault(
        name="k-winners",
        code="wrong_gradient",
        layer="net.winners",
        model=partial(trained, "winners", layers.Winners),
        attack=FOOLBOX,
        remedy={"noise": 0.5, "eot": 16},
    ),
    Fault(name="logits x 1000", code="saturated_loss", model=_loud, attack=FOOLBOX, remedy={"temperature": 1000.0}),
    Fault(
        name="softmax outputs",
        code="probabilities",
        layer="net.softmax",
        model=partial(_after, 20, layers.Softmax, "softmax"),
        attack=attacks.pgd,
        harm="refused",
    ),
    Fault(
        name="log outputs",
        code="saturated_loss",
        model=partial(_after, 20, layers.LogSoftmax, "log"),
        attack=TORCHATTACKS,
        harm="accuracy",
    ),
    Fault(
        name="dropout on",
        code="train_mode",
        layer="net.dropout",
        model=partial(_in_training, _dropping, "dropout"),
        attack=QUICK,
        harm="refused",
    ),
    Fault(
        name="batch statistics",
        code="train_mode",
        layer="net.norm",
        model=partial(_in_training, batch_normalised, "norm"),
        attack=attacks.pgd,
        harm="refused",
    ),
    of_layer("random resize", "random_output", "resize", layers.Resized, QUICK, harm="refused", remedy=None),
    Fault(
        name="noise",
        code="random_output",
        layer="net.noise",
        model=_noisy,
        attack=QUICK,
        harm="refused",
    ),
    of_layer("in place", "changes_input", "shift", layers.Shifted, attacks.pgd, harm="refused", remedy=None),
]


def _ascending(title: str, code: str, fault: str, *, harm: str = "score", **settings: Any) -> Fault:
    """A fault of an update by hand, and the same update without it."""
    attack = partial(attacks.ascending, fault=fault, **settings)
    twin = partial(attacks.ascending, **{**settings, **_SOUND.get(fault, {})})
    return Fault(name=title, code=code, harm=harm, attack=attack, twin=twin)


# What the twins take, where the settings of the fault would be one by themselves.
_SOUND: dict[str, dict[str, Any]] = {"early": {"step": 0.1, "steps": 40}}
_IN_ATTACK = [
    Fault(
        name="too few steps",
        code="short_path",
        attack="art:ProjectedGradientDescent(max_iter=4, eps_step=0.01)",
        twin=ART,
        remedy=ART,
    ),
    Fault(
        name="steps too small",
        code="short_path",
        attack="foolbox:LinfPGD(steps=20, rel_stepsize=0.02)",
        twin=FOOLBOX,
        remedy=FOOLBOX,
    ),
    Fault(
        name="steps too small, absolute",
        code="short_path",
        attack="adv_lib:pgd_linf(steps=40, absolute_step_size=0.0005)",
        twin=ADV_LIB,
        remedy=ADV_LIB,
    ),
    Fault(
        name="step too large",
        code="step_too_large",
        model=partial(convolutional, wave=layers.Waves()),
        attack="foolbox:LinfPGD(steps=40, abs_stepsize=0.125)",
        twin="foolbox:LinfPGD(steps=40, abs_stepsize=0.005)",
        threat_model=LEVEL,
        harm="accuracy",
        remedy="robust_ext:APGD(steps=50)",
    ),
    Fault(
        name="last instead of best",
        code="best_not_returned",
        attack=attacks.swinging,
        twin=partial(attacks.swinging, keep="best"),
        remedy={"keep_best": True},
    ),
    Fault(
        name="predicted labels",
        code="predicted_labels",
        attack=partial(attacks.pgd, step=0.4, labels="predicted"),
        twin=attacks.pgd,
    ),
    Fault(
        name="wrong bounds",
        code="wrong_bounds",
        attack=partial(attacks.pgd, bounds=(-1, 1)),
        twin=attacks.pgd,
        remedy={"projected": True},
    ),
    Fault(
        name="stops for the batch",
        code="stopped_early",
        attack=partial(attacks.pgd, stop=0),
        twin=attacks.pgd,
        remedy={"one_by_one": True},
    ),
    Fault(
        name="targeted for untargeted",
        code="toward_label",
        attack=partial(attacks.pgd, targeted=True),
        twin=attacks.pgd,
        remedy={"aimed": True},
    ),
    Fault(
        name="epsilon of another scale",
        code="epsilon_scale",
        attack="torchattacks:PGD(eps=0.1/255, alpha=0.01/255, steps=40)",
        twin=TORCHATTACKS,
        remedy=TORCHATTACKS,
    ),
    Fault(name="wrong sign", code="toward_label", attack=partial(attacks.pgd, sign=-1), twin=attacks.pgd),
    Fault(
        name="no projection",
        code="left_ball",
        attack=partial(attacks.pgd, projected=False),
        twin=attacks.pgd,
        remedy={"projected": True},
    ),
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
    Fault(
        name="wrong sign on large logits",
        code="toward_label",
        model=_louder,
        attack=partial(attacks.pgd, sign=-1),
        twin=attacks.pgd,
    ),
    Fault(
        name="backward hook",
        code="zero_gradient",
        layer="net.conv2",
        model=_hooked,
        attack=FOOLBOX,
    ),
    Fault(
        name="k-winners of channels",
        code="wrong_gradient",
        layer="net.winners",
        model=partial(trained, "winners", layers.Fewer),
        attack=TORCHATTACKS,
        remedy={"noise": 0.5, "eot": 16},
    ),
    of_layer(
        "rounding, with draws",
        "zero_gradient",
        "quantise",
        layers.Rounding,
        AdaptedAttack(attack=as_attack(FOOLBOX), eot=16),
    ),
]
_PUBLISHED = [
    Fault(
        name="rounding, ResNet-20",
        code="zero_gradient",
        layer="quantise",
        model=_rounded_resnet,
        attack=SHORTER,
        threat_model=CIFAR,
        remedy={"bpda": "quantise"},
        published=True,
    ),
    Fault(
        name="steps too small, ResNet-20",
        code="short_path",
        model=resnet,
        attack="foolbox:LinfPGD(steps=10, rel_stepsize=0.005, random_start=False)",
        twin=SHORTER,
        threat_model=CIFAR,
        remedy=SHORTER,
        published=True,
    ),
]
FAULTS: tuple[Fault, ...] = (*_IN_MODEL, *_IN_ATTACK, *_IN_UPDATE, *_PUBLISHED)
