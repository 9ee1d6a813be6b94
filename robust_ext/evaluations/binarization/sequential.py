"""The sequential rule over groups of samples: what the next one is needed for, and what decided an attack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import REPAIRED


@dataclass(frozen=True)
class Plan:
    """What the next group of samples is needed for."""

    attacks: tuple[str, ...]  # Those that need more.
    random: bool  # Whether random search does.
    deeper: bool  # Whether problems are posed beyond the planted points: to grade attacks, and while R-ASR is open.


class Sequential:
    """How far several attacks have come, told of groups of samples one after another, in order."""

    def __init__(self, names: Sequence[str], rules: Rules) -> None:
        self.groups = self.samples = 0  # How many it was told of
        self._counts = dict.fromkeys(names, Solved(found=0, random_found=0, samples=0, random_samples=0))
        self._repaired = dict.fromkeys(names, 0)  # Canaries
        self._left = list(names)
        self._rules = rules

    @property
    def plan(self) -> Plan:
        """What is needed of the next group: of all, without the sequential rule."""
        random = any(not self._rules.random_settled(self._counts[name]) for name in self._left)
        return Plan(tuple(self._left), random, random or not self._rules.graded(self.samples))

    def add(self, group: Sequence[Record]) -> None:
        """Take in the next group."""
        self.groups += 1
        self.samples += len(group)
        if not self._rules.settings.sequential:
            return
        for name in list(self._left):
            planted = planted_for(name, group)
            self._counts[name] = _add(self._counts[name], planted, name, self._rules.settings)
            self._repaired[name] += sum(record["attacks"][name]["canary"] == "repaired" for record in planted)
            if self._repaired[name] >= REPAIRED or self._rules.decided(self._counts[name]):
                self._left.remove(name)


def _add(counts: Solved, planted: Sequence[Record], name: str, settings: BinarizationSettings) -> Solved:
    random = [record["random_reach"] for record in planted if record["random_reach"] is not None]
    return Solved(
        found=counts.found + sum(record["attacks"][name]["outcome"] == "found" for record in planted),
        random_found=counts.random_found + sum(reach > settings.boundary_position for reach in random),
        samples=counts.samples + len(planted),
        random_samples=counts.searched + len(random),
    )


def decided_after(name: str, groups: Iterable[Sequence[Record]], rules: Rules) -> int | None:
    """After how many groups of samples, in order and without holes, an attack is decided; None while not."""
    sequence = Sequential([name], rules)
    for group in groups:
        sequence.add(group)
        if not sequence.plan.attacks:
            return sequence.groups
    return None


def until_decided(names: Sequence[str], groups: Iterable[Sequence[Record]], rules: Rules) -> list[list[Record]]:
    """Of groups of samples, in order and without holes, what decides these attacks; all where nothing does.

    What several processes did beyond that, as each runs ahead of others, is left out.
    """
    sequence, kept = Sequential(names, rules), list[list[Record]]()
    for group in groups:
        plan = sequence.plan
        if not plan.attacks:
            break
        kept.append([_needed(record, plan) for record in group])
        sequence.add(kept[-1])
    return kept


def _needed(record: Record, plan: Plan) -> Record:
    left_out = () if plan.deeper else ("witnesses", "deepest", "depths")
    attacks = {
        name: {key: value for key, value in entry.items() if key not in left_out}
        for name, entry in record["attacks"].items()
        if name in plan.attacks
    }
    kept = {key: value for key, value in record.items() if key not in left_out}
    return {**kept, "attacks": attacks} | ({} if plan.random else {"random_reach": None, "random_draws": 0})


def planted_for(name: str, group: Sequence[Record]) -> list[Record]:
    """The samples of a group in which something was planted for an attack."""
    attacked = [record for record in group if name in record["attacks"]]
    return [record for record in attacked if record["attacks"][name]["outcome"] != "not_planted"]
