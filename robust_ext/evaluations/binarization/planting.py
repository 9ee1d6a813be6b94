"""Planted problems to be attacked by hand: one classifier, its inputs and labels; what comes back is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed
from robust_ext.core.settings import make_settings
from robust_ext.core.target import PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, as_tensor, check_bounds, from_unit, to_unit
from robust_ext.engine.inputs import check_samples
from robust_ext.engine.progress import Phases
from robust_ext.engine.verify import Verification, verify
from robust_ext.evaluations.binarization.attacking import count_planted
from robust_ext.evaluations.binarization.defense import Defense, counted_parts, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward, choose_forward
from robust_ext.evaluations.binarization.posing import fit_problems, pose
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.options import BinarizationOptions
from robust_ext.models.binarized import BinarizedClassifier, identifiable
from robust_ext.models.wrapping import Rescaled


@dataclass(frozen=True)
class Planted:
    """M binarized problems as one classifier with two classes: 0 for the inputs, 1 where something was planted.

    The classifier may be given all rows in order, as far from the inputs as an attack likes; and any rows near their
    inputs, in any order. Attacks that query some of the rows far from them (most of ART's that need no gradients) are
    to be run on one problem at a time, see :meth:`single`: on more they are refused. Made by :func:`plant`.
    """

    problems: Problems
    features: nn.Module
    settings: BinarizationSettings

    @property
    def module(self) -> BinarizedClassifier:
        """The classifier, from ``(n, ...)`` to logits ``(n, 2)``; its features are the network's own.

        Which problem a row belongs to: see :class:`robust_ext.models.binarized.BinarizedClassifier`, ``"auto"``.
        """
        return self.problems.classifier(self.features, self.settings, batching="auto")

    @property
    def judge(self) -> BinarizedClassifier:
        """The classifier for all rows in order, that of a random model by the majority over draws."""
        return self.problems.classifier(self.features, self.settings, batching="full", judge=True)

    @property
    def inputs(self) -> Tensor:
        """The inputs with planted points, ``(M, ...)``."""
        return self.problems.inputs

    @property
    def labels(self) -> Tensor:
        """Their class, 0, int64 ``(M,)``."""
        return torch.zeros(len(self.inputs), dtype=torch.int64, device=self.inputs.device)

    @property
    def samples(self) -> tuple[int, ...]:
        """The indices of these inputs among the given ones."""
        return self.problems.samples

    @property
    def planted(self) -> Tensor:
        """The planted points ``(M, N_b, ...)``; those that attacks are to find, or others like them."""
        return self.problems.planted

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.samples)

    def single(self, row: int) -> Planted:
        """Problem ``row`` alone: its classifier takes any points, however far from the input."""
        if not 0 <= row < len(self):
            raise InvalidArgumentError("row", row, f"an integer from 0 to {len(self) - 1}")
        return Planted(self.problems.select([row]), self.features, self.settings)

    def transform_bounds(self, bounds: Sequence[float]) -> Planted:
        """The same problems for inputs in other bounds: inputs, planted points and the threat model are moved there.

        Raises:
            InvalidArgumentError: The bounds are no pair (lowest, highest).
            ModelError: In these bounds something that is planted is lost to rounding.
        """
        ball, outer = self.settings.threat_model, check_bounds(bounds)
        if not ball.plain:
            raise InvalidArgumentError("bounds", outer, f"{ball.bounds}, as entries have limits or values of their own")

        def moved(points: Tensor) -> Tensor:
            return from_unit(to_unit(points.double(), ball.bounds), outer).to(points.dtype).clamp(*outer)

        given = self.problems
        inputs, planted, references = map(moved, (given.inputs, given.planted, given.references))
        problems = replace(given, inputs=inputs, planted=planted, references=references)
        wider = replace(ball, bounds=outer, epsilon=ball.epsilon * (outer[1] - outer[0]) / ball.width)
        settings = replace(self.settings, threat_model=wider)
        made = Planted(problems, Rescaled(self.features, ball.bounds, outer), settings)
        clean, *found = (made.verify(points).outcomes for points in (inputs, *planted.unbind(1)))
        lost = sum(start != "not_adversarial" or "found" not in row for start, *row in zip(clean, *found, strict=True))
        if lost:
            raise ModelError(
                f"bounds: in {outer} float32 loses {lost} of the {len(self)} planted examples to rounding; choose "
                "bounds that are wide compared with their distance from 0"
            )
        return made

    def verify(self, candidates: Array, *, attack: str = "attack") -> Verification:
        """Check candidates ``(M, ...)``, one a problem, see :func:`robust_ext.engine.verify.verify`."""
        module, ball = self.judge, self.settings.threat_model
        if isinstance(candidates, np.ndarray):
            candidates = as_tensor("candidates", candidates, expected="of shape (M, ...)")
        return verify(candidates, self.inputs, self.labels, module=module, threat_model=ball, attack=attack)

    def score(self, candidates: Array) -> float:
        """The test score: share of the problems that verified candidates ``(M, ...)`` solve."""
        return self.verify(candidates).outcomes.count("found") / len(self)


def count_plantable(
    forward: Forward,
    readout: nn.Module,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    defense: Defense,
) -> int:
    """Count the inputs ``(B, ...)`` with these ids in which a point can be planted that the detector accepts."""
    drawn = [draw_accepted(x, sample, settings, defense) for x, sample in zip(inputs, samples, strict=True)]
    phases = Phases(PassCounter())
    try:
        problems = pose(forward, readout, inputs, samples, drawn, settings, phases).problems
    except (ModelError, InvalidArgumentError):
        return 0
    if problems is None or not problems.samples:
        return 0
    counts = [
        count_planted(
            Planted(problems.select([row]), forward.module, settings).judge, problems.select([row]), defense=defense
        )
        for row in range(len(problems.samples))
    ]
    return int((torch.cat(counts) > 0).sum())


def plant(
    model: object,
    inputs: Array,
    threat_model: ThreatModel,
    *,
    device: str | torch.device | None = None,
    **options: Unpack[BinarizationOptions],
) -> Planted:
    """Plant an adversarial example for each input, as the binarization test does, for attacks to be run by hand.

    The test itself, :func:`robust_ext.binarization_test`, also measures how hard the problems are, poses canaries, and
    gives a verdict.

    Args:
        model: A torch module in eval mode, a pair ``(features, readout)``, a Foolbox model or an ART classifier.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds, N of at least 1.
        threat_model: Norm, epsilon and bounds.
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        **options: Settings of the test, see :class:`BinarizationSettings`.

    Raises:
        InvalidArgumentError: An argument is outside its range, or inputs are so alike that points near one
            cannot be told from points near another.
        ModelError: The model is no classifier, cannot be split, or nothing could be planted in it.

    Example:
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 99), nn.ReLU(), nn.Linear(99, 3)).eval()
        >>> planted = plant(model, torch.rand(5, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.1), inner_points=50)
        >>> planted.score(planted.inputs), planted.score(planted.planted[:, 0])
        (0.0, 1.0)
    """
    checked = make_settings(BinarizationSettings, options, threat_model=threat_model)
    inputs = check_samples(inputs, threat_model)
    features, readout, _, where = counted_parts(model, inputs, checked, PassCounter(), device=device)
    drawn = checked.fitting.measured(features, seed=derive_seed(checked.seed_of_judge, "measured"))
    some = inputs[:2].to(where)
    forward = choose_forward(features, some, rows=checked.forward_batch, fold=checked.fold, drawn=drawn)
    parts = []
    for start in range(0, len(inputs), checked.group_size):
        some = inputs[start : start + checked.group_size].to(where)
        samples = range(start, start + len(some))
        problems = fit_problems(forward, readout, some, samples, checked)
        parts.append(problems.select([row for row, good in enumerate(problems.separable.tolist()) if good]))
    whole = Problems.join(parts)
    if len(whole.samples) > 1 and not identifiable(whole.inputs, threat_model):
        raise InvalidArgumentError(
            "inputs",
            "some that are not two epsilon apart",
            "inputs more than two epsilon apart; drop those that are almost the same, or plant them one at a time",
        )
    counts = count_planted(Planted(whole, features.module, checked).judge, whole).tolist() if whole.samples else []
    kept = [row for row, count in enumerate(counts) if count]
    if not kept:
        raise ModelError(
            f"model: in none of the {len(inputs)} inputs could anything be planted: no readout of its features tells "
            "the planted point from the others, or none is adversarial again; try readout='max-margin' in place of "
            "'logistic', fewer inner_points, a smaller kappa, or more draws of a random model"
        )
    return Planted(whole.select(kept), features.module, checked)
