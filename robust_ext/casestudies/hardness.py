"""Appendix B of the paper: three defenses whose problems have other points than those of all defenses.

Source: Zimmermann, Brendel, Tramer and Carlini, "Increasing Confidence in Adversarial Robustness Evaluations" (2022),
sections 3.1 and 4.3, and appendix B.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_ext.casestudies.base import CaseStudy, Figure, load_case_study
from robust_ext.casestudies.judging import entry_of
from robust_ext.casestudies.training import CaseData, fitted_detector, load_case_data, trained_defense
from robust_ext.evaluations.binarization import binarization_test
from robust_ext.registry.attack import as_attack

_RECIPES = ("weak", "right")
# The points of all defenses, judged at the planted points alone with every random point counted.
_ALL: dict[str, Any] = {"inner": "uniform", "inner_points": 999, "planted_candidates": 1, "boundary_points": 1}
_ALL |= {"random_inner": 200, "depths": (1.0,), "canaries": 0, "random_stops": False}
# Samples that a calibration takes, which starts at the most inner points of the three.
_CALIBRATE_ON, _HARDEST = 8, {"inner_points": 9999}


@dataclass(frozen=True)
class _Own:
    """What a defense has of its own, and its R-ASR where section 4.2 states it."""

    settings: Mapping[str, Any]
    random: str | None = None


_OWN = {
    "feature_scattering": _Own({"inner_points": 9999}, random="> 0.75"),
    "adversarial_interpolation": _Own({"boundary_points": 10}),
    "trapdoor": _Own({"epsilon": 0.01}),
}


def compare_hardness(
    folder: Path | None,
    *,
    data: str,
    data_root: str | os.PathLike[str] | None,
    samples: int,
    seed: int,
    **run: Any,
) -> Iterator[Figure]:
    """Yield scores and R-ASR of three defenses: at the points of all, at their own ones, and at calibrated ones.

    At their own points R-ASR is also that of as many random points as each recipe has queries (section 3.1). Where a
    calibration (section 4.3) finds no setting that is easy enough for either recipe, it has no figures; with a detector
    there is none.
    """
    given = load_case_data(data, root=data_root, samples=samples, images=5000, seed=seed)
    for name, own in _OWN.items():
        yield from _of_defense(name, own, given, folder and folder / "runs" / name, seed=seed, **run)


def _of_defense(
    name: str, own: _Own, given: CaseData, place: Path | None, *, seed: int, **run: Any
) -> Iterator[Figure]:
    """Train a defense, and yield its figures."""
    study = load_case_study(name)
    module, budget = trained_defense(study, given, seed=seed, folder=place), study.threat_model(given.name)
    detector = fitted_detector(study, module, given, budget, seed=seed)

    def test(points: str, recipes: Sequence[str], **changed: Any) -> Mapping[str, Any]:
        """Run recipes on the same problems."""
        options = {**study.settings, **_ALL, **changed}
        return binarization_test(
            study.parts(module),
            {kind: as_attack(getattr(study, kind).attack, name=kind) for kind in recipes},
            given.inputs,
            replace(budget, epsilon=options.pop("epsilon", budget.epsilon)),
            detector=detector,
            sample_ids=given.ids,
            out=place and place / points,
            seed=seed,
            judge_seed=seed,
            **options,
            **run,
        ).content

    yield from _figures(study, test("all", _RECIPES))
    yield from _figures(study, test("own", _RECIPES, **own.settings), own=own)
    for kind in _RECIPES:
        found = test(f"own-{kind}", [kind], random="match", **own.settings)
        title = f"{study.title}, {kind} recipe, {_points(found)}"
        yield title, "R-ASR, as many points as queries", None, entry_of(found)["random_score"]
    if detector is None:
        found = test("calibrated", _RECIPES, **_HARDEST, calibrate_on=min(_CALIBRATE_ON, len(given.ids)))
        if found["calibration"]["chosen"] is not None:
            yield from _figures(study, found)


def _figures(study: CaseStudy[Any], content: Mapping[str, Any], *, own: _Own | None = None) -> Iterator[Figure]:
    """Yield the score of each recipe and R-ASR, with the paper's figures where the points are the defense's own."""
    points = _points(content)
    for number, kind in enumerate(_RECIPES):
        score = None if own is None else getattr(study.published, f"{kind}_score")
        yield f"{study.title}, {kind} recipe, {points}", "test score", score, entry_of(content, number)["score"]
    random = max((entry_of(content, number)["random_score"] or 0.0) for number in range(len(_RECIPES)))
    yield f"{study.title}, {points}", "R-ASR, 400 points", None if own is None else own.random, random


def _points(content: Mapping[str, Any]) -> str:
    """Return the settings of points as words."""
    settings, calibrated = content["settings"], content["calibration"]
    settings = settings if calibrated is None else {**settings, **calibrated["chosen"]}
    words = (
        f"{settings['inner_points']:,} inner, {settings['boundary_points']} planted, epsilon {settings['epsilon']:g}"
    )
    return (
        words if calibrated is None else f"{words}, gap {settings['gap']:g}, kappa {settings['kappa']:g} (calibrated)"
    )
