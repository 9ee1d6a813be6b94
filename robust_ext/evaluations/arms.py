"""Arms, attacks with a budget each, and their runs: each attack once, its candidates kept and scored by detectors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import refuse_gradients
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, RobustExtError, warn
from robust_ext.core.foreign import teaching
from robust_ext.core.target import Target
from robust_ext.core.threat import NORMS, ThreatModel, check_epsilon
from robust_ext.core.validation import check_choice, check_name
from robust_ext.core.wording import typed
from robust_ext.engine.code_digest import attack_code
from robust_ext.engine.identity import describe
from robust_ext.engine.run import RECORD, Block, candidates_name
from robust_ext.engine.store import Store
from robust_ext.engine.task import Check, Task, Work
from robust_ext.evaluations.detectors import NamedDetector, accepted_inputs, draw_references, has_threshold
from robust_ext.evaluations.scored_runs import ScoredRun
from robust_ext.models.defended import Defended
from robust_ext.registry.attack import as_attack


@teaching
@dataclass(frozen=True, kw_only=True)
class Arm:
    """One attack with one budget.

    Args:
        attack: Anything :func:`robust_ext.as_attack` takes.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``; None for attacks whose perturbations no norm limits, which may return
            any input in bounds.
        epsilon: Budget in the units of the inputs; None for attacks that look for the smallest perturbation and are
            judged by their success alone, and without a norm.
        label: What tables call the attack; its own name when left out.
        objective: What it maximises, where arms of a group differ in that; with None it counts for every one.
        algorithm: How, where arms of a group differ in that.
    """

    attack: object
    norm: str | None = "linf"
    epsilon: float | None = None
    label: str | None = None
    objective: str | None = None
    algorithm: str | None = None
    resolved: Attack = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("label", "objective", "algorithm"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        if self.norm is not None:
            check_choice("norm", self.norm, NORMS)
        if self.epsilon is not None:
            if self.norm is None:
                raise InvalidArgumentError("epsilon", self.epsilon, "none for an arm without a norm")
            object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        object.__setattr__(self, "resolved", as_attack(self.attack, argument="arm"))
        if self.epsilon is None and self.norm is not None and not self.resolved.traits.minimum_norm:
            raise InvalidArgumentError(
                "epsilon", f"none for {self.short}", "a budget: this attack does not look for the smallest perturbation"
            )

    @property
    def short(self) -> str:
        """The attack in a word or two."""
        return self.label or self.resolved.name

    @property
    def group(self) -> str:
        """The arms it is judged with: those of its norm and epsilon; without an epsilon it is alone."""
        return self.short if self.epsilon is None else f"{self.norm} {typed(self.epsilon, 'g')}"

    @property
    def name(self) -> str:
        """Unlike those of other arms of a suite."""
        return self.short if self.epsilon is None else f"{self.short} {self.group}"

    def threat_model(self, given: ThreatModel, *, values: int) -> ThreatModel:
        """Return the attack's threat model for inputs of this size; without a budget, the whole bounds.

        Bounds, and limits of entries, are those that are given.
        """
        norm, epsilon = self.norm or "linf", self.epsilon
        if epsilon is None or self.resolved.traits.minimum_norm:
            epsilon = given.width * {"linf": 1.0, "l2": float(values) ** 0.5, "l1": float(values)}[norm]
            if given.weights is not None:
                epsilon /= float(given.weights.array.min())
        return replace(given, norm=norm, epsilon=epsilon)


def check_arms(arms: Iterable[Arm]) -> list[Arm]:
    """Arms with different names, at least one; InvalidArgumentError otherwise."""
    found = list(arms)
    if not found:
        raise InvalidArgumentError("arms", "none", "at least one arm")
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError("arms", f"several named {', '.join(twice)}", "different labels")
    return found


@dataclass(frozen=True, kw_only=True)
class ArmRun(ScoredRun):
    """One run of an attack; minimum-norm attacks are run once for all the budgets they are judged by."""

    attack: Attack
    threat_model: ThreatModel  # What it is given
    arms: tuple[Arm, ...]  # The arms that are judged by its candidates
    adaptive_to: NamedDetector | None = None  # The detector that it attacks too

    @property
    def holds(self) -> dict[str, str]:
        """The run, every detector, and every budget."""
        return {**super().holds, **{f"arm {arm.name}": arm.name for arm in self.arms}}

    def costs(self) -> Costs:
        """The attack on a sample, and its verification; what a detector is queried for is measured."""
        found = self.attack.cost(self.threat_model, classes=self.given.logits.shape[1])
        if found is None or self.adaptive_to is not None:
            found = (found or Cost()) + Cost(unknown=(self.title,))
        return {("attack", self.title): found, ("verify", None): Cost(1)}

    def digests(self) -> dict[str, Any]:
        """Return the digests of the evaluation and the attack's code."""
        return {**super().digests(), "attack_code": attack_code(self.attack)}

    def kept(self) -> int:
        """A candidate as it is, and its record."""
        return 4 * self.given.inputs[0].numel() + RECORD

    def points(self, rows: range, store: Store) -> Tensor:
        """The candidates of a block."""
        kept = store.load(candidates_name(rows[0]))
        assert kept is not None
        return torch.from_numpy(kept["candidates"]).to(self.given.inputs.device)

    def common(self) -> Sequence[object]:
        """The classifier, the detectors and the attack."""
        return (*super().common(), self.attack)

    def tolerates(self, error: RobustExtError) -> bool:
        """An attack may be refused by one detector and not by another, which goes into the result."""
        return self.adaptive_to is not None and isinstance(error, AttackRefusedError)

    def prepare(self, store: Store) -> Work[None]:
        """Raise where the attack does not fit the detector."""
        detector = self.adaptive_to
        if detector is not None and not has_threshold(detector.detector):
            raise AttackRefusedError(
                f"{self.title}: detector {detector.name} has no threshold, which attacks that are adaptive to it need; "
                "give clean inputs to calibrate it on"
            )
        self.attack.check(threat_model=self.threat_model, detector=detector is not None)
        check_pursuit(self.attack, self.given.criterion)
        yield from ()

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The rows, and the points that some attacks imitate."""
        inputs, labels = self.given.rows(rows)
        imitates = self.adaptive_to is not None and self.attack.traits.references
        return {"inputs": inputs, "labels": labels, "references": self.references(rows) if imitates else None}

    def references(self, rows: Sequence[int]) -> Tensor | None:
        """Draw points that attacks imitate, see :func:`draw_references`."""
        return draw_references(self.given, self.accepted, rows, seed=self.seed)

    @cached_property
    def accepted(self) -> Tensor:
        """A mask of the clean inputs that the attacked detector accepts, bool ``(N,)``."""
        assert self.adaptive_to is not None
        return accepted_inputs(self.adaptive_to, self.given.inputs, seed=self.seed)

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """One task: the attack on these rows, whose worker scores the candidates too."""
        attempt = yield self.task(rows, needs), Check(module=self.given.module, name=self.attack.name)
        found = attempt.verified
        block = Block.of(rows, self.given.ids, attempt, found.candidates, predicted=found.logits.argmax(1).tolist())
        if not self.detectors:
            return block
        _, scores = self.score_block(rows, found.candidates, {})
        return replace(block, arrays={**block.arrays, **scores})

    def task(self, rows: range, needs: Mapping[str, Any]) -> Task:
        """The attack on the rows of a block that it needs."""
        given, detector, inputs, model = self.given, self.adaptive_to, needs["inputs"], self.threat_model
        target = Target(
            module=given.module,
            bounds=given.bounds,
            classes=given.logits.shape[1],
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
            defended=None if detector is None else Defended(given.module, detector.detector),
            references=needs["references"],
            criterion=given.criterion,
        )
        # The same in any units of the inputs.
        budget = f"{model.epsilon / model.width:g}"
        keys = (self.arms[0].short, model.norm, budget, "" if detector is None else detector.name)
        return Task(
            attack=self.attack,
            target=target,
            inputs=inputs,
            labels=needs["labels"],
            threat_model=model,
            stream=(self.seed, given.ids[rows[0]], "arm", *keys),
            counted=given.module,
        )


def plan_runs(arms: Sequence[Arm], clean: ScoredRun) -> list[ArmRun]:
    """The runs of arms: one each; one for all budgets of a minimum-norm attack; one a detector if adaptive.

    Raises where an attack does not fit; one detector alone may refuse an adaptive one, which the result reports.
    """
    refuse_gradients((arm.resolved for arm in arms), clean.given.module)
    given, grouped = clean.given, dict[tuple[str, str, ThreatModel], list[Arm]]()
    values = given.inputs[0].numel()
    for arm in arms:
        if arm.norm is not None and arm.epsilon is not None:
            replace(given.threat_model, norm=arm.norm, epsilon=arm.epsilon).check_resolution(values)
        model = arm.threat_model(given.threat_model, values=values)
        # By label too: two functions may have one description.
        grouped.setdefault((arm.short, describe(arm.resolved), model), []).append(arm)
    runs = []
    for (_, _, model), found in grouped.items():
        adaptive = found[0].resolved.traits.detector
        if not adaptive or not clean.detectors:
            found[0].resolved.check(threat_model=model)
            check_pursuit(found[0].resolved, given.criterion)
        runs += [_arm_run(found, model, detector, clean) for detector in (clean.detectors if adaptive else (None,))]
    return runs


def check_pursuit(attack: Attack, criterion: Criterion) -> None:
    """Raise where an attack cannot be run for a criterion, warn where it searches for something else."""
    # The same for all attacks where they are given true labels and losses of them.
    if (criterion.aims or criterion.ranks) and not attack.pursues(criterion):
        points = "points where the target is predicted" if criterion.aims else "misclassified points"
        warn(
            f"{attack.name}: searches for {points}, and its candidates are judged by whether "
            f"{criterion.words}; robust_ext:APGD searches for these"
        )


def _arm_run(arms: Sequence[Arm], model: ThreatModel, detector: NamedDetector | None, clean: ScoredRun) -> ArmRun:
    arm, attack = arms[0], arms[0].resolved
    # The same for all budgets by which a minimum-norm attack is judged.
    title = arm.name if arm.epsilon is None or not attack.traits.minimum_norm else f"{arm.short} {arm.norm}"
    title = title if detector is None else f"{title}, knowing {detector.name}"
    # All that decides what it returns, besides model, inputs and seed.
    own = {"attack": describe(attack), **model.described, "adaptive_to": None if detector is None else detector.name}
    # A name for files, the same for the same run in any suite.
    digest = hashlib.blake2b(repr([title, *sorted(own.items())]).encode(), digest_size=5).hexdigest()
    described = {"detector": None} if detector is None else {"detector": detector.digest, **detector.described}
    return ArmRun(
        key=f"attacks/{re.sub(r'[^A-Za-z0-9.]+', '-', title)[:60].strip('-.')}-{digest}",
        title=title,
        blocks=clean.given.blocks(clean.batch_size),
        identity={**clean.identity, **own, **described},
        long=attack.traits.minimum_norm or detector is not None,
        given=clean.given,
        detectors=clean.detectors,
        batch_size=clean.batch_size,
        seed=clean.seed,
        judge_seed=clean.judge_seed,
        attack=attack,
        threat_model=model,
        arms=tuple(arms),
        adaptive_to=detector,
    )
