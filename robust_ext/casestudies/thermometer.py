"""Thermometer encoding: inputs become a code of 16 levels, by steps that have no gradient.

Source: Buckman, Roy, Raffel and Goodfellow, "Thermometer Encoding: One Hot Way To Resist Adversarial Examples" (2018),
sections 3 and 4; Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section
5.2.1, for the attack that breaks it; Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.attacks._common.rows import check_batch, gradient_of
from robust_ext.attacks.adapted import adapted_text
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, Step, Watch
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe, Trained
from robust_ext.casestudies.networks import Training, small_features
from robust_ext.core.errors import AttackError, AttackRefusedError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel

LEVELS = 16
# As in the published code: the input 1 is in the highest level.
_STRETCH = LEVELS - 2e-4


class Quantise(nn.Module):
    """A map of inputs in [0, 1] down to one of 16 levels, 0, 1/16, ..., 15/16."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the levels of ``(N, ...)``, in its shape."""
        return (_STRETCH * x).floor() / LEVELS


class ThermometerCode(nn.Module):
    """The code of a level: bit k of 16 is 1 where the level is at least k sixteenths.

    Between levels the bits would rise one after another, each by a straight line. The gradient that arrives at the
    levels is that of the two bits next to them, and ``quantise`` is the only layer without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quantise = Quantise()

    def forward(self, x: Tensor) -> Tensor:
        """Return the code ``(N, 16 C, H, W)`` of inputs ``(N, C, H, W)``; the 16 bits of a channel are adjacent."""
        bits = torch.arange(LEVELS, device=x.device, dtype=x.dtype).view(-1, 1, 1)
        code: Tensor = (LEVELS * self.quantise(x).unsqueeze(2) - bits + 1).clamp(0, 1)
        return code.flatten(1, 2)


class Standardise(nn.Module):
    """A map of each row to mean 0 and standard deviation 1 (at least that of one value among all)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of ``(N, ...)``, in its shape."""
        axes = tuple(range(1, x.dim()))
        least = x[:1].numel() ** -0.5
        return (x - x.mean(axes, keepdim=True)) / x.std(axes, keepdim=True, unbiased=False).clamp_min(least)


class ThermometerNetwork(nn.Module):
    """Code, standardisation, features and a linear layer, from inputs ``(N, C, H, W)`` in [0, 1] to logits."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.encode = ThermometerCode()
        self.standardise = Standardise()
        self.features = small_features((LEVELS * channels, height, width))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``(N, K)``."""
        out: Tensor = self.head(self.features(self.standardise(self.encode(x))))
        return out


@settings_class
class LogitSpacePGA(NativeAttack):
    """The attack of the authors, logit-space projected gradient ascent (LS-PGA), on a network with a thermometer code.

    Every pixel has a logit for each level that the ball touches, all 0 at first. In each step the network receives the
    mean code of the levels under the softmax of the logits at an inverse temperature, and the logits move along the
    gradient of the cross-entropy. In the end every pixel goes to the nearest input of its level with the highest logit.

    Source: Buckman et al. 2018, algorithm 3; settings are those of their published code.
    """

    name = "LS-PGA"
    traits = AttackTraits(batching="full", norms=("linf",), failure="last", seeds="none")
    aims = False

    steps: int = setting(default=7, help="Gradients it takes.", minimum=1, art="max_iter")
    step_size: float = setting(default=0.1, help="Step size of the logits.", above=0)
    annealing: float = setting(default=1.2, help="Growth of the inverse temperature in each step.", above=0)
    signed: bool = setting(
        default=False,
        help="Whether steps are along the sign of the gradient, as in the paper. In the published code they are along "
        "the gradient itself, so that the logits hardly move and the levels are chosen by the first gradient.",
    )

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; AttackRefusedError for a target without a thermometer code."""
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
        """Return candidates ``(N, ...)`` against a module with one :class:`ThermometerCode`, also in training."""
        (encoder,) = (part for part in module.modules() if isinstance(part, ThermometerCode))
        low, high = threat_model.bounds
        ends = (inputs - threat_model.epsilon).clamp_min(low), (inputs + threat_model.epsilon).clamp_max(high)
        lowest, highest = ((_STRETCH * end).floor().unsqueeze(2) for end in ends)
        levels = torch.arange(LEVELS, device=inputs.device).view(-1, 1, 1)
        touched = (levels >= lowest) & (levels <= highest)
        logits, sharpness = torch.zeros_like(touched, dtype=inputs.dtype), 1.0
        missing = AttackError(f"{self.name}: the target gives no gradients of its code")
        for number in range(self.steps):
            logits = logits.detach().requires_grad_(True)
            with torch.enable_grad():
                code = mean_code((sharpness * logits).where(touched, -torch.inf).softmax(2)).flatten(1, 2)
                with encoder.register_forward_hook(lambda *_, code=code: code):
                    value = cross_entropy(module(inputs), labels)
                gradient = gradient_of(value, logits, missing)
            logits = logits.detach() + self.step_size * (gradient.sign() if self.signed else gradient)
            sharpness *= self.annealing
            if watch is not None:
                watch(Step(number, self.steps, inputs, value.detach(), None))
        chosen = logits.where(touched, -torch.inf).argmax(2)
        # Stay a little inside of the level, as rounding decides at its ends.
        nearest = torch.clamp(inputs, (chosen + 1e-3) / _STRETCH, (chosen + 1 - 1e-3) / _STRETCH)
        return torch.clamp(nearest, *ends)


def mean_code(shares: Tensor) -> Tensor:
    """Return the mean code of levels with these shares, both ``(N, C, 16, H, W)``: bit k is the share from k up."""
    return shares.flip(2).cumsum(2).flip(2)


class Thermometer(CaseStudy[ThermometerNetwork]):
    """A network on thermometer codes, evaluated by LS-PGA as published, and by BPDA."""

    network = ThermometerNetwork
    title = "Thermometer encoding"
    source = "Buckman, Roy, Raffel and Goodfellow, ICLR 2018"
    epsilons: ClassVar = {"digits": 0.2, "mnist": 0.2, "cifar10": 8 / 255}
    published = Published(true=0.3, weak_score="< .95", right_score=">= .95")
    published_in = "Athalye et al. 2018 (obfuscated-gradients, README), trained adversarially; 0 without"
    weak = Recipe(
        attack=LogitSpacePGA(),
        words="LS-PGA, 7 steps along the gradient where its sign is meant: it acts like a single step.",
    )
    right = Recipe(
        attack=adapted_text(
            "robust_ext:APGD(steps=50, loss='margin', restarts=10, stop_early=True)", bpda="encode.quantise"
        ),
        words="APGD on the difference of logits from ten starts, with the gradient of the identity for the rounding.",
    )
    causes = ("zero_gradient", "falls_behind")
    training = Training(epochs=(20, 6), batch_size=64, learning_rate=(2e-3, 2e-3))
    notes = (
        "LS-PGA is meant to take the sign of the gradient (LogitSpacePGA(signed=True)), and its published code takes "
        "the gradient itself: the logits hardly move, and the levels are those of one step. With the sign and 40 steps "
        "it finds as much as the right recipe. One start of APGD through BPDA misses some of what is planted, as the "
        "steps between levels stay in its way; ten starts do not."
    )

    def loss(self, module: ThermometerNetwork, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy on clean inputs and on those of one step of LS-PGA, in equal parts."""
        threat_model = ThreatModel(norm="linf", epsilon=self.budget(inputs))
        found = LogitSpacePGA(steps=1).points(module, inputs, labels, threat_model)
        return nn.functional.cross_entropy(module(torch.cat([inputs, found])), torch.cat([labels, labels]))

    def measure(self, case: Trained[ThermometerNetwork]) -> Measurement:
        """Measure the share of input values whose gradient of the cross-entropy is exactly zero."""
        share = float((case.gradients() == 0).double().mean())
        words = "Share of input values whose gradient of the cross-entropy is exactly zero; there where it is all."
        return Measurement(values={"share of zero gradients": share}, present=share == 1, words=words)
