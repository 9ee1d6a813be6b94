"""From per-sample records to the numbers of ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.engine.outcomes import OUTCOMES
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.depth_scores import score_depths, solved_depth
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import judge
from robust_ext.evaluations.caveats import lost_words

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
) -> dict[str, Any]:
    """Everything about one of so many attacks, as documented for ``result.json``, of what the same groups left."""
    attacked = [record for record in records if name in record["attacks"]]
    planted = _planted(name, records)
    mine = [record["attacks"][name] for record in planted]
    outcomes = {outcome: sum(entry["outcome"] == outcome for entry in mine) for outcome in OUTCOMES}
    posed = [entry["canary"] for entry in mine if entry["canary"] in ("kept", "repaired")]
    canaries = {"planted": len(posed), "repaired": posed.count("repaired")}
    random_found = sum(_reached(record["random_reach"], settings.boundary_position) for record in planted)
    hardness = _hardness(planted, mine, settings) if planted else []
    planting = _planting(name, records, attacked)
    unplanted = {
        "not_separable": sum(
            not record["separable"] and record.get("planting", {}).get("found", True) for record in records
        ),
        "not_planted": len(attacked) - len(planted),
    }
    depths = score_depths(name, planted, settings)
    return {
        "name": name,
        "description": description,
        "target": target,
        **judge(
            outcomes["found"],
            random_found,
            len(planted),
            planted=canaries["planted"],
            repaired=canaries["repaired"],
            settings=settings,
            attacks=attacks,
            depths=_deeper(depths),
            non_finite=outcomes["non_finite_logits"],
            lost=lost_words(mine, of="problem"),
            inseparable=unplanted["not_separable"],
            unplanted=unplanted["not_planted"],
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
        **_cost(name, timings),
        # With a detector only where the boundary lies: elsewhere nothing is known of what the detector does.
        "hardness": hardness[-1:] if planting else hardness,
        **planting,
    }


def _deeper(depths: Sequence[Mapping[str, Any]]) -> list[Solved]:
    """What an attack solved beyond the planted points, of the problems that others proved."""
    return [
        Solved(
            found=row["found_by_others"],
            random_found=row["random_found_by_others"],
            samples=row["problems_by_others"],
            depth=row["depth"],
        )
        for row in depths[1:]
    ]


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
    """How points that the detector lets pass were found; nothing without a detector."""
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
) -> list[dict[str, float]]:
    """Scores of the same candidates at easier positions of the boundary: exact for R-ASR, a lower bound for the attack.

    The random attack stops at its first hit, and what is a hit here is one at every easier position, so its score is
    exact. An attack aims at the boundary it is given, and may find more when that is moved.
    """
    here = settings.boundary_position
    rows = []
    for kappa in (*(k for k in _KAPPAS if k < here), here):
        # Where the boundary is the test's own, the verified outcome decides, not the reach computed from it.
        hits = [
            outcome == "found" or (kappa < here and outcome == "not_adversarial" and _reached(reach, kappa))
            for outcome, reach in ((entry["outcome"], entry["reach"]) for entry in mine)
        ]
        random_hits = [_reached(record["random_reach"], kappa) for record in planted]
        rows.append(
            {"kappa": kappa, "score": sum(hits) / len(hits), "random_score": sum(random_hits) / len(random_hits)}
        )
    return rows


def _reached(reach: float | None, position: float) -> bool:
    return reach is not None and reach > position


class Sequential:
    """The sequential rule for several attacks, told of groups of samples one after another, in order."""

    def __init__(self, names: Sequence[str], rules: Rules) -> None:
        self.groups = 0  # How many it was told of
        self.undecided = list(names)  # Attacks that need more
        self._counts = dict.fromkeys(names, (0, 0, 0))
        self._rules = rules

    def add(self, group: Sequence[Record]) -> None:
        """Take in the next group."""
        self.groups += 1
        for name in list(self.undecided):
            found, random_found, trials = self._counts[name]
            planted = _planted(name, group)
            trials += len(planted)
            found += sum(record["attacks"][name]["outcome"] == "found" for record in planted)
            position = self._rules.settings.boundary_position
            random_found += sum(_reached(record["random_reach"], position) for record in planted)
            self._counts[name] = found, random_found, trials
            if self._rules.decided(found, random_found, trials):
                self.undecided.remove(name)


def decided_after(name: str, groups: Sequence[Sequence[Record]], rules: Rules) -> int | None:
    """After how many groups of samples, in order and without holes, an attack is decided; None while not."""
    sequence = Sequential([name], rules)
    for group in groups:
        sequence.add(group)
        if not sequence.undecided:
            return sequence.groups
    return None


def _planted(name: str, group: Sequence[Record]) -> list[Record]:
    """The samples of a group in which something was planted for an attack."""
    attacked = [record for record in group if name in record["attacks"]]
    return [record for record in attacked if record["attacks"][name]["outcome"] != "not_planted"]
