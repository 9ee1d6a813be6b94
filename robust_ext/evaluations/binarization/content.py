"""From what the tests left to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import nn

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.finding_texts import of_setup, remedy, sentence
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
from robust_ext.evaluations.binarization.verdict import misses_most, overall, overall_reason
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
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.remedies import flag_of
from robust_ext.evaluations.causes.setup import judge_setup
from robust_ext.evaluations.caveats import Part, attack_warnings, outside_warnings, time_table
from robust_ext.models.adaptive import AdaptiveDefense

# Of a sample that an attack was not run on.
_NOTHING = {"outcome": "not_planted"}


@dataclass(frozen=True)
class _Tested:
    """An attack with its records, up to the sequential rule's decision on it, and its entry of ``result.json``."""

    name: str
    attack: Attack
    records: Sequence[Record]
    entry: dict[str, Any]

    @property
    def attempted(self) -> list[Mapping[str, Any]]:
        """The records of its own, of planted samples."""
        mine = (record["attacks"][self.name] for record in self.records if self.name in record["attacks"])
        return [one for one in mine if one["outcome"] != "not_planted"]


def make_content(outcome: Outcome[BinarizationRun], *, begun: float | None) -> dict[str, Any]:
    """Return ``result.json`` of one test, of a call that began then; None for one of several."""
    run, easier = outcome.run, _easier(outcome.run, outcome.records)
    tested = [_test(name, outcome, easier=easier) for name in run.attacks]
    findings, behind = _findings(run, tested)
    for one, slower in zip(tested, behind, strict=True):
        one.entry["reason"] = _reason(one, outcome, findings, slower)
    attacks = [one.entry for one in tested]
    outside = [(one.name, one.attack, run.settings.threat_model, one.attempted) for one in tested]
    return {
        "kind": "binarization",
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "witnesses": witness_curve(outcome.records, run.settings),
        "findings": [finding.to_dict() for finding in findings],
        "warnings": [
            *attack_warnings([(one.name, one.attempted) for one in tested], consequence=", and count as not found"),
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


def _test(name: str, outcome: Outcome[BinarizationRun], *, easier: str) -> _Tested:
    """Summarise an attack, by its records."""
    run, attack = outcome.run, outcome.run.attacks[name]
    mine = _until_decided(name, run, outcome.records)
    numbers = summarise_attack(
        name,
        mine,
        [timing for timing in outcome.timings if timing["block"] < len(mine)],
        run.rules,
        gradients=_takes_gradients(attack, name, mine),
        masking=run.head.words if run.head.fault else "",
        easier=easier,
    )
    entry = {"name": name, "description": describe(attack), "target": current_context().target, **numbers}
    return _Tested(name, attack, mine, entry)


def _findings(run: BinarizationRun, tested: Sequence[_Tested]) -> tuple[list[Finding], list[Finding | None]]:
    """Find faults, ranked; and for each attack the finding that it falls behind or depends on its batch, if any."""
    masked, detecting = bool(run.head.fault), run.defense is not None
    causes = [
        _attacked(one.name, run, one.records, failed=masked or one.entry["verdict"] == "failed") for one in tested
    ]
    # Where a detector decides too, an attack may miss what another finds without a fault of its own.
    findings = find_causes(causes, _probe(run), compared=not detecting)
    findings = [finding for finding in findings if not detecting or finding.code not in OF_LABELS]
    if masked and not any(one.code in OF_HEAD and one.attack is None for one in findings):
        findings.append(run.head.finding())
    caller = Caller(module=_network(run), attacks=run.attacks, images=run.inputs.dim() == 4)
    behind = []
    for one in tested:
        found = find_batch_dependence(one.name, one.records, run.rules)
        found = found or find_behind(one.entry, one.records, run.attacks, run.settings)
        behind.append(None if found is None else caller.addressed([found])[0])
    findings = [*_setup(run), *(one for one in findings if not of_setup(one.to_dict()))]
    return ranked([*caller.addressed(findings), *(one for one in behind if one is not None)]), behind


def _reason(
    one: _Tested, outcome: Outcome[BinarizationRun], findings: Sequence[Finding], behind: Finding | None
) -> str:
    """Return the reason of a verdict, with the cause of a failure, a weakness of a pass, or the end of the time."""
    run, reason = outcome.run, str(one.entry["reason"])
    if one.entry["verdict"] == "failed":
        blind = blind_words(one.attack, run.settings.exposure, one.entry) if run.defense is not None else ""
        return f"{reason} {explain(findings, one.name, otherwise=blind)}"
    if one.entry["verdict"] == "passed" and behind is not None:
        return f"{reason} But: {sentence(behind.to_dict())} {remedy(behind.to_dict())}"
    if one.entry["verdict"] == "inconclusive" and outcome.cut:
        done = len(outcome.records)
        ended = f"The time was over after {done} of {len(run.ids)} samples."
        return f"{ended} {reason}" if done else ended
    return reason


def _head_warnings(run: BinarizationRun, attacks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning where the head may matter, and no problem was planted behind it for attacks that were tested."""
    untested = [one["name"] for one in attacks if one["samples"] and "at_logits" not in one]
    if run.behind is None or not untested:
        return []
    return [
        f"Nothing could be planted at the logits for {', '.join(untested)}, so the verdict does not cover the model's "
        "own head, which the test replaces. Also measure robust accuracy with Square, which attacks the whole model."
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
    planted; else it is stated as a fact, where it bears on missed problems.
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
        fact = "it is untargeted, so it counts being rejected, which is a class here, as a success"
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


def _until_decided(name: str, run: BinarizationRun, records: Sequence[Record]) -> Sequence[Record]:
    if not run.settings.sequential:
        return records
    groups = run.complete_groups(records)
    number = decided_after(name, groups, run.rules)
    return records if number is None else [record for group in groups[:number] for record in group]
