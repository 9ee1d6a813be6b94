"""What ``evaluate`` is given besides a plain classifier: a test-time defense, or a model that draws random numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from torch import nn

from robust_ext.core.criteria import Criterion, MultiLabel
from robust_ext.core.devices import run_device
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.inputs import Batches, EvaluationInputs, bounded_module, read_samples
from robust_ext.evaluations.adaptive.api import prepare_defense
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.evaluations.evaluate.separate import separate
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT
from robust_ext.models.function_purifier import WholeDefense

# Samples at most by which a defense inside a model is found.
_LOOKED_AT = 256


class _Judged(TypedDict):
    batch_size: int
    criterion: Criterion | None


@dataclass(frozen=True)
class Subject:
    """A test-time defense or a random model, evaluated instead of a plain classifier.

    Args:
        defense: The defense to judge.
        model: The random model that it is made of; None for a test-time defense.
    """

    defense: AdaptiveDefense
    model: nn.Module | None = None


def prepare(
    run: RunKeywords,
    model: object,
    inputs: Array | Batches,
    labels: Array | None,
    threat_model: ThreatModel,
    settings: EvaluateSettings,
    defense: object,
    weights: str | os.PathLike[str] | None,
    detector: object,
    criterion: Criterion | None,
) -> tuple[EvaluationInputs, Subject | None]:
    """Check a model and its samples; return the inputs, and the defense or random model, None for a classifier.

    Samples are read once: an iterator ends. A model that is an AdaptiveDefense is one, and one that holds one is taken
    apart, unless a detector may watch the whole or labels are several; a model whose logits change from call to call is
    judged by fresh draws, and its mean over draws that are held is what it is compared with.
    """
    samples, size = read_samples(inputs, labels, threat_model), settings.batch_size
    given, judged = (samples, samples.labels, threat_model, run), _Judged(batch_size=size, criterion=criterion)
    if isinstance(model, AdaptiveDefense) and defense is None:
        defense, model = model, model.classifier
    elif defense is None and detector is None and not isinstance(criterion, MultiLabel):
        module = bounded_module(model, threat_model, device=run.device)
        split = separate(module, samples.inputs[:_LOOKED_AT].to(run_device(module, run.device)))
        if split is not None:
            model, defense = split
    if defense is not None:
        found, made = prepare_defense(defense, model, *given, weights=weights, **judged)
        return found, Subject(made)
    try:
        return run.prepare(model, samples, samples.labels, threat_model, **judged), None
    except InconsistentModelError as error:
        if error.kind != "random":
            raise
        if isinstance(criterion, MultiLabel):
            expected = "another criterion, or the model with fixed draws, robust_ext.EoT(model, draws=8, fixed=True)"
            raise InvalidArgumentError("criterion", f"{criterion!r} for a random model", expected) from error
    module = bounded_module(model, threat_model, device=run.device)
    held = EoT(WholeDefense(module, module, random=True), draws=AdaptiveSettings().draws, seed=0, fixed=True)
    found, made = prepare_defense(WholeDefense(held, module, random=True), held, *given, **judged)
    return found, Subject(made, module)
