"""The evaluation of a test-time defense as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.inputs import prepare_inputs
from robust_ext.engine.run import run_all
from robust_ext.engine.task import drive
from robust_ext.evaluations.adaptive.content import make_content
from robust_ext.evaluations.adaptive.options import AdaptiveOptions
from robust_ext.evaluations.adaptive.plan import as_steps
from robust_ext.evaluations.adaptive.probes import looks_like_probabilities, measure_cost, zero_gradients
from robust_ext.evaluations.adaptive.protocol import plan_runs
from robust_ext.evaluations.adaptive.result import AdaptiveResult
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.registry.defense import as_defense
from robust_ext.registry.model import as_module


def evaluate_defense(
    defense: object,
    attacks: object,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    *,
    classifier: object = None,
    defense_weights: str | os.PathLike[str] | None = None,
    surrogates: Mapping[str, object] | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    settings: AdaptiveSettings | None = None,
    **options: Unpack[AdaptiveOptions],
) -> AdaptiveResult:
    """Evaluate a defense that acts at test time against the static model it defends (Croce et al. 2022, section 4).

    All candidates are verified, and judged by the static model and by fresh draws of the defense. What counts is the
    worst case over all attacks, sample by sample.

    Args:
        defense: Anything :func:`robust_ext.as_defense` takes, as ``"hd(steps=5)"``.
        attacks: None or ``"recommended"``: every recommended attack, see :func:`plan_steps`. Else a :class:`Step`,
            anything :func:`robust_ext.as_attack` takes, or a list of these, ``"recommended"`` among them.
        inputs: Clean samples, float ``(N, ...)`` in bounds; for batch-level defenses a whole number of groups.
        labels: Their classes, int64 ``(N,)``.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        classifier: The static model: a torch module in eval mode from inputs to logits; a Foolbox model; an ART
            ``PyTorchClassifier``. Left out, that of an :class:`AdaptiveDefense`.
        defense_weights: File of the trained parts of a named defense.
        surrogates: Further networks by name, of the same classes and bounds, anything that ``classifier`` may be.
            Points that are best on them are transferred, as those of the static model are.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, attacks survive a kill and the same call goes on; ``result.json`` and ``report.html``
            are written there.
        progress: Show a progress bar on stderr.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`AdaptiveSettings`.

    Returns:
        The result; ``print`` shows its table.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits, or the defense returns something else.
        AttackRefusedError: An attack does not fit the defense.
        RunFolderError: The folder holds another run.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).eval()
        >>> x = torch.rand(6, 1, 4, 4)
        >>> y, rounded = network(x).argmax(1), lambda x: (x * 8).round() / 8
        >>> threat_model = ThreatModel(norm="linf", epsilon=0.5)
        >>> result = evaluate_defense(rounded, None, x, y, threat_model, classifier=network, steps=5, queries=10)
        >>> result.content["static"]["clean_accuracy"], result.static <= 1
        (1.0, True)
    """
    begun = time.perf_counter()
    checked = make_settings(AdaptiveSettings, options, base=settings)
    given = prepare_inputs(
        _static_model(defense, classifier),
        inputs,
        labels,
        threat_model=threat_model,
        sample_ids=sample_ids,
        batch_size=checked.batch_size,
    )
    made = as_defense(defense, given.module, given.inputs[:2], weights=defense_weights, bounds=threat_model.bounds)
    if made.group_size is not None and len(inputs) % made.group_size and not made.pad:
        raise InvalidArgumentError(
            "inputs", f"{len(inputs)} samples", f"a multiple of {made.group_size}: the defense treats so many together"
        )
    networks = {name: as_module(one, argument="surrogates").module for name, one in (surrogates or {}).items()}
    steps = as_steps(attacks, made, checked, threat_model=threat_model, surrogates=networks)
    runs = plan_runs(steps, given, made, checked)
    for run in runs:
        run.check()
    some, their_labels = given.rows(runs[0].blocks[0])
    warnings = _probe(made, some, their_labels)
    outcomes = drive(run_all(runs, out=out, progress=progress, title="test time"))
    if outcomes is None:
        return AdaptiveResult({})
    cost, total = measure_cost(made, some), time.perf_counter() - begun
    result = AdaptiveResult(make_content(list(outcomes.values()), cost=cost, warnings=warnings, total=total))
    if out is not None:
        result.save(out)
    return result


def _static_model(defense: object, classifier: object) -> object:
    if classifier is not None:
        return classifier
    if isinstance(defense, AdaptiveDefense):
        return defense.classifier
    raise InvalidArgumentError(
        "classifier", None, "the static model that is defended, as only an AdaptiveDefense brings its own"
    )


def _probe(defense: AdaptiveDefense, inputs: Tensor, labels: Tensor) -> list[str]:
    """Warnings that a few inputs suffice for."""
    with torch.no_grad(), seeded_globals(0):
        logits = defense(inputs)
    warnings = []
    if looks_like_probabilities(logits):
        warnings.append("The defense returns probabilities where logits are expected: losses on them saturate.")
    share = zero_gradients(defense, inputs, labels)
    if share is None:
        warnings.append("The defense has no gradients of its own: plain white-box attacks on it mean nothing.")
    elif share > 0:
        warnings.append(f"The defense's own gradients are zero on {share:.0%} of the samples looked at.")
    return warnings
