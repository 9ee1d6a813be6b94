"""MEAD results made from drawn scores, small and large, with every number worked out from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robust_ext.evaluations.mead import ArmLabel, average, multi_armed

OBJECTIVES = ("ace", "kl", "gini", "fisher-rao")
SHORT = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FR"}
SUITE = {"l1": (5, 10, 15, 20, 25, 30, 40), "l2": (0.125, 0.25, 0.3125, 0.5, 1, 1.5, 2)}
LINF = (0.03125, 0.0625, 0.125, 0.25, 0.3125, 0.5)


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    group: str
    norm: str | None = None
    epsilon: float | None = None
    objective: str | None = None
    algorithm: str | None = None
    adaptive_to: str | None = None


def suite() -> list[Arm]:
    """The arms of the paper on MNIST: 21 groups."""
    arms = []
    for norm, epsilons in (*SUITE.items(), ("linf", LINF)):
        for epsilon in epsilons:
            group = f"{norm} {epsilon:g}"
            for algorithm in ("pgd", "bim", "fgsm") if norm == "linf" else ("pgd",):
                for objective in OBJECTIVES:
                    name = f"{algorithm.upper()}-{SHORT[objective]} {group}"
                    arms.append(
                        Arm(
                            name=name, group=group, norm=norm, epsilon=epsilon, objective=objective, algorithm=algorithm
                        )
                    )
            if group == "linf 0.3125":
                arms += [
                    Arm(name=f"{name} {group}", group=group, norm=norm, epsilon=epsilon) for name in ("Square", "CWinf")
                ]
    arms += [Arm(name=name, group=name, norm="l2") for name in ("DeepFool", "CW2", "HopSkipJump")]
    return [*arms, Arm(name="Spatial", group="Spatial")]


def knowing(detector: str, arms: Sequence[Arm]) -> list[Arm]:
    """For every linf epsilon an arm that knows the detector."""
    groups = dict.fromkeys((arm.group, arm.epsilon) for arm in arms if arm.norm == "linf")
    return [
        Arm(
            name=f"PGD-ACE {group}, knowing {detector}",
            group=group,
            norm="linf",
            epsilon=epsilon,
            objective="ace",
            algorithm="pgd",
            adaptive_to=detector,
        )
        for group, epsilon in groups
    ]


def make(
    arms: Sequence[Arm],
    detectors: Sequence[str],
    *,
    samples: int,
    seed: int = 0,
    white_box: Sequence[str] = (),
    combines: dict[str, list[str]] | None = None,
    rates: dict[str, float] | None = None,
    unscored: int = 0,
    published: bool = False,
) -> dict[str, Any]:
    """A result of these arms and detectors.

    Args:
        arms: Those that know no detector.
        detectors: Names.
        samples: How many.
        seed: Of the draws.
        white_box: Detectors that arms know.
        combines: Members, by detector.
        rates: By group, how often its arms succeed; 0.3 to 0.95 otherwise.
        unscored: How many scores of the first detector's first arm are no numbers.
        published: Whether the public code's numbers are part of it.
    """
    draw = np.random.default_rng(seed)
    everything = [*arms, *(arm for name in white_box for arm in knowing(name, arms))]
    chances = [(rates or {}).get(arm.group, draw.uniform(0.3, 0.95)) for arm in everything]
    success = draw.random((len(everything), samples)) < np.array(chances)[:, None]
    natural = {name: draw.normal(size=samples) for name in detectors}
    scores = {}
    for name in detectors:
        shift = np.array([draw.uniform(-0.2, 1.8) - (1.5 if arm.adaptive_to == name else 0) for arm in everything])
        scores[name] = draw.normal(size=success.shape) + shift[:, None]
    if unscored:
        scores[detectors[0]][0, :unscored] = np.nan
        success[0, :unscored] = True
    found = [
        _detector(name, everything, natural[name], scores[name], success, (combines or {}).get(name), published)
        for name in detectors
    ]
    return {
        "kind": "mead",
        "samples": samples,
        "clean_accuracy": 0.992,
        "suite": "paper-mnist",
        "naturals": "kept",
        "detectors": found,
        "averages": [row for detector in found for row in _averages(detector)],
        "arms": [_arm(arm, row, found) for arm, row in zip(everything, success, strict=True)],
        "settings": {"bounds": [0.0, 1.0], "batch_size": 256, "resamples": 0, "naturals": "kept", "8-bit": False},
        "versions": {"robust_ext": "0.1.0", "torch": "2.5.1"},
        "seed": 20240501,
        "seconds": {"attack": 912.25, "verify": 3.5, "score": 187.75, "total": 1110.0},
    }


def small_result(**changes: Any) -> dict[str, Any]:
    """Two detectors, three groups of arms of two norms and one of no norm; ``changes`` replaces whole values."""
    kept = {"l1 5", "linf 0.125", "linf 0.3125", "Spatial"}
    result = make([arm for arm in suite() if arm.group in kept], ["nss", "lid"], samples=60, white_box=["lid"])
    assert changes.keys() <= result.keys()
    return {**result, **changes}


def large_result(detectors: int = 7) -> dict[str, Any]:
    """The first of seven detectors, two of them combinations, against the whole suite; some are known to arms."""
    combines = {"mean(nss, lid)": ["nss", "lid"], "max(nss, kd-bu, lid, magnet)": ["nss", "kd-bu", "lid", "magnet"]}
    names = ["nss", "mean(nss, lid)", "lid", "kd-bu", "magnet", "feature-squeezing", "max(nss, kd-bu, lid, magnet)"]
    return make(
        suite(),
        names[:detectors],
        samples=300,
        white_box=[name for name in ("lid", "kd-bu", "magnet") if name in names[:detectors]],
        combines=combines,
        rates={"l1 5": 0.01, "l1 10": 0.0, "l2 0.125": 0.02},
        unscored=3,
    )


def _numbers(found: Any) -> dict[str, Any]:
    entry = found.to_dict()
    for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"):
        if entry[key] is not None:
            entry[f"{key}_interval"] = [max(entry[key] - 0.021, 0.0), min(entry[key] + 0.018, 1.0)]
    return entry


def _curve(natural: Any, scores: Any, success: Any) -> dict[str, list[float]]:
    worst = np.where(success & ~np.isnan(scores), scores, np.inf).min(0)
    worst = worst[np.isfinite(worst)]
    grid = np.linspace(0, 1, 101)
    if not len(worst):
        return {"fpr": [], "tpr": []}
    thresholds = np.quantile(natural, 1 - grid)
    return {"fpr": grid.tolist(), "tpr": [float((worst >= level).mean()) for level in thresholds[:-1]] + [1.0]}


def _entries(
    arms: Sequence[Arm], rows: Sequence[int], scenario: str, natural: Any, scores: Any, success: Any
) -> list[dict[str, Any]]:
    first = arms[rows[0]]
    labels = [ArmLabel(name=arms[i].name, objective=arms[i].objective, algorithm=arms[i].algorithm) for i in rows]
    found = multi_armed(natural, scores[rows], success[rows], arms=labels, resamples=0)
    base = {"group": first.group, "norm": first.norm, "epsilon": first.epsilon, "scenario": scenario}

    def entry(result: Any, chosen: Sequence[int], **keys: Any) -> dict[str, Any]:
        row = {**base, "objective": None, "algorithm": None, **keys, "arms": len(chosen)}
        row["successes_per_sample"] = float(success[chosen].sum() / len(natural))
        row |= {**_numbers(result), "attribution": None}
        if scenario == "blind" and row["algorithm"] is None:
            row["curve"] = _curve(natural, scores[chosen], success[chosen])
        return row

    entries = [{**entry(found.all_arms, rows), "attribution": found.attribution}]
    if scenario == "blind":
        for name, one in found.objectives.items():
            entries.append(entry(one, [i for i in rows if arms[i].objective in (name, None)], objective=name))
        for name, one in found.algorithms.items():
            entries.append(entry(one, [i for i in rows if arms[i].algorithm == name], algorithm=name))
    return entries


def _detector(
    name: str, arms: Sequence[Arm], natural: Any, scores: Any, success: Any, combines: Any, published: bool
) -> dict[str, Any]:
    threshold = float(np.quantile(natural, 0.95))
    seen = [i for i, arm in enumerate(arms) if arm.adaptive_to in (None, name)]
    blind, white = [], []
    for group in dict.fromkeys(arm.group for arm in arms):
        inside = [i for i in seen if arms[i].group == group]
        unaware, aware = ([i for i in inside if (arms[i].adaptive_to is None) == none] for none in (True, False))
        blind += _entries(arms, unaware, "blind", natural, scores, success)
        if aware:
            white += _entries(arms, aware, "white-box", natural, scores, success)
            white += _entries(arms, inside, "all", natural, scores, success)
    if published:
        for row in blind:
            row["published"] = None if row["auroc"] is None else {"auroc": row["auroc"] / 4, "fpr_at_95_tpr": 0.875}
    singles = multi_armed(
        natural, scores[seen], success[seen], arms=[ArmLabel(name=arms[i].name) for i in seen], resamples=0
    )
    slipped = {arms[i].name: int((success[i] & (scores[i] <= threshold)).sum()) for i in seen}
    return {
        "name": name,
        "description": f"{name.upper()}Detector(settings='as in the paper')",
        "differentiable": any(arm.adaptive_to == name for arm in arms),
        "random": name == "kd-bu",
        "combines": combines,
        "seconds": 12.3 + len(name),
        "threshold": threshold,
        "threshold_fpr": 0.05,
        "achieved_fpr": float((natural > threshold).mean()),
        "results": blind,
        "white_box": white,
        "arms": [{"arm": arm, **_numbers(one), "slipped": slipped[arm]} for arm, one in singles.arms.items()],
    }


def _averages(detector: dict[str, Any]) -> list[dict[str, Any]]:
    averages = []
    norms = list(dict.fromkeys(row["norm"] for row in detector["results"]))
    for objective in (None, *dict.fromkeys(row["objective"] for row in detector["results"] if row["objective"])):
        means = []
        for norm in norms:
            own = [row for row in detector["results"] if row["norm"] == norm and row["algorithm"] is None]
            groups = dict.fromkeys(row["group"] for row in own)
            # A group without objectives counts as it is in the average of every objective.
            rows = [
                next((row for row in own if row["group"] == group and row["objective"] == objective), None)
                or next(row for row in own if row["group"] == group and row["objective"] is None)
                for group in groups
            ]
            means.append((norm, average([_Numbers(row) for row in rows])))
        means.append(("all", average([mean for _, mean in means])))
        head = {"detector": detector["name"], "objective": objective}
        averages += [{**head, "norm": norm, **mean.to_dict()} for norm, mean in means]
    return averages


class _Numbers:
    def __init__(self, row: dict[str, Any]) -> None:
        self.auroc, self.fpr_at_95_tpr, self.tpr_at_5_fpr = row["auroc"], row["fpr_at_95_tpr"], row["tpr_at_5_fpr"]


def _arm(arm: Arm, success: Any, detectors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = int(success.sum())
    attributions = {
        detector["name"]: (row["attribution"] or {}).get(arm.name)
        for detector in detectors
        for row in detector["results" if arm.adaptive_to is None else "white_box"]
        if row["group"] == arm.group and row["objective"] is None and row["algorithm"] is None
    }
    return {
        **vars(arm),
        "attack": f"robust_ext:ObjectivePGD(objective={arm.objective!r}, steps=100)",
        "kind": "minimum norm" if arm.epsilon is None else "fixed epsilon",
        "successes": found,
        "samples": len(success),
        "outcomes": {"found": found, "not_adversarial": len(success) - found},
        "seconds": 3.0 + len(arm.name) / 7,
        "passes": {"forward": 100 * len(success), "backward": 99 * len(success)},
        "attribution": attributions,
    }
