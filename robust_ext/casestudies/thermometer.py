"""Thermometer encoding: inputs become a code of 16 levels, by steps that have no gradient.

Source: Buckman, Roy, Raffel and Goodfellow, "Thermometer Encoding: One Hot Way To Resist Adversarial Examples" (2018),
sections 3 and 4; Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section
5.2.1, for what breaks it; Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.attacks._common.rows import check_batch, gradient_of
from robust_ext.attacks.adapted import adapted_text
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, Step, Watch
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.core.errors import AttackError, AttackRefusedError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network

LEVELS = 16
# Of the published code: the input 1 is in the highest level.
_STRETCH = LEVELS - 2e-4


class Quantise(nn.Module):
    """Inputs in [0, 1] rounded down to one of 16 levels, 0, 1/16, ..., 15/16."""

    def forward(self, x: Tensor) -> Tensor:
        """Levels of ``(N, ...)``, in its shape."""
        return (_STRETCH * x).floor() / LEVELS


class ThermometerCode(nn.Module):
    """The code of a level: bit k of 16 is 1 where the level is at least k sixteenths.

    Between levels the bits would rise one after another, each by a straight line; so the gradient that arrives at the
    levels is that of the two bits next to them, and ``quantise`` is the only layer that has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quantise = Quantise()

    def forward(self, x: Tensor) -> Tensor:
        """Code ``(N, 16 C, H, W)`` of inputs ``(N, C, H, W)`` in [0, 1]; the 16 bits of a channel follow each other."""
        bits = torch.arange(LEVELS, device=x.device, dtype=x.dtype).view(-1, 1, 1)
        code: Tensor = (LEVELS * self.quantise(x).unsqueeze(2) - bits + 1).clamp(0, 1)
        return code.flatten(1, 2)


class Standardise(nn.Module):
    """Each row with mean 0 and standard deviation 1 (at least that of one value among all)."""

    def forward(self, x: Tensor) -> Tensor:
        """Rows of ``(N, ...)``, in its shape."""
        axes = tuple(range(1, x.dim()))
        least = x[:1].numel() ** -0.5
        return (x - x.mean(axes, keepdim=True)) / x.std(axes, keepdim=True, unbiased=False).clamp_min(least)


class ThermometerNetwork(nn.Module):
    """Code, standardisation, features and a linear layer, from inputs ``(N, C, H, W)`` in [0, 1] to logits."""

    def __init__(self, shape: Sequence[int], classes: int, *, features: int = 64) -> None:
        super().__init__()
        channels, height, width = shape
        self.encode = ThermometerCode()
        self.standardise = Standardise()
        self.features = small_features((LEVELS * channels, height, width), features)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)``."""
        out: Tensor = self.head(self.features(self.standardise(self.encode(x))))
        return out


@settings_class
class LogitSpacePGA(NativeAttack):
    """The attack of the authors, logit-space projected gradient ascent (LS-PGA), on a network with a thermometer code.

    Every pixel has a logit for each level that the ball touches, all 0 at first. In each step the network is shown the
    mean code of the levels under the softmax of the logits at an inverse temperature, and the logits move along the
    gradient of the cross-entropy. In the end every pixel goes to the nearest input of its level with the highest logit.

    Source: Buckman et al. 2018, algorithm 3; settings are those of their published code.
    """

    name = "LS-PGA"
    traits = AttackTraits(batching="full", norms=("linf",), failure="last", seeds="none")
    aims = False

    steps: int = setting(default=7, help="Gradients it takes.", minimum=1, art="max_iter")
    step_size: float = setting(default=0.1, help="Of a step of the logits.", above=0)
    annealing: float = setting(default=1.2, help="What the inverse temperature grows by in each step.", above=0)
    signed: bool = setting(
        default=False,
        help="Whether steps are along the sign of the gradient, as in the paper. In the published code they are along "
        "the gradient itself, so that the logits hardly move and the levels are chosen by the first gradient.",
    )

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; an AttackRefusedError where the target has no thermometer code."""
        if batch.targeted:
            raise AttackRefusedError(f"{self.name}: it cannot aim at a class; choose targeted=False")
        encoders = [part for part in batch.target.module.modules() if isinstance(part, ThermometerCode)]
        if len(encoders) != 1:
            raise AttackRefusedError(
                f"{self.name}: got a target with {len(encoders)} layers ThermometerCode, expected one; it attacks "
                "the code that such a layer makes, so choose another attack here"
            )
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        return self.points(batch.target.module, inputs, labels, batch.threat_model, watch=batch.watch)

    def points(
        self,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        threat_model: ThreatModel,
        *,
        watch: Watch | None = None,
    ) -> Tensor:
        """Candidates ``(N, ...)`` against a module that has one :class:`ThermometerCode`, also one in training."""
        (encoder,) = (part for part in module.modules() if isinstance(part, ThermometerCode))
        touched = _touched(inputs, threat_model)
        logits, sharpness = torch.zeros_like(touched, dtype=inputs.dtype), 1.0
        missing = AttackError(f"{self.name}: the target gives no gradients of its code")
        for number in range(self.steps):
            logits = logits.detach().requires_grad_(True)
            with torch.enable_grad():
                code = mean_code((sharpness * logits).where(touched, -torch.inf).softmax(2))
                with _showing(encoder, code):
                    value = cross_entropy(module(inputs), labels)
                gradient = gradient_of(value, logits, missing)
            logits = logits.detach() + self.step_size * (gradient.sign() if self.signed else gradient)
            sharpness *= self.annealing
            if watch is not None:
                watch(Step(number, self.steps, inputs, value.detach(), None))
        return _nearest(inputs, logits.where(touched, -torch.inf).argmax(2), threat_model)


def mean_code(shares: Tensor) -> Tensor:
    """The mean code of levels that have these shares, both ``(N, C, 16, H, W)``: bit k is the share of k and above."""
    return shares.flip(2).cumsum(2).flip(2)


def _touched(inputs: Tensor, threat_model: ThreatModel) -> Tensor:
    """Which levels the ball around each value reaches, bool ``(N, C, 16, H, W)``."""
    levels = torch.arange(LEVELS, device=inputs.device).view(-1, 1, 1)
    low, high = ((_STRETCH * one).floor().unsqueeze(2) for one in _ends(inputs, threat_model))
    return (levels >= low) & (levels <= high)


def _ends(inputs: Tensor, threat_model: ThreatModel) -> tuple[Tensor, Tensor]:
    reach, (low, high) = threat_model.epsilon, threat_model.bounds
    return (inputs - reach).clamp_min(low), (inputs + reach).clamp_max(high)


def _nearest(inputs: Tensor, levels: Tensor, threat_model: ThreatModel) -> Tensor:
    """The inputs of these levels, each of which the ball reaches, that are nearest, ``(N, C, H, W)``."""
    # A little inside of the level, as rounding decides at its ends.
    points = torch.clamp(inputs, (levels + 1e-3) / _STRETCH, (levels + 1 - 1e-3) / _STRETCH)
    return torch.clamp(points, *_ends(inputs, threat_model))


@contextmanager
def _showing(encoder: nn.Module, code: Tensor) -> Iterator[None]:
    """Inside, the encoder's code is this one."""
    with encoder.register_forward_hook(lambda *_: code.flatten(1, 2)):
        yield


class Thermometer(CaseStudy):
    """A network on thermometer codes, evaluated by LS-PGA as published, and by BPDA."""

    title = "Thermometer encoding"
    source = "Buckman, Roy, Raffel and Goodfellow, ICLR 2018"
    epsilons: ClassVar[Mapping[str, float]] = {"digits": 0.2, "mnist": 0.2, "cifar10": 8 / 255}
    published = Published(
        true=0.3,
        weak_score="< .95",
        right_score=">= .95",
        source="Athalye et al. 2018 (obfuscated-gradients, README), trained adversarially; 0 without",
    )
    causes = ("zero_gradient", "falls_behind")
    notes = (
        "LS-PGA is meant to take the sign of the gradient (LogitSpacePGA(signed=True)), and its published code takes "
        "the gradient itself: the logits hardly move, and the levels are those of one step. With the sign and 40 steps "
        "it finds as much as the right recipe. One start of APGD through BPDA misses some of what is planted, as the "
        "steps between levels stay in its way; ten starts do not."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        return ThermometerNetwork(shape, classes)

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train it by the cross-entropy on clean inputs and on those of one step of LS-PGA, in equal parts."""
        epsilon = self.epsilons["cifar10" if inputs.shape[1] == 3 else "digits"]
        threat_model, attack = ThreatModel(norm="linf", epsilon=epsilon), LogitSpacePGA(steps=1)

        def loss(rows: Tensor) -> Tensor:
            x, y = inputs[rows], labels[rows]
            found = attack.points(module, x, y, threat_model)
            both = module(torch.cat([x, found]))
            return nn.functional.cross_entropy(both, torch.cat([y, y]))

        epochs = 20 if inputs.shape[-1] < 16 else 6
        train_network(module, len(inputs), loss, epochs=epochs, batch_size=64, learning_rate=2e-3, seed=seed)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """The share of input values whose gradient of the cross-entropy is exactly zero."""
        points = inputs.clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(cross_entropy(module(points), labels).sum(), points)
        share = float((gradient == 0).double().mean())
        words = "Share of input values whose gradient of the cross-entropy is exactly zero; there where it is all."
        return Measurement(values={"share of zero gradients": share}, present=share == 1, words=words)

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """LS-PGA, 7 steps, as its published code acts."""
        words = "LS-PGA, 7 steps along the gradient where its sign is meant: it acts like a single step."
        return Recipe(attack=LogitSpacePGA(), words=words)

    def right(self, threat_model: ThreatModel) -> Recipe:
        """APGD on the margin through BPDA, from ten starts."""
        attack = "robust_ext:APGD(steps=50, loss='margin', restarts=10, stop_early=True)"
        words = "APGD on the difference of logits from ten starts, with the gradient of the identity for the rounding."
        return Recipe(attack=adapted_text(attack, bpda="encode.quantise"), words=words)
