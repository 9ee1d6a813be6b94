"""From what the tests left to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.random import seeded_globals
from robust_ext.engine.context import current_context
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.run import Outcome, isolated
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.batches import find_batch_dependence
from robust_ext.evaluations.binarization.depth_scores import find_behind, witness_curve
from robust_ext.evaluations.binarization.head import OF_HEAD, whole
from robust_ext.evaluations.binarization.planting import count_plantable
from robust_ext.evaluations.binarization.protocol import BinarizationRun
from robust_ext.evaluations.binarization.reasons import others_to_plant, settle_planting
from robust_ext.evaluations.binarization.summary import decided_after, summarise_attack
from robust_ext.evaluations.binarization.verdict import misses_most, overall, overall_reason, pair_verdict
from robust_ext.evaluations.causes.attaching import (
    OF_LABELS,
    PROBED,
    Attacked,
    Probe,
    as_entry,
    explain,
    find_causes,
    prober,
)
from robust_ext.evaluations.causes.finding import WEIGHTS, Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.remedies import flag_of
from robust_ext.evaluations.causes.setup import judge_setup
from robust_ext.evaluations.caveats import Part, attack_warnings, outside_warnings, time_table
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.reports.findings import of_setup, remedy, sentence

# Of a sample that an attack was not run on.
_NOTHING = {"outcome": "not_planted"}


def make_content(outcome: Outcome[BinarizationRun], *, begun: float | None) -> dict[str, Any]:
    """Everything ``result.json`` holds of one test, of a call that began then; None for one of several."""
    run, attempted, outside, causes, behind = outcome.run, [], [], [], []
    attacks: list[dict[str, Any]] = []
    masked, easier = bool(run.head.fault), _easier(run, outcome.records)
    for name, attack in run.attacks.items():
        mine = _until_decided(name, run, outcome.records)
        timings = [entry for entry in outcome.timings if entry["block"] < len(mine)]
        words = {"description": describe(attack), "target": current_context().target}
        summary = summarise_attack(
            name,
            mine,
            timings,
            run.settings,
            attacks=len(run.attacks),
            gradients=_takes_gradients(attack, name, mine),
            masking=run.head.words if masked else "",
            easier=easier,
            **words,
        )
        attacks.append(summary)
        entries = [record["attacks"][name] for record in mine if name in record["attacks"]]
        attempted.append((name, [entry for entry in entries if entry["outcome"] != "not_planted"]))
        outside.append((name, attack, run.settings.threat_model, attempted[-1][1]))
        causes.append(_attacked(name, run, mine, failed=masked or attacks[-1]["verdict"] == "failed"))
        batches = find_batch_dependence(name, mine, run.rules)
        behind.append(batches or find_behind(attacks[-1], mine, run.attacks, run.settings))
    detecting = run.defense is not None
    # Where a detector decides too, an attack may miss what another finds without a fault of its own.
    findings = find_causes(causes, _probe(run), compared=not detecting)
    findings = [finding for finding in findings if not detecting or finding.code not in OF_LABELS]
    if masked and not any(one.code in OF_HEAD and one.attack is None for one in findings):
        findings.append(run.head.finding())
    caller = Caller(module=_network(run), attacks=run.attacks, images=run.inputs.dim() == 4)
    behind = [None if one is None else caller.addressed([one])[0] for one in behind]
    findings = [*_setup(run), *(one for one in findings if not of_setup(one.to_dict()))]
    findings = ranked([*caller.addressed(findings), *(finding for finding in behind if finding is not None)])
    for entry, slower in zip(attacks, behind, strict=True):
        if entry["verdict"] == "failed":
            attack = run.attacks[entry["name"]]
            blind = blind_words(attack, run.settings.exposure, entry) if detecting else ""
            entry["reason"] += f" {explain(findings, entry['name'], otherwise=blind)}"
        elif entry["verdict"] == "passed" and slower is not None:
            entry["reason"] += f" But: {sentence(slower.to_dict())} {remedy(slower.to_dict())}"
        elif entry["verdict"] == "inconclusive" and outcome.cut:
            done = len(outcome.records)
            ended = f"The time was over after {done} of {len(run.ids)} samples."
            entry["reason"] = f"{ended} {entry['reason']}" if done else ended
    return {
        "kind": "binarization",
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "witnesses": witness_curve(outcome.records, run.settings),
        "findings": [finding.to_dict() for finding in findings],
        "warnings": [
            *attack_warnings(attempted, consequence=", and count as not found"),
            *outside_warnings(outside),
            *_head_warnings(run, attacks),
        ],
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
        "time": time_table([outcome], begun=begun, others=_calibration(run)),
    }


def _head_warnings(run: BinarizationRun, attacks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning where the head may matter, and no problem was planted behind it for attacks that were tested."""
    untested = [one["name"] for one in attacks if one["samples"] and "at_logits" not in one]
    if run.behind is None or not untested:
        return []
    return [
        f"Nothing could be planted at the logits for {', '.join(untested)}: a verdict says nothing of the model's own "
        "head, which the test replaces. Measure robust accuracy next to Square too, which meets the whole model."
    ]


def _easier(run: BinarizationRun, records: Sequence[Record]) -> str:
    """Why a detector let nothing be planted, and the settings that were found to plant something; empty elsewhere.

    Only settings tried on the same samples are proposed.
    """
    settings, defense = run.settings, run.defense
    plantings = [record["planting"] for record in records if "planting" in record]
    unfound = sum(not one["found"] for one in plantings)
    if defense is None or 2 * unfound <= len(records) or any(record["separable"] for record in records):
        return ""
    references = any(attack.traits.references for attack in run.attacks.values())
    tried: list[tuple[dict[str, Any], int]] = []
    some = [record["index"] for record in records][:PROBED]
    for way in others_to_plant(settings, references=references):
        # More points take more time, and are of no use where fewer do.
        if "planting_tries" in way and any(count for _, count in tried):
            continue
        changed = replace(settings, **way)
        inputs, samples = run.inputs[some].to(run.device), [run.ids[index] for index in some]
        tried.append((way, count_plantable(run.forward, run.readout, inputs, samples, changed, defense)))
    tries = max(one["tries"] for one in plantings)
    return settle_planting(tried, unfound=unfound, samples=len(some), tries=tries, inverted=defense.inverted)


def _takes_gradients(attack: Attack, name: str, records: Sequence[Record]) -> bool:
    """Return whether an attack uses gradients, by its traits and its recordings."""
    traces = [trace for record in records if (trace := record["attacks"].get(name, {}).get("trace"))]
    return attack.traits.gradients and (not traces or any(trace.get("gradients") for trace in traces))


def _calibration(run: BinarizationRun) -> list[Part]:
    """Return the cost of the calibration, if there was one."""
    found = run.calibration
    return [] if found is None else [Part("calibration", None, Spent(**found["passes"], seconds=found["seconds"]))]


def _attacked(name: str, run: BinarizationRun, records: Sequence[Record], *, failed: bool) -> Attacked:
    """Return the results of an attack on its planted problems, all classified right before it."""
    model, position = run.settings.threat_model, run.settings.boundary_position
    planted = [record for record in records if record["attacks"].get(name, _NOTHING)["outcome"] != "not_planted"]
    return Attacked(
        name=name,
        attack=run.attacks[name],
        entries={
            record["index"]: as_entry(
                record["attacks"][name], correct=True, random_found=_random_found(record, position)
            )
            for record in planted
        },
        threat_model=model,
        failed=failed,
        budgets={model.epsilon: inf},
    )


def _random_found(record: Record, position: float) -> bool | None:
    reach = record["random_reach"]
    return None if reach is None else reach > position


def _probe(run: BinarizationRun) -> Probe:
    """Probes of the user's own network on the clean samples, with what it predicts as labels."""
    network = _network(run)
    inputs = run.inputs[:PROBED].to(run.device)

    def probe() -> ModelProbe:
        with torch.no_grad():
            labels = network(inputs).argmax(1)
        return prober(network, inputs, labels, threat_model=run.settings.threat_model, seed=run.settings.seed)()

    return probe


def _setup(run: BinarizationRun) -> list[Finding]:
    """Find faults of threat model and outputs, by the outputs of the user's network."""
    network, inputs = _network(run), run.inputs[:PROBED].to(run.device)
    if any(isinstance(part, AdaptiveDefense) for part in network.modules()):
        return []
    with torch.no_grad(), seeded_globals(run.settings.seed):
        logits = network(inputs)
    model = run.settings.threat_model
    return judge_setup(network, inputs, None, logits, bounds=model.bounds, budgets=[model])


def _network(run: BinarizationRun) -> nn.Module:
    """The user's own network."""
    return whole(run.features.module, run.readout)


def blind_words(attack: Attack, exposure: str, test: Mapping[str, Any]) -> str:
    """Why an attack fails that does not take the detector into account, and what to do.

    Empty for one that does. By its summary in a test it is the cause only where the attack misses most of what is
    planted; else it is told as a fact, where it bears on what was missed.
    """
    if attack.traits.detector or attack.traits.references or exposure == "margin" or test["score"] is None:
        return ""
    missed, rejected = test["samples"] - test["outcomes"]["found"], test["outcomes"]["rejected"]
    mostly, bears = misses_most(test), missed if exposure == "reject" else rejected
    if not (mostly or bears):
        return ""
    if exposure == "reject":
        if flag_of(attack, "targeted") or flag_of(attack, "aimed"):
            return ""
        fact = "it is untargeted, so being rejected, which is a class here, is a success for it"
    elif mostly:
        fact = "it does not know the detector"
    else:
        fact = f"of the {missed} it missed, {rejected} end on the wrong side of the detector, which it is not shown"
    ways = list[str]()
    if attack.traits.gradients:
        ways.append("take an attack on classifier and detector, such as robust_ext:OrthogonalPGD")
    if exposure == "reject" or not attack.traits.gradients:
        option = "--exposure margin" if current_context().command else 'exposure="margin"'
        ways.append(f"show it the detector in the margin of its logits ({option})")
    words = ", or ".join(ways)
    told = f"Most likely cause: {fact}" if mostly else f"{fact[0].upper()}{fact[1:]}"
    return f"{told}. Remedy: {words[0].upper()}{words[1:]}."


def _of_both(contents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The findings of both tests, one of each cause and attack."""
    once = dict[tuple[object, ...], dict[str, Any]]()
    for content in contents.values():
        for finding in content["findings"]:
            once.setdefault((finding["attack"], finding["code"], finding["layer"]), finding)
    return sorted(once.values(), key=lambda finding: WEIGHTS.index(finding["weight"]))


def _until_decided(name: str, run: BinarizationRun, records: Sequence[Record]) -> Sequence[Record]:
    if not run.settings.sequential:
        return records
    groups = run.complete_groups(records)
    number = decided_after(name, groups, run.rules)
    return records if number is None else [record for group in groups[:number] for record in group]


def combine_tests(
    contents: Mapping[str, Mapping[str, Any]], described: Mapping[str, Any], *, time: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``result.json`` of the regular and the inverted test together, with their shared settings.

    ``time`` is what both took.
    """
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
        "findings": _of_both(contents),
        "witnesses": [{"test": test, **row} for test, one in contents.items() for row in one["witnesses"]],
        "warnings": [f"In the {test} test: {words}" for test, one in contents.items() for words in one["warnings"]],
        "settings": {**regular["settings"], **described},
        "time": dict(time),
    }
