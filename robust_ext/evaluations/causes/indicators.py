"""From what an attack left of each sample to what is wrong with it.

Only samples that the model gets right and that the attack did not solve are evidence; each rule states how many show
its fault, and how many have to is a constant of :mod:`robust_ext.evaluations.causes.evidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from robust_ext.attacks.base import Attack
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes import ball, candidates, gradients, path, updates
from robust_ext.evaluations.causes.evidence import Case, Entry, Probed
from robust_ext.evaluations.causes.finding import Finding, ranked, shown_by_most

Rule = Callable[[Case], Finding | None]
_GRADIENTS: tuple[Rule, ...] = (
    gradients.cut_gradient,
    gradients.zero_gradient,
    gradients.saturated_loss,
    gradients.non_finite_gradient,
)
_CANDIDATES: tuple[Rule, ...] = (
    candidates.predicted_labels,
    ball.wrong_bounds,
    ball.left_ball,
    candidates.crashed,
)
_UPDATES: tuple[Rule, ...] = (updates.off_gradient, updates.restricted, updates.vanishing_steps)
# The first that applies explains those after it, and gradients that are not what they should be all of these.
_WAYS: tuple[Rule, ...] = (
    ball.epsilon_scale,
    path.step_too_large,
    candidates.best_not_returned,
    candidates.stopped_early,
    candidates.unmoved,
    path.short_path,
    path.still_improving,
    path.flat_loss,
)


def find_attack_faults(
    name: str,
    attack: Attack,
    entries: Sequence[Entry],
    *,
    threat_model: ThreatModel,
    probe: Probed | None = None,
) -> list[Finding]:
    """What is wrong with an attack, by what it left of the samples it was run on; ranked.

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
    first = _first((gradients.model_at_fault, ball.other_points, path.toward_label, *_GRADIENTS, *_UPDATES), case)
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
