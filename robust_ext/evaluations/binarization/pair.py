"""The regular and the inverted test of a classifier with a detector, and the verdict on both together.

Zimmermann et al. 2022, section 3.2: an attack that passes one of them only ignores the detector (or the classifier).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.target import Counted
from robust_ext.core.validation import check_choice, check_inputs
from robust_ext.detectors.base import Detector
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.identity import model_digest
from robust_ext.evaluations.binarization.defense import TESTS, Defense
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.single import Subject, run_test
from robust_ext.evaluations.binarization.verdict import overall, overall_reason
from robust_ext.models.features import LayerInput
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module

VIEWS = ("classifier", "reject", "margin")


def prepare_detector(
    detector: object,
    model: object,
    inputs: Tensor,
    *,
    data: Tensor | None,
    false_positive_rate: float,
    bounds: tuple[float, float],
    device: torch.device,
    seed: int,
) -> tuple[Detector, Calibration | None]:
    """A detector of a model with a threshold, and how it got that here.

    Args:
        detector: Anything :func:`as_detector` takes.
        model: What it watches.
        inputs: Some inputs, to see whether a detector watches this model.
        data: Clean inputs for a detector without a threshold.
        false_positive_rate: Share of them that it may detect.
        bounds: Of inputs.
        device: Of the model.
        seed: Of a random detector's draws, here and in every run that goes on.

    Raises:
        InvalidArgumentError: The detector has no threshold, and there is nothing to calibrate it on.
        ModelError: It detects all of the inputs, or its scores are of no use.
    """
    network = nn.Sequential(*model).eval() if isinstance(model, tuple) else as_module(model).module
    watching = as_detector(detector, network, inputs=inputs[:4].to(device))
    calibration = None
    if bool(watching.threshold.isnan().any()):
        if data is None:
            raise InvalidArgumentError(
                "detector_data",
                "nothing, and a detector without a threshold",
                "clean inputs to calibrate it on, or a detector whose calibrate() was called",
            )
        clean = check_inputs("detector_data", data, bounds=bounds)
        with seeded_globals(derive_seed(seed, "detector calibration")):
            calibration = watching.calibrate(clean, false_positive_rate=false_positive_rate)
    some = inputs[:64].to(device)
    with seeded_globals(derive_seed(seed, "detector probe")):
        detected = watching.decide(some)
    if len(some) >= 10 and bool(detected.all()):
        raise ModelError(
            f"detector {type(watching).__name__}: rejects all of {len(some)} clean inputs, so that no attack is "
            "needed; calibrate it on clean inputs like these"
        )
    return watching, calibration


def run_pair(
    subject: Subject,
    detector: Detector,
    *,
    calibration: Calibration | None,
    view: str,
    out: str | os.PathLike[str] | None,
    progress: bool,
    shard: tuple[int, int],
) -> BinarizationResult:
    """Run both tests; with a folder, each in one of its own inside it.

    Args:
        subject: What is tested.
        detector: With a threshold.
        calibration: How it got that, for the record.
        view: What attacks see that know logits only.
        out: Folder of the result.
        progress: Show progress bars.
        shard: Number of this process, and of how many.
    """
    check_choice("view", view, VIEWS)
    described = {
        **subject.described,
        "view": view,
        "detector": type(detector).__name__,
        "detector_digest": model_digest(detector, nn.Identity()),
        "detector_calibration": None if calibration is None else calibration.to_dict(),
    }
    shared = _network(subject.features) is detector.classifier
    features = Counted(subject.features.module, subject.features.counter, counts=not shared)
    results: dict[str, BinarizationResult] = {}
    for test in TESTS:
        defense = Defense(
            detector=detector, inverted=test == "inverted", view=view, draws=subject.settings.detector_draws
        )
        posed = replace(subject, features=features, described={**described, "test": test})
        folder = None if out is None else Path(out) / test
        results[test] = run_test(posed, out=folder, progress=progress, shard=shard, defense=defense)
    content = combine({test: result.content for test, result in results.items()}, described)
    examples = [
        replace(one, attack=f"{one.attack} ({test})") for test, result in results.items() for one in result.examples
    ]
    result = BinarizationResult(content, [], examples)
    if out is not None and shard[1] == 1:
        result.save(out)
    return result


def _network(features: Counted) -> nn.Module:
    return features.module.model if isinstance(features.module, LayerInput) else features.module


def combine(contents: Mapping[str, Mapping[str, Any]], described: Mapping[str, Any]) -> dict[str, Any]:
    """What ``result.json`` holds of both tests.

    Args:
        contents: Of each test.
        described: Settings that both share.
    """
    regular = contents["regular"]
    attacks = []
    for number, attack in enumerate(regular["attacks"]):
        tests = {test: content["attacks"][number] for test, content in contents.items()}
        verdict, reason = judge_pair(tests)
        scores = [one["score"] for one in tests.values()]
        attacks.append(
            {
                "name": attack["name"],
                "description": attack["description"],
                "target": attack["target"],
                "score": None if None in scores else min(scores),
                "verdict": verdict,
                "reason": reason,
                "tests": tests,
            }
        )
    settings = {**regular["settings"], **described}
    return {
        "kind": "binarization",
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "calibration": None,
        "settings": settings,
        "versions": regular["versions"],
        "seed": regular["seed"],
    }


def judge_pair(tests: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict on an attack, and why.

    Failed where it fails either test, passed where it passes both, else inconclusive.

    Args:
        tests: Its results in the regular and the inverted test.
    """
    verdicts = {test: result["verdict"] for test, result in tests.items()}
    reasons = " ".join(f"In the {test} test: {result['reason']}" for test, result in tests.items())
    if "failed" not in verdicts.values():
        verdict = "passed" if set(verdicts.values()) == {"passed"} else "inconclusive"
        return verdict, reasons
    failed = [test for test, verdict in verdicts.items() if verdict == "failed"]
    if len(failed) == 2:
        meaning = "It fails both tests: it finds neither what the detector lets pass nor what it detects."
    else:
        found, missed = (tests[test]["score"] for test in (_other(failed[0]), failed[0]))
        meaning = (
            f"It fails the {failed[0]} test ({_share(missed)}) and not the {_other(failed[0])} one ({_share(found)}): "
            "it ignores the detector, and finds only what happens to be on its side."
        )
    return "failed", f"{meaning} {reasons}"


def _other(test: str) -> str:
    return TESTS[1 - TESTS.index(test)]


def _share(score: float | None) -> str:
    return "nothing planted" if score is None else f"{score:.2f}"
