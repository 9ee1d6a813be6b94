"""The door of the attacks that know the detector: what they need is checked before anything is asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Task, no_score_gradients
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels


class AwareAttack(NativeAttack):
    """An attack on a classifier and its detector.

    Attributes:
        settings: Keyword arguments with which the constructor makes this attack.
        uses_scores: Whether it follows the gradient of the detector's score.
    """

    settings: Mapping[str, Any]
    uses_scores: bool = True

    @property
    def description(self) -> str:
        """All settings."""
        shown = ", ".join(f"{key}={_shown(value)}" for key, value in self.settings.items())
        return f"{type(self).__name__}({shown})"

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return one candidate for each input, see :meth:`NativeAttack.search`.

        Raises:
            AttackRefusedError: The target has no detector, no references where they are needed, or a detector whose
                score has no gradients where these are needed.
            InvalidArgumentError: Inputs or labels are not as described.
        """
        defended = target.defended
        self.check(threat_model=threat_model, detector=defended is not None)
        assert defended is not None
        if self.uses_scores and not defended.detector.differentiable:
            raise AttackRefusedError(
                no_score_gradients(self.name, defended, "is said to be of no use (differentiable=False)")
            )
        inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
        labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        references = self._references(target, inputs) if self.traits.references else None
        if not len(inputs):
            return inputs.clone()
        seed = draw_seed(generator)
        streams = [torch.Generator().manual_seed(draw_seed(generator)) for _ in range(len(inputs))]
        task = Task(
            defended=defended,
            references=references,
            inputs=inputs,
            labels=labels,
            threat_model=threat_model,
            streams=streams,
            targeted=targeted,
            watch=watch,
        )
        # Random detectors draw from the global generators.
        with seeded_globals(seed):
            return self.solve(task)

    @abstractmethod
    def solve(self, task: Task) -> Tensor:
        """Candidates ``(N, ...)`` for a task that is as it should be; global generators are seeded."""

    def _references(self, target: Target, inputs: Tensor) -> Tensor:
        references = target.references
        if references is None:
            raise AttackRefusedError(
                f"{self.name} imitates reference points, and this target has none; set Target.references, or choose an "
                "attack that needs none, such as robust_ext:JointLoss"
            )
        shape = tuple(references.shape)
        if shape[:1] + shape[2:] != tuple(inputs.shape) or not shape[1]:
            expected = f"{len(inputs)} groups of at least one point, shape {(len(inputs), 'R', *inputs.shape[1:])}"
            raise InvalidArgumentError("target.references", f"shape {shape}", expected)
        return references.to(inputs.device, inputs.dtype)


def check_flag(argument: str, value: object) -> bool:
    """Return ``value`` when it is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(argument, value, "True or False")
    return value


def _shown(value: object) -> str:
    """A setting in words that are the same in every process: a callable by where it is defined."""
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)
