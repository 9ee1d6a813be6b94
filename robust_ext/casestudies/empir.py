"""EMPIR: three networks that vote, two of which compute in few bits.

Sources: Sen, Ravindran and Raghunathan, "EMPIR: Ensembles of Mixed Precision Deep Networks for Increased Robustness
against Adversarial Attacks" (2020); Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with
Low Bitwidth Gradients" (2016), section 2, for the quantisation; Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks._common.rows import check_batch, gradient_of, over_rows, project, random_start, row_streams
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe, Trained
from robust_ext.casestudies.networks import Parts, Training
from robust_ext.casestudies.recipes import PredictedLabels
from robust_ext.core.errors import AttackError, AttackRefusedError
from robust_ext.core.settings import setting, settings_class
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts.ensemble import Ensemble
from robust_ext.models.readouts.linear import member_positions

# Bits of weights and activations of the members; None is full precision.
BITS: tuple[tuple[int, int] | None, ...] = ((4, 2), (2, 2), None)
# Training images: on few, the ensemble errs as often on these data as the original on CIFAR-10 (27%).
_IMAGES = 40
# Least share of clean errors.
_ERRORS = 0.2
# The least unit of a margin, and the number of units beyond its boundary to which an attack pushes a member.
_LEAST, _ENOUGH = 1e-6, 0.2
_WEAK = PredictedLabels(attack=ObjectivePGD(steps=40, rel_step_size=0.1))


def quantise(values: Tensor, bits: int) -> Tensor:
    """Return values in [0, 1] rounded to the nearest of ``2^bits - 1`` equal steps, with the identity's gradient."""
    steps = 2**bits - 1
    rounded = torch.round(values * steps) / steps
    out: Tensor = values + (rounded - values).detach()
    return out


class QuantisedConv(nn.Conv2d):
    """A convolution with weights of few bits, and a ReLU clipped at 1 with outputs of few bits.

    Weights are ``2 q(tanh(w) / (2 max |tanh(w)|) + 1/2) - 1``, divided by the root of the number of values that each
    output sums, which keeps outputs in the range that is not clipped. Without bits, nothing is rounded or clipped.
    """

    def __init__(self, inputs: int, outputs: int, bits: tuple[int, int] | None, *, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1)
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs ``(N, C, H, W)``."""
        if self.bits is None:
            return super().forward(x).relu()
        bounded = self.weight.tanh()
        weight = 2 * quantise(bounded / (2 * bounded.abs().amax()) + 0.5, self.bits[0]) - 1
        weight = weight / self.weight[0].numel() ** 0.5
        out: Tensor = self._conv_forward(x, weight, self.bias).clamp(0, 1)
        return quantise(out, self.bits[1])


class Members(nn.Module):
    """The features of the three members, ``(N, 3, F)``."""

    def __init__(self, shape: Sequence[int], features: int) -> None:
        super().__init__()
        channels, height, width = shape
        size = 32 * -(-height // 2) * -(-width // 2)
        self.networks = nn.ModuleList(
            nn.Sequential(
                QuantisedConv(channels, 32, bits),
                QuantisedConv(32, 32, bits, stride=2),
                nn.Flatten(),
                nn.Linear(size, features),
                nn.ReLU(),
            )
            for bits in BITS
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of ``(N, C, H, W)``."""
        return torch.stack([network(x) for network in self.networks], 1)


class Vote(nn.Module):
    """A map of features ``(N, 3, F)`` to logits: the mean of the members that agree with the majority.

    If all three differ, the last member decides, that of full precision.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(features, classes) for _ in BITS)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits ``(N, K)``, whose largest is the vote's."""
        logits = self.outputs(features)
        choices = logits.argmax(2)
        # A majority without the last member is that of the first two.
        chosen = torch.where(choices[:, 0] == choices[:, 1], choices[:, 0], choices[:, -1])
        agree = (choices == chosen[:, None]).to(logits.dtype)
        return (logits * agree[:, :, None]).sum(1) / agree.sum(1, keepdim=True)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the logits of each member, ``(N, 3, K)``."""
        return torch.stack([head(part) for head, part in zip(self.heads, features.unbind(1), strict=True)], 1)


@settings_class
class EveryMember(NativeAttack):
    """Sign steps that lower the margins of all members at once, whether they agree with the vote or not.

    A member's margin counts in units of its value at the input, and only while the member is on the label's side or
    beyond by less than a fifth: otherwise the member that gives way most easily, that of full precision, takes all.
    Steps shrink linearly. The candidate is the queried point of highest margin of the vote.

    Example:
        >>> EveryMember(steps=50).name
        'PGD on every member'
    """

    name = "PGD on every member"
    traits = AttackTraits(batching="full", norms=("linf",), failure="best", seeds="generator")
    aims = False

    steps: int = setting(default=100, help="Gradients a run takes.", minimum=1, trial=20, art="max_iter")
    restarts: int = setting(default=2, help="Runs from random starts.", minimum=1, art="num_random_init")

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; AttackRefusedError for a target without such members."""
        if batch.targeted:
            raise AttackRefusedError(f"{self.name}: it cannot aim at a class; choose targeted=False")
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        streams = row_streams(len(inputs), batch.generator)
        missing = AttackError(f"{self.name}: the target gives no gradients")
        best, highest = inputs.clone(), inputs.new_full((len(inputs),), -torch.inf)
        with torch.no_grad():
            unit = _gains(batch.target.module, inputs, labels)[1].abs().clamp_min(_LEAST)
        for _ in range(self.restarts):
            points = random_start(inputs, batch.threat_model, streams)
            for number in range(self.steps):
                points = points.detach().requires_grad_(True)
                with torch.enable_grad():
                    logits, gained = _gains(batch.target.module, points, labels)
                    gradient = gradient_of((gained / unit).clamp_max(_ENOUGH).sum(1), points, missing)
                points, reached = points.detach(), margin(logits.detach(), labels)
                better = reached > highest
                best = torch.where(over_rows(better, points), points, best)
                highest = torch.where(better, reached, highest)
                length = batch.threat_model.epsilon / 2 * (1 - number / self.steps)
                points = project(points + length * gradient.sign(), inputs, batch.threat_model)
        return best


def _gains(module: nn.Module, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``(N, K)``, and the best other class minus the label's for each member, ``(N, members)``.

    The members are those of the ensemble in the module, or of its binarized classifier.
    """
    parts, seen = list(module.modules()), list[Tensor]()
    binarized = [part for part in parts if isinstance(part, BinarizedClassifier) and isinstance(part.readout, Ensemble)]
    votes = [part for part in parts if isinstance(part, Vote)]
    if not binarized and not votes:
        raise AttackRefusedError(f"{EveryMember.name}: the target has no members that vote; choose another attack")
    if not binarized:
        with votes[0].register_forward_hook(lambda *call: seen.append(call[1][0])):
            logits: Tensor = module(points)
        return logits, torch.stack([margin(one, labels) for one in votes[0].outputs(seen[-1]).unbind(1)], 1)
    problems = binarized[0]
    with problems.features.register_forward_hook(lambda *call: seen.append(call[2])):
        logits = module(points)
    index = problems.problems(points)
    readout = {name: getattr(problems, name) for name in (*problems.names, "threshold")}
    if index is not None:
        readout = {name: part[index] for name, part in readout.items()}
    along = member_positions(seen[-1].double(), readout) - readout["threshold"][:, None]
    return logits, torch.where(labels[:, None] == 0, along, -along)


Network = Parts[Members, Vote]


class Empir(CaseStudy[Network]):
    """Three networks that vote, two of them with weights and activations of few bits."""

    title = "EMPIR"
    source = "Sen, Ravindran and Raghunathan 2020"
    published = Published(clean=0.7256, claimed=0.1355, weak_score=1.0, right_score=1.0, flagged=False)
    published_in = "README of its code"
    weak = Recipe(
        attack=_WEAK,
        words="PGD on the cross-entropy of the members that agree, with the predicted class as the label: where "
        "the vote is wrong, it may correct it",
    )
    right = Recipe(
        attack=EveryMember(),
        words="PGD against all members at once, with true labels, each as long as it has not given way",
    )
    causes = ("predicted_labels",)
    training = Training(epochs=(60, 60), batch_size=16)
    settings: ClassVar = {"readout": "ensemble"}
    notes = (
        "In the paper's test the clean sample is classified correctly by construction, so an attack on predicted "
        "labels is one on true labels there: it scores 1.0. Canaries, which begin misclassified, show it. The "
        "ten-class outputs are softmaxes that are given to the cross-entropy as logits, the two-class ones are not."
    )

    def build(self, shape: Sequence[int], classes: int) -> Network:
        """See :meth:`CaseStudy.build`."""
        return Parts(Members(shape, 64), Vote(64, classes))

    def train(self, module: Network, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Train on the first few images."""
        self.training.run(module, inputs[:_IMAGES], labels[:_IMAGES], partial(self.loss, module))

    def loss(self, module: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the members."""
        outputs = module.readout.outputs(module.features(inputs))
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.repeat_interleave(len(BITS)))

    def measure(self, case: Trained[Network]) -> Measurement:
        """Count clean errors, and those that each recipe corrects."""
        wrong = case.logits().argmax(1) != case.labels
        values = {"clean errors": float(wrong.double().mean())}
        errors = replace(case, inputs=case.inputs[wrong], labels=case.labels[wrong])
        for name, attack in {"predicted": _WEAK, "true": EveryMember()}.items():
            corrected = errors.accuracy(errors.attacked(attack)) if len(errors.inputs) else 0.0
            values[f"errors corrected by {name} labels"] = corrected
        present = values["clean errors"] >= _ERRORS and values["errors corrected by predicted labels"] > 0
        words = (
            f"at least {_ERRORS:.0%} of clean images are misclassified, and attacks on predicted labels correct some"
        )
        return Measurement(values=values, present=present, words=words)
