"""The attack on a group of problems: planted points re-checked, the attack run, every candidate verified, canaries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.verify import Verification, verify
from robust_ext.models.binarized import BinarizedClassifier, identifiable
from robust_ext.random_streams import stream
from robust_ext.target import Counted, Target


@dataclass
class Attacked:
    """What one attack did to a group of problems.

    Args:
        records: One a problem, by id: ``outcome``, ``planted``, ``distance``, ``reach``, ``canary``.
        candidates: Verified candidates by id, ``(...)`` each.
        seconds: ``{"attack", "verify"}``.
        passes: Rows through the network, ``{"forward", "backward"}``.
    """

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    candidates: dict[int, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"attack": 0.0, "verify": 0.0})
    passes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})


def attack_problems(
    attack: Attack,
    problems: Problems,
    features: Counted,
    settings: BinarizationSettings,
    *,
    position: float,
    canaries: frozenset[int] = frozenset(),
) -> Attacked:
    """Run an attack on separable problems and verify what it returns.

    Problems are attacked together where the attack's treatment of rows allows, else one at a time.

    Args:
        attack: The attack.
        problems: All of them separable.
        features: The network's features, counted.
        settings: Of the test.
        position: Where the boundary lies, see :meth:`Problems.classifier`.
        canaries: Ids of samples that are also posed with the wrong label.

    Returns:
        Per problem ``outcome``: one of :data:`robust_ext.evaluations.verify.OUTCOMES`, or ``"not_planted"`` where no
        planted point is adversarial through the whole model.
    """
    result = Attacked()
    before = features.counter.snapshot()
    together = attack.traits.rows == "ordered" or (
        not attack.traits.alone and identifiable(problems.inputs, settings.threat_model)
    )
    everything = list(range(len(problems.samples)))
    batches = [everything] if together else [[row] for row in everything]
    for rows in batches:
        if rows:
            _attack_batch(attack, problems.select(rows), features, settings, position, canaries, result)
    spent = features.counter.since(before)
    result.passes = {"forward": spent.forward, "backward": spent.backward}
    return result


def _attack_batch(
    attack: Attack,
    problems: Problems,
    features: Counted,
    settings: BinarizationSettings,
    position: float,
    canaries: frozenset[int],
    result: Attacked,
) -> None:
    rows = "ordered" if attack.traits.rows == "ordered" else "any"
    norm = settings.threat_model.norm
    module = problems.classifier(features, position=position, logit_scale=settings.logit_scale, rows=rows, norm=norm)
    start = time.perf_counter()
    survivors = count_planted(module, problems)
    result.seconds["verify"] += time.perf_counter() - start
    zeros = torch.zeros(len(problems.samples), dtype=torch.int64, device=problems.inputs.device)
    checked = _run(attack, module, problems, zeros, settings, "attack", result)
    # The position along the direction follows from the logits, which the verification has anyway.
    along = ((checked.logits[:, 1] - checked.logits[:, 0]).double() / 2 / module.scale + module.threshold).cpu()
    reach = 1 + along / problems.gap.cpu()
    for row, sample in enumerate(problems.samples):
        planted = int(survivors[row])
        usable = checked.outcomes[row] not in ("not_finite", "out_of_bounds")
        result.records[sample] = {
            "outcome": checked.outcomes[row] if planted else "not_planted",
            "planted": planted,
            "distance": _plain(checked.distances[row]),
            "reach": _plain(reach[row]) if usable else None,
            "canary": None,
        }
        result.candidates[sample] = checked.candidates[row]
    chosen = [row for row, sample in enumerate(problems.samples) if sample in canaries and survivors[row]]
    if chosen:
        few = problems.select(chosen)
        module = few.classifier(features, position=position, logit_scale=settings.logit_scale, rows=rows, norm=norm)
        repaired = _run(attack, module, few, zeros[chosen] + 1, settings, "canary", result)
        # An answer of NaN is no adversarial one either, but repairs nothing.
        answered = torch.isfinite(repaired.logits).all(1).tolist()
        for sample, outcome, finite in zip(few.samples, repaired.outcomes, answered, strict=True):
            result.records[sample]["canary"] = "repaired" if outcome == "not_adversarial" and finite else "kept"


def count_planted(module: BinarizedClassifier, problems: Problems) -> Tensor:
    """How many planted points of each problem are adversarial through the whole model, in this very batch, ``(B,)``.

    None counts where the clean sample itself is not class 0.
    """
    with torch.no_grad():
        survive = [module(points).argmax(1) == 1 for points in problems.planted.unbind(1)]
        clean = module(problems.inputs).argmax(1) == 0
    counts: Tensor = torch.stack(survive, 1).sum(1) * clean
    return counts


def _run(
    attack: Attack,
    module: nn.Module,
    problems: Problems,
    labels: Tensor,
    settings: BinarizationSettings,
    purpose: str,
    result: Attacked,
) -> Verification:
    target = Target(
        module=module,
        bounds=settings.threat_model.bounds,
        classes=2,
        input_shape=tuple(problems.inputs.shape[1:]),
        device=problems.inputs.device,
    )
    generator = stream(settings.seed, problems.samples[0], purpose, attack.name)
    start = time.perf_counter()
    candidates = run_attack(
        attack, target, problems.inputs, labels, threat_model=settings.threat_model, generator=generator
    )
    middle = time.perf_counter()
    checked = verify(
        candidates,
        problems.inputs,
        labels,
        module=module,
        threat_model=settings.threat_model,
        attack=attack.name,
    )
    result.seconds["attack"] += middle - start
    result.seconds["verify"] += time.perf_counter() - middle
    return checked


def _plain(value: Tensor) -> float | None:
    number = float(value)
    return number if number - number == 0 else None
