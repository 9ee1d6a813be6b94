"""The attack on a group of problems: planted points re-checked, the attack run, every candidate verified, canaries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import derive_seed, stream
from robust_ext.core.target import Counted, Target
from robust_ext.engine.verify import Verification, verify
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.binarized import BinarizedClassifier, identifiable
from robust_ext.models.defended import SuccessMargin


@dataclass
class Attacked:
    """What one attack did to a group of problems.

    Args:
        records: One a problem, by id: ``outcome``, ``planted``, ``references``, ``distance``, ``reach``, ``canary``.
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
    defense: Defense | None = None,
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
        defense: The detector beside the network, where there is one.

    Returns:
        Per problem ``outcome``: one of :data:`robust_ext.engine.verify.OUTCOMES`, or ``"not_planted"`` where no
        planted point is adversarial through the whole model.
    """
    result = Attacked()
    before = features.counter.snapshot()
    together = attack.traits.batching == "full" or (
        not attack.traits.one_by_one and identifiable(problems.inputs, settings.threat_model)
    )
    everything = list(range(len(problems.samples)))
    batches = [everything] if together else [[row] for row in everything]
    for rows in batches:
        if rows:
            _attack_batch(attack, problems.select(rows), features, settings, position, canaries, defense, result)
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
    defense: Defense | None,
    result: Attacked,
) -> None:
    batching = "full" if attack.traits.batching == "full" else "any"
    norm = settings.threat_model.norm
    module = problems.classifier(
        features, position=position, logit_scale=settings.logit_scale, batching=batching, norm=norm
    )
    start = time.perf_counter()
    seed = derive_seed(settings.seed, problems.samples[0], "recheck") // 2
    survivors = count_planted(module, problems, defense=defense, seed=seed)
    references = _count_adversarial(module, problems.references, defense, seed)
    result.seconds["verify"] += time.perf_counter() - start
    zeros = torch.zeros(len(problems.samples), dtype=torch.int64, device=problems.inputs.device)
    checked = _run(attack, module, problems, zeros, settings, "attack", defense, result)
    # The position along the direction follows from the logits, which the verification has anyway.
    along = ((checked.logits[:, 1] - checked.logits[:, 0]).double() / 2 / module.scale + module.threshold).cpu()
    reach = 1 + along / problems.gap.cpu()
    for row, sample in enumerate(problems.samples):
        planted = int(survivors[row])
        usable = checked.outcomes[row] not in ("not_finite", "out_of_bounds")
        result.records[sample] = {
            "outcome": checked.outcomes[row] if planted else "not_planted",
            "planted": planted,
            "references": int(references[row]),
            "distance": _plain(checked.distances[row]),
            "reach": _plain(reach[row]) if usable else None,
            "canary": None,
        }
        result.candidates[sample] = checked.candidates[row]
    chosen = [row for row, sample in enumerate(problems.samples) if sample in canaries and survivors[row]]
    if chosen:
        few = problems.select(chosen)
        module = few.classifier(
            features, position=position, logit_scale=settings.logit_scale, batching=batching, norm=norm
        )
        repaired = _run(attack, module, few, zeros[chosen] + 1, settings, "canary", defense, result)
        # An answer of NaN is no adversarial one either, but repairs nothing.
        answered = torch.isfinite(repaired.logits).all(1).tolist()
        for sample, outcome, finite in zip(few.samples, repaired.outcomes, answered, strict=True):
            result.records[sample]["canary"] = "repaired" if outcome == "not_adversarial" and finite else "kept"


def count_planted(
    module: BinarizedClassifier, problems: Problems, *, defense: Defense | None = None, seed: int = 0
) -> Tensor:
    """How many planted points of each problem are adversarial through the whole model, in this very batch, ``(B,)``.

    None counts where the clean sample itself is not class 0. With a detector, they must not be rejected either.
    """
    with torch.no_grad():
        clean = module(problems.inputs).argmax(1) == 0
    counts: Tensor = _count_adversarial(module, problems.planted, defense, seed) * clean
    return counts


def _count_adversarial(module: nn.Module, points: Tensor, defense: Defense | None, seed: int) -> Tensor:
    """How many of the points ``(B, n, ...)`` of each row are class 1 and not rejected, ``(B,)``."""
    counts = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for number, column in enumerate(points.unbind(1)):
        with torch.no_grad():
            adversarial = module(column).argmax(1) == 1
        if defense is not None:
            adversarial &= ~defense.rejects(column, seed=seed + number)
        counts += adversarial
    return counts


def _run(
    attack: Attack,
    module: nn.Module,
    problems: Problems,
    labels: Tensor,
    settings: BinarizationSettings,
    purpose: str,
    defense: Defense | None,
    result: Attacked,
) -> Verification:
    defended = None if defense is None else defense.defended(module)
    subject, classes = module, 2
    if defense is not None and defended is not None and defense.view != "classifier":
        subject, classes = (SuccessMargin(defended, 0), 2) if defense.view == "margin" else (defended, 3)
    target = Target(
        module=subject,
        bounds=settings.threat_model.bounds,
        classes=classes,
        input_shape=tuple(problems.inputs.shape[1:]),
        device=problems.inputs.device,
        defended=defended,
        references=problems.references if problems.references.shape[1] else None,
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
        rejects=None if defense is None or purpose == "canary" else partial(defense.rejects, seed=draw_seed(generator)),
    )
    result.seconds["attack"] += middle - start
    result.seconds["verify"] += time.perf_counter() - middle
    return checked


def _plain(value: Tensor) -> float | None:
    number = float(value)
    return number if number - number == 0 else None
