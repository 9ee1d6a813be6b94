"""The protocol: the candidates of each step are judged by the static model and by fresh draws of the defense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.transfer import Transfer
from robust_ext.core.cost import Cost, Costs, Spent
from robust_ext.core.errors import AttackError, AttackRefusedError, ModelError, RobustExtError
from robust_ext.core.random import derive_seed
from robust_ext.core.target import PassCounter, Target, count_all_calls
from robust_ext.engine.code_digest import attack_code, module_code
from robust_ext.engine.copies import behaviour
from robust_ext.engine.identity import describe, model_digest, plain_settings
from robust_ext.engine.inputs import EvaluationInputs, blocks_of
from robust_ext.engine.progress import Phases
from robust_ext.engine.run import RECORD, Block, Probe, Run
from robust_ext.engine.store import Store
from robust_ext.engine.task import Attempt, Check, Task, Work
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.adaptive.predictions import Judge
from robust_ext.evaluations.adaptive.settings import APART, CATEGORIES, AdaptiveSettings
from robust_ext.evaluations.arms import check_pursuit
from robust_ext.evaluations.detectors import NamedDetector, accepted_inputs, draw_references
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.defended import Defended

# What identifies a step besides its attack.
_STATED = ("name", "category", "exposure", "averaged", "held", "inner_steps")


@dataclass(frozen=True, kw_only=True)
class StepRun(Run):
    """One step on a defense, on all samples or on those that stand; without a step, the clean inputs.

    Records hold the ``outcome`` of the verification by the static model (``"non_finite_logits"`` also where it is the
    defense that returns such), ``static`` (whether the static model is right), ``right`` (of each prediction of the
    defense), whether the logits were finite, likewise: ``static_finite``, ``finite``; and the defense's ``margin``, its
    mean over the predictions that choose attacks.
    """

    kind: ClassVar[str] = "test_time"
    partial: ClassVar[bool] = True

    given: EvaluationInputs
    defense: AdaptiveDefense
    settings: AdaptiveSettings
    step: Step | None = None
    queried: tuple[float, float] = (1, 0)  # Rows of all networks, forward and back, that a prediction takes
    differentiated: tuple[float, float] | None = None  # Likewise of a gradient; None where that was not measured
    twin: str = ""  # Name of a step of the same attack and the same gradients, where there is one
    standing: Sequence[bool] | None = None  # Which samples it is run on, with their groups; None for all
    starts: Tensor | None = None  # Where it begins, (N, ...); None where the attack chooses
    detector: NamedDetector | None = None  # What it flags breaks nothing; it looks at what the defense is given
    accepted: Tensor | None = None  # Which clean inputs it accepts, bool (N,)

    @property
    def category(self) -> str:
        """The name of the step; ``"clean"`` without one."""
        return "clean" if self.step is None else self.step.category

    @property
    def draws(self) -> int:
        """Predictions taken of each candidate: two sets of repeats, or one where it never changes."""
        return 2 * self.settings.repeats if self.defense.random else 1

    def tolerates(self, error: RobustExtError) -> bool:
        """An exposure may have no gradients at all, and a step no way to its goal: that is for the report."""
        own = self.step is not None and self.step.exposure != "static" and self.category in ("naive", "white-box")
        refused = isinstance(error, AttackRefusedError) and not (self.given.plain and self.detector is None)
        return refused or (own and isinstance(error, (AttackRefusedError, AttackError, ModelError)))

    def prepare(self, store: Store) -> Work[None]:
        """Raise where the attack cannot search for what the criterion asks."""
        if self.step is not None:
            check_pursuit(self.step.attack, self.given.criterion)
        yield from ()

    def check(self) -> None:
        """Raise AttackRefusedError where the attack does not fit, or sends batches that the defense does not take."""
        step = self.step
        if step is None:
            return
        step.attack.check(threat_model=self.given.threat_model, detector=self.detector is not None)
        if self.defense.batch_level and step.exposure != "static" and step.attack.traits.batching != "full":
            raise AttackRefusedError(
                f"{step.name}: {step.attack.name} sends rows in other batches than they came in, for which a "
                "batch-level defense predicts differently; choose an attack that keeps the batch in order"
            )

    def digests(self) -> dict[str, Any]:
        """Return the digests of the evaluation, the defense and the surrogates."""
        given, defense = self.given, self.defense
        found = {
            "defense": model_digest(defense),
            "defense_code": module_code(defense),
            "defense_behaviour": behaviour(defense, given.inputs, given.bounds),
            **given.digests,
        }
        if others := self.surrogates:
            found["surrogates"] = {name: model_digest(one) for name, one in others.items()}
            behaviours = {name: behaviour(one, given.inputs, given.bounds) for name, one in others.items()}
            found["surrogate_behaviour"] = behaviours
        return found if self.step is None else {**found, "attack_code": attack_code(self.step.attack)}

    def costs(self) -> Costs:
        """The step on a sample and its predictions, in rows of all networks, of which a query takes several."""
        # The static model predicts once to verify, and once to be judged.
        costs: Costs = {("verify", None): Cost(*self.queried) * self.draws + Cost(2)}
        return costs if self.step is None else {("attack", self.title): self._attack_cost(self.step), **costs}

    def kept(self) -> int:
        """A candidate as it is, and its record."""
        return 4 * self.given.inputs[0].numel() + RECORD

    def _attack_cost(self, step: Step) -> Cost:
        found = step.attack.cost(self.given.threat_model, classes=self.given.logits.shape[1])
        if found is None:
            return Cost(unknown=(step.name,))
        if step.exposure == "static":
            return found
        averaged = self.defense.random and step.view.averaged
        queried = Cost(*self.queried) * (self.settings.draws if averaged else 1)
        if self.differentiated is None:
            # The gradient of a prediction comes back through all that it was made by.
            return queried * found.forward + Cost(0, queried.forward) * found.backward
        return queried * max(found.forward - found.backward, 0) + Cost(*self.differentiated) * found.backward

    def probe(self) -> Probe:
        """The static model, at the first inputs."""
        return self.defense.classifier, self.given.inputs, len(self.blocks[0])

    def place(self) -> torch.device:
        """The inputs' device."""
        return self.given.inputs.device

    def common(self) -> Sequence[object]:
        """The static model, the defense, the networks that points are transferred from, and the attack."""
        others = self.detector and self.detector.detector, self.step and self.step.attack
        return (*self.networks().values(), self.defense, *(one for one in others if one is not None))

    def networks(self) -> dict[str, nn.Module]:
        """All whose rows are counted: those of the defense, and those that points are transferred from."""
        others = {f"surrogate {name}": network for name, network in self.surrogates.items()}
        return {**self.defense.networks(), **others}

    @property
    def surrogates(self) -> Mapping[str, nn.Module]:
        """Networks that points are transferred from, by name."""
        attack = None if self.step is None else self.step.attack
        return attack.surrogates if isinstance(attack, Transfer) else {}

    def samples(self) -> Sequence[Tensor]:
        """Return the samples of the evaluation, and its starting points."""
        return self.given.samples if self.starts is None else (*self.given.samples, self.starts)

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The rows that it is run on, with their classes, and points that some attacks imitate."""
        (inputs, labels), indices = self.given.rows(rows), self.run_on(rows)
        run_on = [row - rows[0] for row in indices]
        starts = None if self.starts is None else self.starts[rows.start : rows.stop][run_on].to(inputs)
        classes = self.given.labels[rows.start : rows.stop][run_on]
        shared = {"inputs": inputs[run_on], "labels": labels[run_on], "classes": classes, "starts": starts}
        references, imitates = None, self.step is not None and self.step.attack.traits.references
        if indices and imitates and self.accepted is not None:
            references = draw_references(self.given, self.accepted, indices, seed=self.settings.seed)
        return {**shared, "references": references}

    def run_on(self, rows: range) -> list[int]:
        """Return a mask of a block's rows for this step: those that stand; for batch-level defenses, their groups."""
        if self.standing is None:
            return list(rows)
        size = self.defense.group_size or 1
        groups = (rows[start : start + size] for start in range(0, len(rows), size))
        return [row for group in groups if any(self.standing[row] for row in group) for row in group]

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """One task: the step on the rows of these that it is run on, each with the draws it would have among all."""
        run_on = self.run_on(rows)
        left_out = {"left_out": [row for row in rows if row not in run_on]} if len(run_on) < len(rows) else {}
        if not run_on:
            nothing = {"attack": Spent(), "verify": Spent()}
            return Block(records=[], timing={"block": rows[0], "phases": nothing, **left_out})
        given, inputs, networks = self.given, needs["inputs"], self.networks()
        judge, counter = self._judge(run_on, needs), PassCounter()
        if self.step is None:
            phases = Phases(counter)
            with count_all_calls(networks, counter):
                found = judge.verify(inputs, inputs)
            attempt = Attempt(verified=found, spent={"attack": Spent(), "verify": Spent()})
        else:
            task = self._task(self.step, rows, [row - rows[0] for row in run_on], needs)
            # Witnesses are of the defense, not of the static model.
            attempt = yield task, Check(module=self.defense.classifier, name=self.title, witnessed=False)
            phases = Phases(counter)
        with count_all_calls(networks, counter):
            of_static, judged = judge.choose(inputs, attempt)
            static, static_finite, _ = judge(of_static)
            # The same for all steps: fewer of their differences are chance.
            predictions = [judge(judged, "test time answers", number) for number in range(self.draws)]
        phases.stop("verify")
        attempt.spent["verify"] = Spent.total([attempt.spent["verify"], phases.spent["verify"]])
        right, finite, margins = (torch.stack(parts, 1) for parts in zip(*predictions, strict=True))
        near = margins[:, : self.settings.repeats].mean(1).nan_to_num()
        outcomes = tuple(
            old if old in LOST or good else "non_finite_logits"
            for old, good in zip(attempt.verified.outcomes, (static_finite & finite.all(1)).tolist(), strict=True)
        )
        attempt = replace(attempt, verified=replace(attempt.verified, outcomes=outcomes))
        columns = {"static": static, "right": right, "static_finite": static_finite, "finite": finite, "margin": near}
        shown = {key: column.tolist() for key, column in columns.items()}
        block = Block.of(run_on, given.ids, attempt, judged, **shown)
        return replace(block, timing={**block.timing, "block": rows[0], **left_out})

    def _task(self, step: Step, block: range, rows: list[int], needs: Mapping[str, Any]) -> Task:
        """The attack on some rows of a block."""
        given, inputs, module = self.given, needs["inputs"], step.module(self.defense, self.settings)
        first = given.ids[block[0]]
        target = Target(
            module=module,
            bounds=given.bounds,
            classes=given.logits.shape[1],
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
            defended=None if self.detector is None else Defended(module, self.detector.detector),
            references=needs["references"],
            starting_points=None if needs["starts"] is None else needs["starts"][:, None],
            criterion=given.criterion,
        )
        return Task(
            attack=step.attack,
            target=target,
            inputs=inputs,
            labels=needs["labels"],
            threat_model=given.threat_model,
            stream=(self.settings.seed, first, "test time", step.name),
            rows=rows,
            counted=self.networks(),
            # Random defenses draw from the global generators where nothing seeds them.
            global_seed=derive_seed(self.settings.seed, first, "test time draws", step.name),
        )

    def _judge(self, rows: Sequence[int], needs: Mapping[str, Any]) -> Judge:
        """Return what judges points of these rows; the clean inputs by their classes too, and by no detector."""
        return Judge(
            given=self.given,
            defense=self.defense,
            name=self.title,
            goals=needs["labels"],
            ids=[self.given.ids[row] for row in rows],
            classes=needs["classes"] if self.step is None else None,
            detector=None if self.step is None else self.detector,
            seed=self.settings.seed_of_judge,
        )


def plan_runs(
    steps: Sequence[Step],
    given: EvaluationInputs,
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    detector: NamedDetector | None = None,
) -> list[StepRun]:
    """The run of the clean inputs, and one for each step of a category that is wanted."""
    model, group, size = given.threat_model, defense.group_size, settings.batch_size
    # Rows that go through the defense together, whole groups where it treats rows in groups.
    blocks = blocks_of(len(given.inputs), size if group is None else max(size // group, 1) * group)
    shared = {
        "defense_settings": plain_settings(defense, besides=defense.classifier),
        **model.described,
        **{name: value for name, value in settings.to_dict().items() if name not in APART},
        **({} if detector is None else {"detector": detector.digest, **detector.described}),
    }
    accepted = None if detector is None else accepted_inputs(detector, given.inputs, seed=settings.seed)
    own = [
        {**{name: getattr(step, name) for name in _STATED}, "attack": describe(step.attack)} if step else {}
        for step in (None, *steps)
    ]
    return [
        StepRun(
            key=f"attacks/{number:02d}",
            title=step.name if step else "clean",
            blocks=blocks,
            identity={**shared, **own[number]},
            given=given,
            defense=defense,
            settings=settings,
            step=step,
            detector=detector,
            accepted=accepted,
        )
        for number, step in enumerate([None, *steps])
        if step is None or (step.category in (settings.only or CATEGORIES) and step.category not in settings.skip)
    ]
