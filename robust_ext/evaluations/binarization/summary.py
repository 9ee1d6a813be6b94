"""The sequential rule, and the numbers of ``result.json`` from records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.engine.store import Record
from robust_ext.engine.verify import OUTCOMES
from robust_ext.evaluations.binarization.depth_scores import score_depths, solved_depth
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import REPAIRED, judge
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
        self._rules = rules

    @property
    def plan(self) -> Plan:
        """The use of the next group: everything, without the sequential rule."""
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
    """Return the groups of samples, in order, that decide these attacks; all where none does.

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


# Easier positions at which the same candidates are counted again, for the hardness curve.
_KAPPAS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)

# Phases whose seconds all attacks of a run share.
_SHARED = ("accepted", "features", "readout", "random", "witnesses")


def summarise_attack(
    name: str,
    records: Sequence[Record],
    timings: Sequence[Record],
    settings: BinarizationSettings,
    *,
    attacks: int,
    description: str,
    target: str,
    easier: str = "",
    gradients: bool = False,
    masking: str = "",
) -> dict[str, Any]:
    """Everything about one of ``attacks`` attacks, as documented for ``result.json``, of what the same groups left.

    ``easier`` is why nothing could be planted where a detector is why, and what would plant something. An attack that
    uses ``gradients`` has to get them through the head, which masks them as a clause says.
    """
    attacked = [record for record in records if name in record["attacks"]]
    planted = planted_for(name, records)
    mine = [record["attacks"][name] for record in planted]
    outcomes = {outcome: sum(entry["outcome"] == outcome for entry in mine) for outcome in OUTCOMES}
    posed = [entry["canary"] for entry in mine if entry["canary"] in ("kept", "repaired")]
    canaries = {"planted": len(posed), "repaired": posed.count("repaired")}
    random = [record["random_reach"] for record in planted if record["random_reach"] is not None]
    hardness = _hardness(planted, mine, settings) if planted else []
    planting = _planting(name, records, attacked)
    not_separable = [one for one in records if not one["separable"] and one.get("planting", {}).get("found", True)]
    unplanted = {"not_separable": len(not_separable), "not_planted": len(attacked) - len(planted)}
    unfound = len(records) - len(planted) - sum(unplanted.values())
    depths = score_depths(name, planted, settings)
    behind = _behind([entry["behind"] for entry in mine if "behind" in entry], settings)
    return {
        "name": name,
        "description": description,
        "target": target,
        **judge(
            outcomes["found"],
            sum(reach > settings.boundary_position for reach in random),
            len(planted),
            random_samples=len(random),
            planted=canaries["planted"],
            repaired=canaries["repaired"],
            settings=settings,
            attacks=attacks,
            depths=_deeper(depths),
            non_finite=outcomes["non_finite_logits"],
            lost=lost_words(mine, of="problem"),
            inseparable=unplanted["not_separable"],
            unplanted=unplanted["not_planted"],
            unfound=unfound,
            easier=easier,
            behind=behind if gradients else None,
            masking=masking,
        ),
        "depth": solved_depth(depths, settings),
        "depths": depths,
        "samples": len(planted),
        **unplanted,
        "planted_points": {
            "drawn": settings.boundary_points * len(attacked),
            "adversarial": sum(record["attacks"][name]["planted"] for record in attacked),
        },
        "outcomes": outcomes,
        "canaries": canaries,
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


def _behind(entries: Sequence[Mapping[str, Any]], settings: BinarizationSettings) -> Solved:
    """Return the solved problems planted at the logits."""
    posed = [entry for entry in entries if entry["outcome"] != "not_planted"]
    random = [entry["random_reach"] for entry in posed if entry["random_reach"] is not None]
    return Solved(
        found=sum(entry["outcome"] == "found" for entry in posed),
        random_found=sum(reach > settings.boundary_position for reach in random),
        random_samples=len(random),
        samples=len(posed),
    )


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


def _planting(name: str, records: Sequence[Record], attacked: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Describe the search for points that the detector accepts; empty without a detector."""
    plantings = [record["planting"] for record in records if "planting" in record]
    found = {
        "samples": len(plantings),
        "not_found": sum(not one["found"] for one in plantings),
        "by_attack": sum(one["found"] and one["source"] == "attack" for one in plantings),
        "tries": sum(one["tries"] for one in plantings),
        "references": sum(record["attacks"][name]["references"] for record in attacked),
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
