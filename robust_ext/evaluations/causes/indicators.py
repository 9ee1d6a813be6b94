"""From what an attack left of each sample to what is wrong with it.

Only samples that the model gets right and that the attack did not solve are evidence; each rule states how many show
its fault, and how many have to is a constant of :mod:`robust_ext.evaluations.causes.evidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks.base import Attack
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.causes import gradients, path, points
from robust_ext.evaluations.causes.evidence import Case, Entry
from robust_ext.evaluations.causes.finding import Finding, ranked, shown_by_most
from robust_ext.evaluations.causes.probes import ModelProbe

Trace = dict[str, Any]
# What the running minimum of the loss, scaled to [0, 1], may still fall in the last ten queries.
_FALLING = 0.05
_DRAWS = 100


def ioaf(
    entries: Sequence[Entry],
    *,
    unstable: float | None = None,
    unbounded: Sequence[Entry] | None = None,
    surrogate: Sequence[bool] | None = None,
) -> dict[str, float | None]:
    """The six indicators of an attack, by name; None where what one needs was not measured.

    ``unavailable_gradients``: the gradient was exactly zero, or was wanted and never came (theirs: at the clean input;
    here at any query). ``unstable_predictions``: see :func:`unstable_predictions`. ``silent_success``: the candidate is
    not adversarial, and a point of the path was. ``incomplete_optimization``: the running minimum of the loss, between
    its lowest and highest value, falls by more than .05 in the last ten queries. ``transfer_failure``: the surrogate is
    fooled and the target is not. ``unconstrained_attack_failure``: not even a point of the path is adversarial where
    any perturbation is allowed.

    Args:
        entries: What the attack left of each sample.
        unstable: What :func:`unstable_predictions` returned.
        unbounded: What the same attack left of the same samples where any perturbation is allowed.
        surrogate: Whether each candidate fools the network that it was made on, where that is another.

    Example:
        >>> trace = {"graphs": 9, "gradients": 9, "zero": 9, "best": -2.0, "lowest": -2.0, "recent": 0.0}
        >>> ioaf([{"outcome": "not_adversarial", "trace": trace}])["unavailable_gradients"]
        1.0
    """
    begun, free = _begun(entries), _begun(unbounded or ())
    traces = [entry["trace"] for entry in begun if entry.get("trace")]
    pairs = () if surrogate is None else zip(entries, surrogate, strict=True)
    return {
        "unavailable_gradients": _mean([_unavailable(one) for one in traces]),
        "unstable_predictions": unstable,
        "silent_success": _mean([_silent(entry) for entry in begun]),
        "incomplete_optimization": _mean([_incomplete(one) for one in traces]),
        "transfer_failure": _mean([fooled and entry["outcome"] not in BROKEN for entry, fooled in pairs]),
        "unconstrained_attack_failure": _mean([one["outcome"] not in BROKEN and not _silent(one) for one in free]),
    }


def _begun(entries: Iterable[Entry]) -> list[Entry]:
    return [one for one in entries if one["outcome"] not in LOST and one.get("correct") is not False]


def _unavailable(trace: Trace) -> bool:
    return bool(trace.get("zero") or (trace.get("graphs") and not trace.get("gradients")))


def _silent(entry: Entry) -> bool:
    return entry["outcome"] not in BROKEN and (entry.get("trace") or {}).get("adversarial_at") is not None


def _incomplete(trace: Trace) -> bool:
    best, lowest, recent = (trace.get(name) for name in ("best", "lowest", "recent"))
    if best is None or lowest is None or recent is None or best <= lowest:
        return False
    return bool(recent / (best - lowest) > _FALLING)


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def unstable_predictions(
    module: nn.Module, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, radius: float, seed: int = 0
) -> float:
    """The mean of min(1, |L(x + u) - L(x)| / |L(x)|) over samples and 100 draws of u, uniform in +-radius.

    Where L(x) is 0, it counts as 1. The published code draws from half the radius it states, and leaves the bounds;
    here all of it is used, within the bounds.

    Args:
        module: From inputs to logits.
        inputs: ``(N, ...)`` in bounds.
        labels: int64 ``(N,)``.
        threat_model: Its bounds are those of the inputs.
        radius: Of the neighbourhood, in the units of the inputs; 8 / 255 of the width of the bounds in the paper.
        seed: Of the draws.
    """
    low, high = threat_model.bounds
    generator, total = stream(seed, "unstable predictions"), 0.0
    with torch.no_grad():
        loss = -margin(module(inputs), labels)
        for _ in range(_DRAWS):
            noise = torch.rand(inputs.shape, generator=generator).mul_(2).sub_(1).to(inputs)
            near = -margin(module((inputs + radius * noise).clamp(low, high)), labels)
            change = torch.where(loss == 0, 1.0, (near - loss).abs() / loss.abs())
            total += float(change.clamp_max(1).nan_to_num(1.0).mean())
    return total / _DRAWS


Rule = Callable[[Case], Finding | None]
_CANDIDATES: tuple[Rule, ...] = (path.predicted_labels, points.wrong_bounds, points.left_ball, points.crashed)
# The first that applies explains those after it, and gradients that are not what they should be all ways of a path.
_GRADIENTS: tuple[Rule, ...] = (
    gradients.model_at_fault,
    points.other_points,
    path.toward_label,
    gradients.cut_gradient,
    gradients.zero_gradient,
    gradients.saturated_loss,
    gradients.non_finite_gradient,
    gradients.off_gradient,
    gradients.restricted,
    gradients.vanishing_steps,
)
_WAYS: tuple[Rule, ...] = (
    points.epsilon_scale,
    path.step_too_large,
    points.best_not_returned,
    points.stopped_early,
    points.unmoved,
    path.short_path,
    path.still_improving,
    path.flat_loss,
)


def find_attack_faults(
    name: str, attack: Attack, entries: Sequence[Entry], *, threat_model: ThreatModel, probe: ModelProbe | None = None
) -> list[Finding]:
    """Find an attack's faults, by its results on its samples; ranked.

    Args:
        name: How tables call it.
        attack: The attack, for its traits and for remedies in its own library's words.
        entries: One a sample, see :data:`robust_ext.evaluations.causes.evidence.Entry`.
        threat_model: What it was given.
        probe: What is known of the model; a fault of the model that explains what the attack did not solve is named
            with its layer in place of what it made of the gradients.
    """
    case = Case(name=name, attack=attack, entries=entries, threat_model=threat_model, probe=probe)
    found = [finding for rule in _CANDIDATES if (finding := rule(case)) is not None]
    first = _first(_GRADIENTS, case)
    if first is not None:
        if first.code in ("toward_label", "predicted_labels", "off_gradient"):
            # Then misclassified samples end in their label's class too.
            found = [one for one in found if one.code != "predicted_labels"]
        found.append(first)
    if (first is None or not shown_by_most(first)) and (way := _first(_WAYS, case)) is not None:
        found.append(way)
    if (note := gradients.no_gradient(case)) is not None:
        found.append(note)
    return ranked(found)


def most_likely(findings: Iterable[Finding]) -> Finding | None:
    """The finding that explains most, of those that are a fault; None where none is."""
    return next((finding for finding in ranked(findings) if finding.weight != "low"), None)


def _first(rules: Iterable[Rule], case: Case) -> Finding | None:
    return next((finding for rule in rules if (finding := rule(case)) is not None), None)
