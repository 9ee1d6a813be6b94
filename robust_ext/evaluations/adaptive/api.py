"""The evaluation of a test-time defense as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.samples import check_samples
from robust_ext.evaluations.adaptive.content import make_content
from robust_ext.evaluations.adaptive.plan import Step, plan_steps
from robust_ext.evaluations.adaptive.probes import looks_like_probabilities, measure_cost, zero_gradients
from robust_ext.evaluations.adaptive.result import AdaptiveResult
from robust_ext.evaluations.adaptive.running import Subject, check_step, run_steps
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.registry.defense import as_defense
from robust_ext.registry.model import as_module


def evaluate_defense(
    model: object,
    defense: object,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    *,
    defense_weights: str | os.PathLike[str] | None = None,
    attacks: Sequence[Step] = (),
    surrogates: Mapping[str, object] | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    origin: Mapping[str, str] | None = None,
    **settings: Any,
) -> AdaptiveResult:
    """Evaluate a defense that acts at test time against the static model it defends (Croce et al. 2022, section 4).

    Every recommended attack is run, see :func:`plan_steps`; all candidates are verified, and judged by the static model
    and by fresh draws of the defense. What counts is the worst case over all attacks, sample by sample.

    Args:
        model: The static classifier: a torch module in eval mode from inputs to logits; a Foolbox model; an ART
            ``PyTorchClassifier``.
        defense: Anything :func:`robust_ext.registry.defense.as_defense` takes, as ``"hd(steps=5)"``.
        inputs: Clean samples, float ``(N, ...)`` in bounds; for batch-level defenses a whole number of groups.
        labels: Their classes, int64 ``(N,)``.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        defense_weights: File of the trained parts of a named defense.
        attacks: Further steps.
        surrogates: Further networks by name, of the same classes and bounds, anything that ``model`` may be. Points
            that are best on them are transferred, as those of the static model are.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, attacks survive a kill and the same call goes on; ``result.json`` and ``report.html``
            are written there.
        progress: Show a progress bar on stderr.
        origin: Where things came from, in words by name, kept with the settings.
        **settings: See :class:`AdaptiveSettings`.

    Returns:
        The result; ``print`` shows its table.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits, or the defense returns something else.
        AttackRefusedError: An attack does not fit the defense.
        RunFolderError: The folder holds another run.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).eval()
        >>> x = torch.rand(6, 1, 4, 4)
        >>> def rounded(x):
        ...     return (x * 8).round() / 8
        >>> threat_model = ThreatModel(norm="linf", epsilon=0.5)
        >>> result = evaluate_defense(network, rounded, x, network(x).argmax(1), threat_model, steps=5, queries=10)
        >>> result.content["static"]["clean_accuracy"], result.static <= 1
        (1.0, True)
    """
    begun = time.perf_counter()
    checked = make_settings(AdaptiveSettings, settings)
    given = check_samples(
        model,
        inputs,
        labels,
        bounds=threat_model.bounds,
        sample_ids=sample_ids,
        batch_size=checked.batch_size,
        bounds_argument="threat_model",
    )
    inputs, labels = given.inputs, given.labels
    defending = as_defense(defense, given.module, inputs[:2], weights=defense_weights, bounds=threat_model.bounds)
    group = defending.group_size
    if group is not None and len(inputs) % group and not defending.pad:
        raise InvalidArgumentError(
            "inputs", f"{len(inputs)} samples", f"a multiple of {group}: the defense treats so many together"
        )
    subject = Subject(
        defense=defending,
        inputs=inputs,
        labels=labels,
        samples=given.ids,
        threat_model=threat_model,
        classes=given.logits.shape[1],
        settings=checked,
    )
    warnings = _probe(defending, inputs[: subject.blocks()[0][-1] + 1], labels)
    networks = {name: as_module(one, argument="surrogates").module for name, one in (surrogates or {}).items()}
    steps = plan_steps(defending, checked, threat_model=threat_model, attacks=attacks, surrogates=networks)
    for step in steps:
        check_step(step, subject)
    folder = None if out is None else Path(out)
    with tqdm(total=(len(steps) + 1) * len(inputs), unit="candidate", disable=not progress, desc="test time") as bar:

        def advance(title: str, count: int) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update(count)

        outcomes, _ = run_steps(steps, subject, folder=folder, advance=advance)
    content = make_content(
        outcomes,
        subject,
        cost=measure_cost(defending, inputs[: subject.blocks()[0][-1] + 1]),
        described={
            "defense": type(defending).__name__,
            "origin": dict(origin or {}),
            "warnings": warnings,
            "total": time.perf_counter() - begun,
        },
    )
    result = AdaptiveResult(content)
    if folder is not None:
        result.save(folder)
    return result


def _probe(defense: AdaptiveDefense, inputs: Tensor, labels: Tensor) -> list[str]:
    """Warnings that a few inputs suffice for."""
    with torch.no_grad(), seeded_globals(0):
        logits = defense(inputs)
    warnings = []
    if looks_like_probabilities(logits):
        warnings.append("The defense returns probabilities where logits are expected: losses on them saturate.")
    share = zero_gradients(defense, inputs, labels[: len(inputs)])
    if share is None:
        warnings.append("The defense has no gradients of its own: plain white-box attacks on it mean nothing.")
    elif share > 0:
        warnings.append(f"The defense's own gradients are zero on {share:.0%} of the samples looked at.")
    return warnings
