"""From what the tests left to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.engine.context import current_context
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.run import Outcome, isolated
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.protocol import BinarizationRun
from robust_ext.evaluations.binarization.summary import decided_after, summarise_attack
from robust_ext.evaluations.binarization.verdict import overall, overall_reason, pair_verdict
from robust_ext.evaluations.caveats import attack_warnings


def make_content(outcome: Outcome[BinarizationRun]) -> dict[str, Any]:
    """Everything ``result.json`` holds of one test."""
    run, attacks, attempted = outcome.run, [], []
    for name, attack in run.attacks.items():
        mine = _until_decided(name, run, outcome.records)
        timings = [entry for entry in outcome.timings if entry["block"] < len(mine)]
        words = {"description": describe(attack), "target": current_context().target}
        attacks.append(summarise_attack(name, mine, timings, run.settings, **words))
        entries = [record["attacks"][name] for record in mine if name in record["attacks"]]
        attempted.append((name, [entry for entry in entries if entry["outcome"] != "not_planted"]))
    return {
        "kind": "binarization",
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "warnings": attack_warnings(attempted, consequence=", and count as not found"),
        "calibration": run.calibration,
        "settings": {
            **run.identity,
            **run.settings.to_dict(),
            "forward_batch": run.forward.rows,
            "fold": run.forward.module is not run.features,
        },
        "isolated": isolated([outcome]),
        "versions": versions(),
        "seed": run.settings.seed,
    }


def _until_decided(name: str, run: BinarizationRun, records: Sequence[Record]) -> Sequence[Record]:
    if not run.settings.sequential:
        return records
    groups = run.complete_groups(records)
    number = decided_after(name, groups, run.settings)
    return records if number is None else [record for group in groups[:number] for record in group]


def combine_tests(contents: Mapping[str, Mapping[str, Any]], described: Mapping[str, Any]) -> dict[str, Any]:
    """What ``result.json`` holds of the regular and the inverted test together, and of settings that both share."""
    regular = contents["regular"]
    attacks = []
    for number, attack in enumerate(regular["attacks"]):
        tests = {test: content["attacks"][number] for test, content in contents.items()}
        verdict, reason = pair_verdict(tests)
        scores = [one["score"] for one in tests.values()]
        attacks.append(
            {
                **{key: attack[key] for key in ("name", "description", "target")},
                "score": None if None in scores else min(scores),
                "verdict": verdict,
                "reason": reason,
                "tests": tests,
            }
        )
    return {
        **regular,
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "warnings": [f"In the {test} test: {words}" for test, one in contents.items() for words in one["warnings"]],
        "settings": {**regular["settings"], **described},
    }
