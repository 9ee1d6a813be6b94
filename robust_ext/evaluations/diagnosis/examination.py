"""All runs of a diagnosis, and the findings that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes.comparisons import compare_attacks
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.gradients import MISLEADING, NO_GRADIENT
from robust_ext.evaluations.causes.indicators import find_attack_faults
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.remedies import for_crash
from robust_ext.evaluations.diagnosis.examining import RANDOM, ROLES, Examined, Examiner, Ran


@dataclass(kw_only=True)
class Examination:
    """The results of attacks and references; empty where the model cannot be evaluated."""

    examiner: Examiner | None
    attacks: dict[str, Examined] = field(default_factory=dict)
    larger: dict[str, dict[str, Ran]] = field(default_factory=dict)
    references: dict[str, Ran] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # What the time was over before

    def run(self, attacks: Mapping[str, Attack], watch: Callable[[str], object]) -> None:
        """Run everything; ``watch`` is called with words for each step."""
        if (examiner := self.examiner) is None:
            return
        for name, attack in attacks.items():
            watch(name)
            step = name
            try:
                self.attacks[name] = examined = examiner.examine(attack)
                self.left_out += [f"{name} on planted problems"] if examined.cut else []
                self.larger[name], step = {}, f"{name} with larger budgets"
                if examiner.settings.references and examined.ran.error is None:
                    for role, ran in examiner.larger(examined.ran):
                        watch(f"{name}, {role} budget")
                        self.larger[name][role] = ran
            except OutOfTimeError:
                self.left_out.append(step)
        for name, attack in examiner.references(attacks.values()).items():
            watch(name)
            try:
                ran = examiner.reference(name, attack)
            except OutOfTimeError:
                self.left_out.append(name)
                continue
            # One that raises (no gradient comes back) has nothing to compare with.
            if ran.error is None:
                self.references[name] = ran

    def findings(self, probe: ModelProbe, threat_model: ThreatModel) -> list[Finding]:
        """Return findings about the model, about each attack, and from comparing it with others.

        What spoils gradients of the model is one where an attack did not get past it.
        """
        if (examiner := self.examiner) is None:
            # Refusals come first; gradients are examined once those are fixed.
            refused = [one for one in probe.findings if one.code not in MISLEADING]
            weighty = {one.code for one in refused if one.weight != "low"}
            if weighty == {"random_output"}:
                # But for gradients that are none: a mean over draws, which randomness is met with, is none either.
                return [one for one in probe.findings if one in refused or one.code in NO_GRADIENT]
            return refused if weighty else list(probe.findings)
        found, ran = list[Finding](), dict[str, Ran]()
        correct, random = examiner.correct, self.references.get(RANDOM)
        for name, examined in self.attacks.items():
            if (error := examined.ran.error) is not None:
                cause = f"It {_raised(error, name)}, and returned nothing."
                remedies = (for_crash(error),)
                found.append(Finding(code="crashed", cause=cause, evidence=(error,), attack=name, remedies=remedies))
                continue
            if examined.raised:
                found.append(_raised_on_planted(name, examined, examiner))
            ran[name] = examined.ran
            entries = [*examined.ran.entries(correct, random), *examined.planted_entries]
            found += find_attack_faults(name, examined.ran.attack, entries, threat_model=threat_model, probe=probe)
        # An attack of the user's that has the name of a reference is the one that counts.
        compared = {**self.references, **ran}
        budgets = {
            role: {name: self.larger[name][role].entries(correct) for name in ran if role in self.larger[name]}
            for role in ROLES
        }
        found += compare_attacks(
            {name: one.entries(correct, random) for name, one in compared.items()},
            {name: one.attack for name, one in compared.items()},
            judged=list(ran),
            **budgets,
        )
        codes = {finding.code for finding in found}
        past = () if codes & {"crashed", *MISLEADING} or not self.attacks else MISLEADING
        return [*(finding for finding in probe.findings if finding.code not in past), *found]


def _raised_on_planted(name: str, examined: Examined, examiner: Examiner) -> Finding:
    """An attack that raised on planted problems and not on the samples."""
    classes, samples = examiner.given.logits.shape[1], len(examined.ran.records)
    cause = f"It raised on planted problems, {'which have two classes, ' if classes > 2 else ''}and not on the samples"
    evidence = [
        str(examined.error),
        f"It ran on {samples} samples with {classes} classes, and raised on the problems of two classes that were "
        f"planted in the first {min(examiner.settings.planted, samples)} of them.",
    ]
    if examined.padded is not None:
        cause = f"{cause}: it assumes {classes} classes, or labels of its own"
        evidence.append(
            f"On the same problems, padded to {classes} classes that nothing is in, it ran, and found "
            f"{examined.padded['score']:.2f} of what is planted."
        )
    remedy = Remedy(
        words="Take the number of classes from the logits, and targets from among them and the labels that are given.",
        code="classes = logits.shape[1]\ntarget = (y + 1) % classes  # not classes or targets of its own",
    )
    return Finding(code="crashed_planted", cause=f"{cause}.", evidence=tuple(evidence), attack=name, remedies=(remedy,))


def _raised(error: str, name: str) -> str:
    """Return the exception of an attack of this name, in a line."""
    text = error.removeprefix(f"{name}: ").split("\n")[0].partition("; ")[0].rstrip(".")
    _, found, raised = text.partition("raised ")
    return f"raised {raised[:160]}" if found else f"raised an error ({text[:160]})"
