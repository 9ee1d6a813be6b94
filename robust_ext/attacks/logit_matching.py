"""Logit matching: the logits of a clean point of another class, and the same ones under noise.

Sources: Tramer, Carlini, Brendel, Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), section on "The
Odds are Odd", who match the logits of a clean image of another class under the expectation over the detector's noise;
Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), section 4, where the attack is
taken up again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Queries, Task, gradient_of, no_classifier_gradients
from robust_ext.attacks._common.detector_aware import AwareAttack
from robust_ext.attacks._common.detector_aware_steps import STARTS
from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks._common.projected_ascent import REFERENCES, choose_reference, climb
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.validation import check_choice, check_integer, check_number

NOISES = ("normal", "uniform", "sign")
NETWORKS = ("both", "classifier", "detector")


class LogitMatching(AwareAttack):
    """Projected gradient ascent on ``margin_weight x min(margin, confidence) - |z - z(reference)|^2 / 2`` under noise.

    z are logits. An odds detector watches those of its own network, so these have to look like those of a clean point
    of another class, while the classifier under attack, which may be another (a binarized one), has to be fooled: by
    default the logits of ``"both"`` are matched, once where they are one network. The noise is averaged over: a point
    whose logits match only without it is what such detectors find.

    The detector's score is not followed, and needs no gradients; points are judged beside the ascent, and of those
    that were, the misclassified one of lowest excess is kept, a success if there was one (the one of highest margin
    where none was misclassified).

    Each step is ``samples`` forward and backward passes through each network whose logits are needed (the classifier's
    always, for its margin), and a judged point one call of classifier and detector. Before, inputs and references go
    forward once each.

    Targets need a detector and references (:attr:`Target.references`), of which the misclassification is to come: for
    targeted attacks they should be of the classes aimed at.

    Args:
        logits: Whose are matched: ``"classifier"``, the network of the ``"detector"``, or ``"both"``.
        reference: Which of several references a row is pulled to: the ``"nearest"`` in logits to the input, or the
            ``"mean"`` of their logits.
        margin_weight: At least 0.
        confidence: Margin in logits above which that term is content.
        samples: Noisy copies of a point, at least 1.
        noise: ``"normal"``, ``"uniform"`` or ``"sign"``.
        level: Standard deviation of the normal noise, largest value of the uniform one, or the value of signs, relative
            to the width of the bounds; 0 for none, when one sample is as good as many.
        steps: In each run, at least 1.
        step_size: Relative to epsilon: of signs for linf, of the gradient's direction for l2 and l1.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        check_every: How often points are judged, in steps; detectors that draw noise themselves are expensive to ask.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> LogitMatching(samples=5, noise="uniform", level=0.01).name
        'LogitMatching'
    """

    name = "LogitMatching"
    uses_scores = False

    def __init__(
        self,
        *,
        logits: str = "both",
        reference: str = "nearest",
        margin_weight: float = 0.5,
        confidence: float = 1.0,
        samples: int = 20,
        noise: str = "normal",
        level: float = 30 / 255,
        steps: int = 100,
        step_size: float = 0.01,
        restarts: int = 1,
        start: str = "random",
        check_every: int = 10,
    ) -> None:
        self.settings = {
            "logits": check_choice("logits", logits, NETWORKS),
            "reference": check_choice("reference", reference, REFERENCES),
            "margin_weight": check_number("margin_weight", margin_weight, minimum=0),
            "confidence": check_number("confidence", confidence, minimum=0),
            "samples": check_integer("samples", samples, minimum=1),
            "noise": check_choice("noise", noise, NOISES),
            "level": check_number("level", level, minimum=0),
            "steps": check_integer("steps", steps, minimum=1),
            "step_size": check_number("step_size", step_size, minimum=0, open_minimum=True),
            "restarts": check_integer("restarts", restarts, minimum=1),
            "start": check_choice("start", start, STARTS),
            "check_every": check_integer("check_every", check_every, minimum=1),
        }
        self.traits = AttackTraits(
            batching="full",
            detector=True,
            references=True,
            leaves_ball=level > 0,
            failure="best",
            seeds="generator",
        )

    def solve(self, task: Task) -> Tensor:
        """See :meth:`AwareAttack.solve`."""
        chosen = self.settings
        matched = _MatchedLogits(task, chosen["logits"], chosen["reference"])

        def ask(points: Tensor) -> tuple[Tensor, Tensor]:
            values, gradients = [], []
            for noise in self._noise(task):
                with torch.enable_grad():
                    x = points.detach().clone().requires_grad_(True)
                    logits, distance = matched(x + noise if noise is not None else x)
                    if chosen["margin_weight"] and not logits.requires_grad:
                        raise AttackRefusedError(no_classifier_gradients(self.name))
                    gained = margin(logits, task.labels)
                    gained = (-gained if task.targeted else gained).clamp_max(chosen["confidence"])
                    value = chosen["margin_weight"] * gained - distance / 2
                    gradients.append(gradient_of(value, x, no_classifier_gradients(self.name)))
                values.append(value.detach())
            return torch.stack(values).mean(0), torch.stack(gradients).mean(0)

        ways = {key: chosen[key] for key in ("steps", "step_size", "restarts", "start", "check_every")}
        return climb(task, Queries(task, name=self.name, samples=1), ask, **ways)

    def _noise(self, task: Task) -> list[Tensor | None]:
        """One noise for each sample, ``(N, ...)``; each row draws its own from its own generator."""
        level, samples = self.settings["level"] * task.threat_model.width, self.settings["samples"]
        if not level:
            return [None] * samples
        shape, kind = (samples, *task.inputs.shape[1:]), self.settings["noise"]
        rows = [_draw(shape, kind, stream) for stream in task.streams]
        return list((torch.stack(rows, 1).to(task.inputs) * level).unbind(0))


class _MatchedLogits:
    """The classifier's logits, and the squared distance of those that are matched to what they should be."""

    def __init__(self, task: Task, which: str, how: str) -> None:
        assert task.references is not None
        self._classifier, self._network = task.defended.classifier, task.defended.detector.classifier
        self._low, self._high = task.threat_model.bounds
        self._own = which != "detector" or self._classifier is self._network
        self._other = which != "classifier" and self._classifier is not self._network
        with torch.no_grad():
            groups = [self._run(points.clone())[1] for points in task.references.unbind(1)]
            self._wanted = choose_reference(groups, self._run(task.inputs.clone())[1], how)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Noisy points are clipped, as detectors do.
        logits, matched = self._run(x.clamp(self._low, self._high))
        return logits, (matched - self._wanted).square().sum(1)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self._classifier(x)
        matched = [logits] if self._own else []
        if self._other:
            matched.append(self._network(x))
        return logits, torch.cat(matched, 1)


def _draw(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    drawn = torch.rand(shape, generator=generator).mul_(2).sub_(1)
    return drawn if kind == "uniform" else torch.where(drawn < 0, -1.0, 1.0)
