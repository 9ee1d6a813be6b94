"""EMPIR: three networks of which two compute in few bits vote.

Sources: Sen, Ravindran and Raghunathan, "EMPIR: Ensembles of Mixed Precision Deep Networks for Increased Robustness
against Adversarial Attacks" (2020); Zimmermann et al. 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks._common.projections import project
from robust_ext.attacks._common.rows import check_batch, gradient_of, over_rows, random_start, row_streams
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.measuring import attacked
from robust_ext.casestudies.quantised import BITS, Members, Vote
from robust_ext.casestudies.recipes import PredictedLabels
from robust_ext.core.errors import AttackError, AttackRefusedError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts.ensemble import Ensemble
from robust_ext.models.readouts.linear import member_positions

# Training images: on few, the ensemble errs as often on these data as the original on CIFAR-10 (27%).
_IMAGES = 40
_ERRORS = 0.2
# Margins of zero have no unit; beyond its boundary by so many units a member is no further pushed.
_LEAST, _ENOUGH = 1e-6, 0.2


@settings_class
class EveryMember(NativeAttack):
    """Sign steps that lower the margins of all members at once, whether they agree with the vote or not.

    A member's margin counts in units of what it is at the input, and only as long as the member is on the label's side
    or beyond by less than a fifth: otherwise the member that gives way most easily, that of full precision, takes
    all. Steps shrink linearly. Of the points that are queried the one of highest margin of the vote is kept.

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
        """See :meth:`NativeAttack.candidates`; an AttackRefusedError where the target is no such ensemble."""
        if batch.targeted:
            raise AttackRefusedError(f"{self.name}: it cannot aim at a class; choose targeted=False")
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        streams = row_streams(len(inputs), batch.generator)
        members = _Members(batch.target.module, labels)
        missing = AttackError(f"{self.name}: the target gives no gradients")
        best, highest = inputs.clone(), inputs.new_full((len(inputs),), -torch.inf)
        with torch.no_grad():
            unit = members(inputs)[1].abs().clamp_min(_LEAST)
        for _ in range(self.restarts):
            points = random_start(inputs, batch.threat_model, streams)
            for number in range(self.steps):
                points = points.detach().requires_grad_(True)
                with torch.enable_grad():
                    logits, gained = members(points)
                    value = (gained / unit).clamp_max(_ENOUGH).sum(1)
                    gradient = gradient_of(value, points, missing)
                points = points.detach()
                reached = margin(logits.detach(), labels)
                better = reached > highest
                highest = torch.where(better, reached, highest)
                best = torch.where(over_rows(better, points), points, best)
                length = batch.threat_model.epsilon / 2 * (1 - number / self.steps)
                points = project(points + length * gradient.sign(), inputs, batch.threat_model)
        return best


class _Members:
    """What the members of a target gain on the labels, found in the ensemble or in its binarized classifier."""

    def __init__(self, module: nn.Module, labels: Tensor) -> None:
        self._module, self._labels = module, labels
        parts = list(module.modules())
        binarized = [part for part in parts if isinstance(part, BinarizedClassifier)]
        self._problems = next((part for part in binarized if isinstance(part.readout, Ensemble)), None)
        self._vote = next((part for part in parts if isinstance(part, Vote)), None)
        if self._problems is None and self._vote is None:
            raise AttackRefusedError(f"{EveryMember.name}: the target has no members that vote; choose another attack")

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, K)``, and how far each member's best other class is above the label's, ``(N, members)``."""
        seen: list[Tensor] = []
        problems, vote = self._problems, self._vote
        if problems is not None:
            with problems.features.register_forward_hook(lambda *call: seen.append(call[2])):
                logits: Tensor = self._module(points)
            index = problems.problems(points)
            parts = {name: getattr(problems, name) for name in (*problems.names, "threshold")}
            if index is not None:
                parts = {name: part[index] for name, part in parts.items()}
            along = member_positions(seen[-1].double(), parts) - parts["threshold"][:, None]
            return logits, torch.where(self._labels[:, None] == 0, along, -along)
        assert vote is not None
        with vote.register_forward_hook(lambda *call: seen.append(call[1][0])):
            logits = self._module(points)
        return logits, torch.stack([margin(member, self._labels) for member in vote.outputs(seen[-1]).unbind(1)], 1)


_WEAK = PredictedLabels(attack=ObjectivePGD(steps=40, rel_step_size=0.1))


class Empir(CaseStudy):
    """Three networks that vote, two of them with weights and activations of few bits."""

    title = "EMPIR"
    source = "Sen, Ravindran and Raghunathan 2020"
    published = Published(
        clean=0.7256, claimed=0.1355, weak_score=1.0, right_score=1.0, flagged=False, source="README of its code"
    )
    causes = ("predicted_labels",)
    settings: ClassVar[Mapping[str, Any]] = {"readout": "ensemble"}
    notes = (
        "In the paper's test the clean sample is classified correctly by construction, so an attack on predicted "
        "labels is one on true labels there: it scores 1.0. Canaries, which begin misclassified, show it. The "
        "ten-class outputs are softmaxes that are given to the cross-entropy as logits, the two-class ones are not."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        return nn.Sequential(Members(shape, 64), Vote(64, classes))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """By the cross-entropy of each member, on few images."""
        inputs, labels = inputs[:_IMAGES], labels[:_IMAGES]
        members, vote = _parts(module)

        def loss(rows: Tensor) -> Tensor:
            outputs = vote.outputs(members(inputs[rows]))
            return nn.functional.cross_entropy(outputs.flatten(0, 1), labels[rows].repeat_interleave(len(BITS)))

        train_network(module, len(inputs), loss, epochs=60, batch_size=16)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """Clean errors, and how many of them the weak recipe corrects and the right one does not."""
        attacks = {"predicted": _WEAK, "true": EveryMember()}
        values = {}
        with torch.no_grad():
            wrong = module(inputs).argmax(1) != labels
            values["clean errors"] = float(wrong.double().mean())
            for name, attack in attacks.items():
                found = attacked(module, attack, inputs[wrong], labels[wrong], threat_model, seed=seed)
                corrected = module(found).argmax(1) == labels[wrong]
                values[f"errors corrected by {name} labels"] = float(corrected.double().mean()) if len(found) else 0.0
        present = values["clean errors"] >= _ERRORS and values["errors corrected by predicted labels"] > 0
        words = (
            f"at least {_ERRORS:.0%} of clean images are misclassified, and attacks on predicted labels correct some"
        )
        return Measurement(values=values, present=present, words=words)

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """PGD on the mean of the members that agree, away from the class that they predict."""
        return Recipe(
            attack=_WEAK,
            words="PGD on the cross-entropy of the members that agree, with the predicted class as the label: where "
            "the vote is wrong, it may correct it",
        )

    def right(self, threat_model: ThreatModel) -> Recipe:
        """Steps against all members, away from the true class."""
        return Recipe(
            attack=EveryMember(),
            words="PGD against all members at once, with true labels, each as long as it has not given way",
        )

    def parts(self, module: nn.Module) -> object:
        """Features of the members and the vote."""
        return _parts(module)


def _parts(module: nn.Module) -> tuple[Members, Vote]:
    members, vote = cast(nn.Sequential, module)
    return cast(Members, members), cast(Vote, vote)
