"""All that was run for a diagnosis, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes.comparisons import compare_attacks
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MISLEADING, NO_GRADIENT
from robust_ext.evaluations.causes.indicators import find_attack_faults
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.remedies import for_classes, for_crash
from robust_ext.evaluations.diagnosis.examining import RANDOM, ROLES, Examined, Examiner, Ran


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the attacks and those they are compared with came to; empty where the model cannot be evaluated."""

    examiner: Examiner | None
    attacks: Mapping[str, Examined] = field(default_factory=dict)
    larger: Mapping[str, Mapping[str, Ran]] = field(default_factory=dict)
    references: Mapping[str, Ran] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # What the time was over before

    @classmethod
    def of(
        cls, examiner: Examiner | None, attacks: Mapping[str, Attack], *, watch: Callable[[str], object]
    ) -> Examination:
        """Run everything; ``watch`` is called with words for each step."""
        if examiner is None:
            return cls(examiner=None)
        examined, larger, references = dict[str, Examined](), dict[str, dict[str, Ran]](), dict[str, Ran]()
        left_out = list[str]()
        for name, attack in attacks.items():
            watch(name)
            try:
                examined[name] = examiner.examine(attack)
            except OutOfTimeError:
                left_out.append(name)
                continue
            left_out += [f"{name} on planted problems"] if examined[name].cut else []
            larger[name] = {}
            if examiner.settings.references and examined[name].ran.error is None:
                try:
                    for role, ran in examiner.larger(examined[name].ran):
                        watch(f"{name}, {role} budget")
                        larger[name][role] = ran
                except OutOfTimeError:
                    left_out.append(f"{name} with larger budgets")
        compared = examiner.references(attacks.values()) if examiner.settings.references else {}
        for name, attack in compared.items():
            watch(name)
            try:
                ran = examiner.reference(name, attack)
            except OutOfTimeError:
                left_out.append(name)
                continue
            # One that raises (no gradient comes back) has nothing to compare with.
            if ran.error is None:
                references[name] = ran
        return cls(examiner=examiner, attacks=examined, larger=larger, references=references, left_out=tuple(left_out))


def find(examination: Examination, probe: ModelProbe, *, threat_model: ThreatModel) -> list[Finding]:
    """Findings about the model, about each attack, and from comparing it with others.

    What spoils gradients of the model is one where an attack did not get past it.
    """
    found, examiner = list[Finding](), examination.examiner
    if examiner is None:
        # What was refused comes first; what gradients do is looked at when that is fixed.
        refused = [one for one in probe.findings if one.code not in MISLEADING]
        weighty = {one.code for one in refused if one.weight != "low"}
        if weighty == {"random_output"}:
            # But for gradients that are none: a mean over draws, which randomness is met with, is none either.
            return [one for one in probe.findings if one in refused or one.code in NO_GRADIENT]
        return refused if weighty else list(probe.findings)
    correct, random = examiner.given.correct.tolist(), examination.references.get(RANDOM)
    ran = dict[str, Ran]()
    for name, examined in examination.attacks.items():
        if examined.ran.error is not None:
            found.append(
                Finding(
                    code="crashed",
                    cause=f"It {_raised(examined.ran.error, name)}, and returned nothing.",
                    evidence=(examined.ran.error,),
                    attack=name,
                    remedies=for_crash(examined.ran.error),
                )
            )
            continue
        if examined.raised:
            classes, planted = examiner.given.logits.shape[1], examiner.settings.planted
            found.append(_raised_on_planted(name, examined, classes=classes, planted=planted))
        ran[name] = examined.ran
        entries = [*examined.ran.entries(correct, random), *examined.planted_entries]
        found += find_attack_faults(name, examined.ran.attack, entries, threat_model=threat_model, probe=probe)
    # An attack of the user's that has the name of a reference is the one that counts.
    compared = {**examination.references, **ran}
    budgets = {
        role: {
            name: examination.larger[name][role].entries(correct, None)
            for name in ran
            if role in examination.larger[name]
        }
        for role in ROLES
    }
    found += compare_attacks(
        {name: one.entries(correct, random) for name, one in compared.items()},
        {name: one.attack for name, one in compared.items()},
        judged=list(ran),
        **budgets,
    )
    codes = {finding.code for finding in found}
    past = () if codes & {"crashed", *MISLEADING} or not examination.attacks else MISLEADING
    return [*(finding for finding in probe.findings if finding.code not in past), *found]


def _raised_on_planted(name: str, examined: Examined, *, classes: int, planted: int) -> Finding:
    """An attack that raised on planted problems and not on the samples."""
    padded, count = examined.padded, min(planted, len(examined.ran.records))
    cause = f"It raised on planted problems, {'which have two classes, ' if classes > 2 else ''}and not on the samples"
    evidence = [
        str(examined.error),
        f"It ran on {len(examined.ran.records)} samples with {classes} classes, and raised on the problems of two "
        f"classes that were planted in the first {count} of them.",
    ]
    if padded is not None:
        cause = f"{cause}: it takes {classes} classes, or labels of its own, for granted"
        evidence.append(
            f"On the same problems, padded to {classes} classes that nothing is in, it ran, and found "
            f"{padded['score']:.2f} of what is planted."
        )
    return Finding(
        code="crashed_planted", cause=f"{cause}.", evidence=tuple(evidence), attack=name, remedies=for_classes()
    )


def _raised(error: str, name: str) -> str:
    """What an attack of this name raised, in a line."""
    text = error.removeprefix(f"{name}: ").split("\n")[0].partition("; ")[0].rstrip(".")
    _, found, raised = text.partition("raised ")
    return f"raised {raised[:160]}" if found else f"raised an error ({text[:160]})"
