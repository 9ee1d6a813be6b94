"""The findings of an evaluation, from its records: of every attack, and of the model where an attack calls for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.finding_texts import remedy, sentence
from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import typed
from robust_ext.engine.context import current_context
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.arms import ArmRun
from robust_ext.evaluations.causes.comparisons import compare_attacks
from robust_ext.evaluations.causes.evidence import Entry
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.indicators import find_attack_faults, most_likely
from robust_ext.evaluations.causes.probes import ModelProbe, probe_model

Probe = Callable[[], ModelProbe]
_Key = tuple[str | None, str, str | None]

OF_LABELS = ("predicted_labels", "toward_label", "best_not_returned", "stopped_early", "still_improving", "flat_loss")
"""Findings about attacks on the label's logit, which attacks on a detector or with another objective are not."""

PROBED = 32
"""Samples that are handed to the probes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attacked:
    """The results of one run of an attack on its samples.

    Args:
        name: How tables call the attack; runs with several budgets share it.
        attack: The attack.
        entries: One a sample, by its index, each as
            :func:`robust_ext.evaluations.causes.indicators.find_attack_faults` takes it.
        threat_model: What it was given.
        failed: Whether it failed by the evaluation's own rules.
        budgets: The largest distance that counts at each epsilon that it is judged at.
    """

    name: str
    attack: Attack
    entries: Mapping[int, Entry]
    threat_model: ThreatModel
    failed: bool
    budgets: Mapping[float, float]

    def faults(self, probe: ModelProbe | None = None) -> list[Finding]:
        """Return its faults, by its own samples and the probes of the model."""
        entries, model = list(self.entries.values()), self.threat_model
        return find_attack_faults(self.name, self.attack, entries, threat_model=model, probe=probe)

    def within(self, epsilon: float, indices: Iterable[int]) -> list[Entry]:
        """Its entries of these samples as they count at an epsilon."""
        limit = self.budgets[epsilon]
        entries = [self.entries[index] for index in indices]
        beyond = {"outcome": "not_adversarial"}
        return [one if (one["distance"] or 0.0) <= limit else {**one, **beyond} for one in entries]


def as_entry(record: Mapping[str, object], *, correct: bool, random_found: bool | None = None) -> Entry:
    """Return a record of an attack as an entry for the rules."""
    entry: dict[str, object] = {"correct": correct, "random_found": random_found}
    for key in ("outcome", "distance", "trace", "canary"):
        entry[key] = record.get(key)
    return entry


def broke_none(entries: Iterable[Entry]) -> bool:
    """Return whether an attack broke none of the samples that the model classifies right, of at least one."""
    begun = [entry["outcome"] for entry in entries if entry["correct"]]
    return bool(begun) and not any(outcome in BROKEN for outcome in begun)


def of_arm(outcome: Outcome[ArmRun], *, name: str) -> Attacked:
    """Return an attack's results on labelled samples; it failed if it broke none of those classified right."""
    run = outcome.run
    given = run.given
    right = given.correct.tolist()
    entries = {record["index"]: as_entry(record, correct=right[record["index"]]) for record in outcome.records}
    epsilons = [arm.epsilon for arm in run.arms if arm.epsilon is not None]
    slack = [replace(run.threat_model, epsilon=one).tolerance(given.inputs[0].numel()) for one in epsilons]
    return Attacked(
        name=name,
        attack=run.attack,
        entries=entries,
        threat_model=run.threat_model,
        failed=broke_none(entries.values()),
        budgets={epsilon: epsilon + more for epsilon, more in zip(epsilons, slack, strict=True)},
    )


def find_causes(attacked: Sequence[Attacked], probe: Probe, *, compared: bool = True) -> list[Finding]:
    """Find faults of attacks and model; ranked, one finding for each code, layer and attack.

    The model is probed only where an attack failed or shows a symptom. With ``compared``, attacks are compared with
    each other at each budget, and with themselves at a larger one.
    """
    others = list(chain.from_iterable(_compare(attacked, epsilon) for epsilon in _budgets(attacked) if compared))
    found = [*others, *chain.from_iterable(one.faults() for one in attacked)]
    if most_likely(found) is None and not any(one.failed for one in attacked):
        return ranked(found)
    probed = probe()
    return _once([*probed.findings, *others], {one: one.faults(probed) for one in attacked})


def prober(module: nn.Module, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, seed: int) -> Probe:
    """A function that probes a model on the first samples."""
    some = inputs[:PROBED], labels[:PROBED]
    return partial(probe_model, module, *some, threat_model=threat_model, seed=seed)


def judged_by_label(given: EvaluationInputs, finding: Finding) -> bool:
    """Return whether a finding makes sense here: with targets or ranks, attacks do not follow the label's logit."""
    return finding.code not in OF_LABELS or not (given.criterion.aims or given.criterion.ranks)


def explain(findings: Iterable[Finding], name: str, *, otherwise: str = "") -> str:
    """The most likely cause why an attack of this name failed and its remedy.

    Where none of the known causes applies it is ``otherwise``, or what to run next.
    """
    found = list(findings)
    likely = most_likely(one for one in found if one.attack == name)
    likely = most_likely(one for one in found if one.attack is None) if likely is None else likely
    if likely is None:
        by = "robust-ext diagnose" if current_context().command else "robust_ext.diagnose"
        return otherwise or (
            f"None of the known causes applies. Next: compare the attack with others on the same samples ({by})."
        )
    plain = likely.to_dict()
    advice = remedy(plain)
    return f"Most likely cause: {sentence(plain)}{f' Remedy: {advice}' if advice else ''}"


def _once(found: Sequence[Finding], faults: Mapping[Attacked, Sequence[Finding]]) -> list[Finding]:
    """All findings, ranked; of one attack, code and layer the first, with the budgets at which it shows."""
    runs = Counter[str | None](one.name for one in faults)
    budgets, once = dict[_Key, list[float]](), dict[_Key, Finding]()
    for one, mine in faults.items():
        for finding in mine:
            budgets.setdefault(_key(finding), []).append(one.threat_model.epsilon)
    for finding in ranked([*found, *chain.from_iterable(faults.values())]):
        once.setdefault(_key(finding), finding)
    return [
        replace(finding, evidence=(*finding.evidence, f"At epsilon {', '.join(map(typed, budgets[key]))}."))
        if key in budgets and runs[key[0]] > 1
        else finding
        for key, finding in once.items()
    ]


def _key(finding: Finding) -> _Key:
    return finding.attack, finding.code, finding.layer


def _budgets(attacked: Sequence[Attacked]) -> list[float]:
    return sorted({epsilon for one in attacked for epsilon in one.budgets})


def _compare(attacked: Sequence[Attacked], epsilon: float) -> list[Finding]:
    """Compare attacks at the same budget with each other, and with themselves at the largest."""
    beside = {one.name: one for one in attacked if epsilon in one.budgets}
    largest = _budgets(attacked)[-1]
    wider = {one.name: one for one in attacked if list(one.budgets) == [largest] != [epsilon]}
    runs = [*beside.values(), *wider.values()]
    indices = sorted(set.intersection(*(set(one.entries) for one in runs)))
    return compare_attacks(
        {name: one.within(epsilon, indices) for name, one in beside.items()},
        {name: one.attack for name, one in beside.items()},
        larger={name: one.within(largest, indices) for name, one in wider.items() if name in beside},
    )
