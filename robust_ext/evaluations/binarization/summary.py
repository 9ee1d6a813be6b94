"""From per-sample records to the numbers of ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.cost import Spent
from robust_ext.engine.outcomes import OUTCOMES
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.depth_scores import score_depths, solved_depth
from robust_ext.evaluations.binarization.rules import Solved
from robust_ext.evaluations.binarization.sequential import planted_for
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
    easier: str = "",
    gradients: bool = False,
    masking: str = "",
) -> dict[str, Any]:
    """Everything about one of so many attacks, as documented for ``result.json``, of what the same groups left.

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
    """What an attack solved beyond the planted points, of the problems that others proved."""
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
    """What an attack solved of what was planted at the logits."""
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
