"""Findings: what is wrong with an attack or a model, by what evidence, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

WEIGHTS = ("high", "medium", "low")
"""``"high"``: explains a failure by itself. ``"medium"``: weakens the attack. ``"low"``: worth knowing, no fault."""

# Every code with its weight, the causes that explain others first: of two findings of one weight the first is reported.
CODES: Mapping[str, str] = {
    # Of the setup, before any attack
    "label_offset": "high",
    "label_order": "high",
    "reversed_logits": "high",
    "input_scale": "high",
    "input_layout": "high",
    "batch_statistics": "high",
    "constant_output": "high",
    "chance_accuracy": "high",
    "threat_scale": "high",
    # Of the model, from probes
    "train_mode": "high",
    "changes_input": "high",
    # A mean over draws of no gradient is none.
    "cut_gradient": "high",
    "zero_gradient": "high",
    "random_output": "high",
    "batch_dependent": "high",
    "non_finite_logits": "high",
    "non_finite_gradient": "high",
    "wrong_gradient": "high",
    "saturated_layer": "high",
    "probabilities": "medium",
    "log_probabilities": "low",
    "saturated_loss": "high",
    # Of the attack, from its queries and candidates
    "predicted_labels": "high",
    "toward_label": "high",
    "other_points": "high",
    "off_gradient": "high",
    "restricted": "high",
    "vanishing_steps": "high",
    "wrong_bounds": "high",
    "epsilon_scale": "high",
    "left_ball": "high",
    "step_too_large": "high",
    "best_not_returned": "high",
    "stopped_early": "high",
    "crashed": "high",
    "unmoved": "high",
    "short_path": "high",
    "crashed_planted": "medium",
    "still_improving": "medium",
    "flat_loss": "medium",
    # Of a comparison with others
    "loop_at_fault": "medium",
    "random_wins": "medium",
    "gradient_free_wins": "medium",
    "single_step_wins": "medium",
    "transfer_wins": "medium",
    "weaker_kind": "medium",
    "larger_budget_less": "medium",
    "unbounded_fails": "medium",
    "falls_behind": "medium",
    "batch_size_matters": "medium",
    "no_gradient": "low",
}


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something to do about a finding.

    Args:
        words: What to do, in a sentence that begins with a verb.
        attack: The text of an attack to run; None where the attack has no text or is not to be changed.
        view: Settings of :class:`robust_ext.attacks.adapted.AdaptedAttack` that make the attack run on another view of
            the model, as in ``{"bpda": "net.quantise"}``; empty where ``attack`` says it all or nothing can be run.
        evaluate: Whether the remedy is to put the model into eval mode.
        transfer: Whether the remedy is to craft on the float network that a quantised one was made of.
        beside: Whether ``attack`` is to be run besides the attack that the finding is about, not in its place.
        code: Lines for the user's own attack or model, in its own names; empty where the words are enough.
        paste: What the caller can paste to run it: options of the command that was run, or lines of Python with the
            names ``model`` and ``attack``; filled in by :class:`robust_ext.evaluations.causes.pasting.Caller`.
        tried: What became of it where it was tried (:data:`robust_ext.evaluations.diagnosis.trying.OUTCOMES`).
    """

    words: str
    attack: str | None = None
    view: Mapping[str, Any] = field(default_factory=dict)
    evaluate: bool = False
    transfer: bool = False
    beside: bool = False
    code: str = ""
    paste: str = ""
    tried: str = ""

    @property
    def runnable(self) -> bool:
        """True if the project can run it."""
        return self.attack is not None or bool(self.view) or self.evaluate

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in ``result.json``."""
        return {**vars(self), "view": dict(self.view), "runnable": self.runnable}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Remedy:
        """The inverse of :meth:`to_dict`; what earlier versions held besides is left out."""
        return cls(**{one.name: entry[one.name] for one in fields(cls) if one.name in entry})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, or worth knowing.

    Args:
        code: One of :data:`CODES`.
        cause: What is wrong, in a sentence.
        evidence: The measurements, in sentences, with their numbers.
        attack: Name of the attack; None where it is about the model.
        samples: Number of samples that show it; None where it is not about single samples.
        of: Out of how many.
        unit: What these are.
        layer: Name of the module at fault, as in ``model.named_modules()``; None without one.
        remedies: What to do, the best first.
    """

    code: str
    cause: str
    evidence: tuple[str, ...] = ()
    attack: str | None = None
    samples: int | None = None
    of: int | None = None
    unit: str = "samples"
    layer: str | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def weight(self) -> str:
        """One of :data:`WEIGHTS`."""
        return CODES[self.code]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in ``result.json``."""
        plain = {**vars(self), "evidence": list(self.evidence), "remedies": [one.to_dict() for one in self.remedies]}
        return {**plain, "weight": self.weight}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`."""
        given = {key: value for key, value in entry.items() if key != "weight"}
        remedies = tuple(map(Remedy.from_dict, given["remedies"]))
        return cls(**{**given, "evidence": tuple(given["evidence"]), "remedies": remedies})


COMPARISONS = ("loop_at_fault", "random_wins", "gradient_free_wins", "single_step_wins", "transfer_wins", "weaker_kind")
"""Findings that say what other attacks find: a symptom, of which running these is no proof."""


def shown_by_most(finding: Finding) -> bool:
    """Return whether at least half of the samples show it, or it is not about single samples."""
    return not finding.samples or not finding.of or 2 * finding.samples >= finding.of


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by weight, those that most samples show before others, then those that explain others.

    How many samples show a comparison depends on how strong the others are.
    """
    order = list(CODES)

    def key(finding: Finding) -> tuple[int, bool, int, float]:
        share = finding.samples / finding.of if finding.samples and finding.of else 1.0
        few = not (shown_by_most(finding) or finding.code in COMPARISONS)
        return WEIGHTS.index(finding.weight), few, order.index(finding.code), -share

    return sorted(findings, key=key)
