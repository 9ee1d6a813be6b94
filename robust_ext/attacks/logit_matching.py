"""Logit matching: the logits of a clean point of another class, and the same ones under noise.

Sources: Tramer, Carlini, Brendel, Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), section on "The
Odds are Odd", who match the logits of a clean image of another class under the expectation over the detector's noise;
Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), section 4, where the attack is
taken up again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.detector_aware import AttackProblem, no_classifier_gradients
from robust_ext.attacks._common.matching import MatchingAttack, MatchingLoss, averaged
from robust_ext.attacks._common.rows import gradient_of
from robust_ext.core.settings import setting, settings_class


@settings_class
class LogitMatching(MatchingAttack):
    """Projected gradient ascent on ``margin_weight x min(margin, confidence) - |z - z(reference)|^2 / 2`` under noise.

    z are logits. An odds detector watches those of its own network, so these have to look like those of a clean point
    of another class, while the classifier under attack, which may be another (a binarized one), has to be fooled: by
    default the logits of ``"both"`` are matched, once where they are one network. The noise is averaged over: a point
    whose logits match only without it is what such detectors find.

    The detector's score is not followed, and needs no gradients; which of the points is kept, see
    :class:`MatchingAttack`.

    Each step is ``samples`` forward and backward passes through each network whose logits are needed (the classifier's
    always, for its margin), and an evaluated point one call of classifier and detector. Before, inputs and references
    go forward twice each.

    Targets need a detector and references (:attr:`Target.references`), of which the misclassification is to come: for
    targeted attacks they should be of the classes aimed at.

    Example:
        >>> LogitMatching(samples=5, noise="uniform", level=0.01).name
        'LogitMatching'
    """

    name = "LogitMatching"

    logits: str = setting(
        default="both",
        help='Network whose logits are matched: ``"classifier"``, the network of the ``"detector"``, or ``"both"``.',
        choices=("both", "classifier", "detector"),
    )
    margin_weight: float = setting(default=0.5, help="Weight of the classifier's term.", minimum=0)
    confidence: float = setting(default=1.0)
    samples: int = setting(default=20, help="Noisy copies of a point.", minimum=1, trial=2)
    noise: str = setting(
        default="normal",
        help='``"normal"``, ``"uniform"`` or ``"sign"``.',
        choices=("normal", "uniform", "sign"),
    )
    level: float = setting(
        default=30 / 255,
        help="Standard deviation of the normal noise, largest value of the uniform one, or the value of signs, "
        "relative to the width of the bounds; 0 for none, when one sample is as good as many.",
        minimum=0,
    )
    rel_step_size: float = setting(default=0.01)
    check_every: int = setting(
        default=10,
        help="How often points are evaluated, in steps; detectors that draw noise themselves are expensive to query.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("traits", replace(type(self).traits, leaves_ball=self.level > 0))

    @property
    def calls(self) -> int:
        """One, as the samples are noisy copies."""
        return 1

    def loss(self, problem: AttackProblem) -> MatchingLoss:
        """See :meth:`MatchingAttack.loss`."""
        assert problem.references is not None
        classifier, network = problem.defended.classifier, problem.defended.detector.classifier
        own = self.logits != "detector" or classifier is network
        other = self.logits != "classifier" and classifier is not network

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            """Return the classifier's logits, and those that are matched."""
            logits: Tensor = classifier(x)
            return logits, torch.cat([*[logits] * own, *([network(x)] if other else [])], 1)

        with torch.no_grad():
            groups = [run(points.clone())[1] for points in problem.references.unbind(1)]
            wanted = self.choose_reference(problem, groups, run(problem.inputs.clone())[1])

        def once(points: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
            x = points.detach().clone().requires_grad_(True)
            # Noisy points are clipped, as detectors do.
            logits, matched = run((x if noise is None else x + noise).clamp(*problem.threat_model.bounds))
            if self.margin_weight and not logits.requires_grad:
                raise no_classifier_gradients(self.name)
            distance = (matched - wanted).square().sum(1)
            value = self.margin_weight * self.gain(problem, logits) - distance / 2
            return value.detach(), gradient_of(value, x, no_classifier_gradients(self.name))

        return lambda points: averaged(once(points, noise) for noise in self._noise(problem))

    def _noise(self, problem: AttackProblem) -> list[Tensor | None]:
        """One noise for each sample, ``(N, ...)``; each row draws its own from its own generator."""
        level = self.level * problem.threat_model.width
        if not level:
            return [None] * self.samples
        shape = (self.samples, *problem.inputs.shape[1:])
        rows = [_draw(shape, self.noise, stream) for stream in problem.streams]
        return list((torch.stack(rows, 1).to(problem.inputs) * level).unbind(0))


def _draw(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    drawn = torch.rand(shape, generator=generator).mul_(2).sub_(1)
    return drawn if kind == "uniform" else torch.where(drawn < 0, -1.0, 1.0)
