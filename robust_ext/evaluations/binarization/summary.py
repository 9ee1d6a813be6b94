"""The sequential rule, and the numbers of ``result.json`` from records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.engine.store import Record
from robust_ext.engine.verify import OUTCOMES, UNDONE
from robust_ext.evaluations.binarization.depth_scores import score_depths, solved_depth
from robust_ext.evaluations.binarization.rules import LOOKS, Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import REPAIRED, Counts, judge
from robust_ext.evaluations.caveats import lost_words


@dataclass(frozen=True)
class Plan:
    """The use of the next group of samples."""

    attacks: tuple[str, ...]  # Those that need more.
    random: bool  # Whether random search does.
    deeper: bool  # Whether problems are posed beyond the planted points: to grade attacks, and while R-ASR is open.


class Sequential:
    """The state of the sequential rule for several attacks, after groups of samples in order."""

    def __init__(self, names: Sequence[str], rules: Rules) -> None:
        self.groups = self.samples = 0  # How many it was told of
        self._counts = dict.fromkeys(names, Solved(found=0, random_found=0, samples=0, random_samples=0))
        self._repaired = dict.fromkeys(names, 0)  # Canaries
        self._left = list(names)
        self._seen = list[Record]()  # With a fixed number of samples
        self._rules = rules

    @property
    def plan(self) -> Plan:
        """The use of the next group: without the sequential rule all, but for random search once it is settled."""
        if not self._rules.settings.sequential:
            ended = random_ends(self._left, self._seen, self._rules) is not None
            return Plan(tuple(self._left), random=not ended, deeper=True)
        random = any(not self._rules.random_settled(self._counts[name]) for name in self._left)
        return Plan(tuple(self._left), random, random or not self._rules.graded(self.samples))

    def add(self, group: Sequence[Record]) -> None:
        """Take in the next group."""
        self.groups += 1
        self.samples += len(group)
        if not self._rules.settings.sequential:
            self._seen += group
            return
        for name in list(self._left):
            planted = planted_for(name, group)
            self._counts[name] = _sum(self._counts[name], _solved(name, planted, self._rules.settings))
            self._repaired[name] += sum(record["attacks"][name]["canary"] == "repaired" for record in planted)
            if self._repaired[name] >= REPAIRED or self._rules.decided(self._counts[name]):
                self._left.remove(name)


def _solved(name: str, planted: Sequence[Record], settings: BinarizationSettings, **more: Any) -> Solved:
    """Count the problems of an attack at the test's own boundary."""
    problems = [(record["attacks"][name]["outcome"], record["random_reach"]) for record in planted]
    return Solved.of(problems, settings.boundary_position, **more)


def _sum(first: Solved, second: Solved) -> Solved:
    return Solved(
        found=first.found + second.found,
        random_found=first.random_found + second.random_found,
        samples=first.samples + second.samples,
        random_samples=first.searched + second.searched,
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
    """Return the groups of samples, in order, that decide these attacks; all where none does.

    What several processes did beyond that, as each runs ahead of others, is left out.
    """
    sequence, kept = Sequential(names, rules), list[list[Record]]()
    if not rules.settings.sequential:
        kept = [list(group) for group in groups]
        end = random_ends(names, [record for group in kept for record in group], rules)
        searched = repeat(True) if end is None else chain(repeat(True, end), repeat(False))
        return [[one if next(searched) else _unsearched(one) for one in group] for group in kept]
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
    kept = {**kept, "attacks": attacks}
    return kept if plan.random else _unsearched(kept)


def _unsearched(record: Record) -> Record:
    return {**record, "random_reach": None, "random_draws": 0}


def random_ends(names: Sequence[str], records: Sequence[Record], rules: Rules) -> int | None:
    """After how many records random search ends where the number of samples is fixed; None where not so far."""
    for look in LOOKS:
        some = records[: rows_until(records, look)]
        if sum(map(_planted, some)) < look:
            return None
        counts = (_solved(name, planted_for(name, some), rules.settings) for name in names)
        if all(map(rules.random_settled, counts)):
            return len(some)
    return None


def rows_until(records: Sequence[Record], problems: int) -> int:
    """Return how many records hold the first planted ``problems``; all where there are fewer."""
    rows = [row for row, record in enumerate(records) if _planted(record)]
    return rows[problems - 1] + 1 if len(rows) >= problems else len(records)


def _planted(record: Record) -> bool:
    """Return whether something was planted in a sample for any attack."""
    return any(entry["outcome"] != "not_planted" for entry in record["attacks"].values())


def planted_for(name: str, group: Sequence[Record]) -> list[Record]:
    """The samples of a group in which something was planted for an attack."""
    attacked = [record for record in group if name in record["attacks"]]
    return [record for record in attacked if record["attacks"][name]["outcome"] != "not_planted"]


# Easier positions at which the same candidates are counted again, for the hardness curve.
_KAPPAS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)

# Phases whose seconds all attacks of a run share.
_SHARED = ("accepted", "features", "readout", "random", "witnesses")


def summarise_attack(
    name: str,
    records: Sequence[Record],
    timings: Sequence[Record],
    rules: Rules,
    *,
    easier: str = "",
    gradients: bool = False,
    masking: str = "",
) -> dict[str, Any]:
    """Return the numbers of an attack, as documented for ``result.json``, from the records of the same groups.

    ``easier`` is why a detector let nothing be planted, and what would plant something. An attack that uses
    ``gradients`` has to get them through the head; ``masking`` is the way in which it masks them.
    """
    settings, planted = rules.settings, planted_for(name, records)
    attacked = [record["attacks"][name] for record in records if name in record["attacks"]]
    mine = [record["attacks"][name] for record in planted]
    outcomes = {outcome: sum(entry["outcome"] == outcome for entry in mine) for outcome in OUTCOMES}
    if not outcomes[UNDONE]:
        del outcomes[UNDONE]  # Which only discrete entries have
    canaries = [entry["canary"] for entry in mine if entry["canary"] in ("kept", "repaired")]
    hardness = _hardness(planted, mine, settings) if planted else []
    planting = _planting(records, attacked)
    inseparable = sum(not one["separable"] and one.get("planting", {}).get("found", True) for one in records)
    unplanted = len(attacked) - len(planted)
    depths, behind = score_depths(name, planted, settings), _behind(mine, settings)
    counts = Counts(
        problems=[_solved(name, planted, settings, non_finite=outcomes["non_finite_logits"]), *_deeper(depths)],
        canaries=len(canaries),
        repaired=canaries.count("repaired"),
        lost=lost_words(mine, of="problem"),
        inseparable=inseparable,
        unplanted=unplanted,
        unfound=len(records) - len(planted) - inseparable - unplanted,
        easier=easier,
        behind=behind if gradients else None,
        masking=masking,
    )
    return {
        **judge(counts, rules),
        "depth": solved_depth(depths, settings),
        "depths": depths,
        "samples": len(planted),
        "not_separable": inseparable,
        "not_planted": unplanted,
        "planted_points": {
            "drawn": settings.boundary_points * len(attacked),
            "adversarial": sum(entry["planted"] for entry in attacked),
        },
        "outcomes": outcomes,
        "canaries": {"planted": counts.canaries, "repaired": counts.repaired},
        **({"at_logits": {"samples": behind.samples, "found": behind.found}} if behind.samples else {}),
        **_cost(name, timings),
        # With a detector only where the boundary lies: elsewhere nothing is known of what the detector does.
        "hardness": hardness[-1:] if planting else hardness,
        **planting,
    }


def _deeper(depths: Sequence[Mapping[str, Any]]) -> list[Solved]:
    """Return the solved problems beyond the planted points, of those that others proved."""
    return [
        Solved(
            found=row["found_by_others"],
            random_found=row["random_found_by_others"],
            random_samples=row["random_samples_by_others"],
            samples=row["problems_by_others"],
            depth=row["depth"],
        )
        for row in depths[1:]
    ]


def _behind(mine: Sequence[Mapping[str, Any]], settings: BinarizationSettings) -> Solved:
    """Count the problems planted at the logits."""
    entries = [entry["behind"] for entry in mine if "behind" in entry]
    posed = [(entry["outcome"], entry["random_reach"]) for entry in entries if entry["outcome"] != "not_planted"]
    return Solved.of(posed, settings.boundary_position)


def _cost(name: str, timings: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Seconds by phase and passes of an attack, with those of what all attacks share."""
    own = [entry["attacks"][name] for entry in timings if name in entry["attacks"]]
    spent = {
        phase: Spent.total(entry["phases"][phase] for entry in entries if phase in entry["phases"])
        for phases, entries in ((_SHARED, timings), (("attack", "verify"), own))
        for phase in phases
    }
    total = Spent.total(spent.values())
    seconds = {phase: one.seconds for phase, one in spent.items()}
    return {"seconds": {**seconds, "total": total.seconds}, "passes": total.passes}


def _planting(records: Sequence[Record], attacked: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Describe the search for points that the detector accepts; empty without a detector."""
    plantings = [record["planting"] for record in records if "planting" in record]
    found = {
        "samples": len(plantings),
        "not_found": sum(not one["found"] for one in plantings),
        "by_attack": sum(one["found"] and one["source"] == "attack" for one in plantings),
        "tries": sum(one["tries"] for one in plantings),
        "references": sum(entry["references"] for entry in attacked),
    }
    return {"planting": found} if plantings else {}


def _hardness(
    planted: Sequence[Record], mine: Sequence[Mapping[str, Any]], settings: BinarizationSettings
) -> list[dict[str, float | None]]:
    """Scores of the same candidates at easier positions of the boundary: exact for R-ASR, a lower bound for the attack.

    The random attack stops at its first hit, and what is a hit here is one at every easier position, so its score is
    exact. An attack aims at the boundary it is given, and may find more when that is moved.
    """
    here = settings.boundary_position
    random = [record["random_reach"] for record in planted if record["random_reach"] is not None]
    rows = []
    for kappa in (*(k for k in _KAPPAS if k < here), here):
        # Where the boundary is the test's own, the verified outcome decides, not the reach computed from it.
        hits = [
            outcome == "found" or (kappa < here and outcome == "not_adversarial" and _reached(reach, kappa))
            for outcome, reach in ((entry["outcome"], entry["reach"]) for entry in mine)
        ]
        random_score = sum(reach > kappa for reach in random) / len(random) if random else None
        rows.append({"kappa": kappa, "score": sum(hits) / len(hits), "random_score": random_score})
    return rows


def _reached(reach: float | None, position: float) -> bool:
    return reach is not None and reach > position
