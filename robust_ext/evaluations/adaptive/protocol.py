"""The protocol: the candidates of each step are judged by the static model and by fresh draws of the defense."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import AttackError, AttackRefusedError, ModelError, RobustExtError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.target import Target
from robust_ext.engine.identity import describe, model_digest
from robust_ext.engine.inputs import EvaluationInputs, blocks_of
from robust_ext.engine.run import Block, Run
from robust_ext.engine.store import Store
from robust_ext.engine.task import Attempt, Check, Task, Work
from robust_ext.engine.verify import verify
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense

# Where a module stands, not what it does.
_NO_SETTINGS = ("training", "draw", "fixed")


@dataclass(frozen=True, kw_only=True)
class StepRun(Run):
    """One step on a defense; without a step, the clean inputs.

    Records hold the ``outcome`` of the verification, ``static`` (whether the static model is right) and ``right`` (of
    each prediction of the defense).
    """

    given: EvaluationInputs
    defense: AdaptiveDefense
    settings: AdaptiveSettings
    step: Step | None = None

    @property
    def draws(self) -> int:
        """Predictions taken of each candidate: two sets of repeats, or one where it never changes."""
        return 2 * self.settings.repeats if self.defense.random else 1

    def tolerates(self, error: RobustExtError) -> bool:
        """An exposure may have no gradients at all: that is for the report, not the end of the evaluation."""
        step = self.step
        return (
            step is not None
            and step.exposure != "static"
            and step.category in ("naive", "white-box")
            and isinstance(error, (AttackRefusedError, AttackError, ModelError))
        )

    def check(self) -> None:
        """Raise AttackRefusedError where the attack does not fit, or sends batches that the defense does not take."""
        step = self.step
        if step is None:
            return
        step.attack.check(threat_model=self.given.threat_model)
        if self.defense.batch_level and step.exposure != "static" and step.attack.traits.batching != "full":
            raise AttackRefusedError(
                f"{step.name}: {step.attack.name} sends rows in other batches than they came in, for which a "
                "batch-level defense predicts differently; choose an attack that keeps the batch in order"
            )

    def work(self, rows: range, store: Store) -> Work[Block]:
        """One task: the step on these rows."""
        given, name, first = self.given, self.title, self.given.ids[rows[0]]
        inputs, labels = given.rows(rows)
        if self.step is None:
            static_model, threat_model = self.defense.classifier, given.threat_model
            verified = verify(inputs, inputs, labels, module=static_model, threat_model=threat_model, attack=name)
            nothing = {"attack": 0.0, "verify": 0.0}
            attempt = Attempt(verified=verified, seconds=nothing, passes={"forward": 0, "backward": 0})
        else:
            target = Target(
                module=self.step.module(self.defense, self.settings),
                bounds=given.bounds,
                classes=given.logits.shape[1],
                input_shape=tuple(inputs.shape[1:]),
                device=inputs.device,
            )
            task = Task(
                attack=self.step.attack,
                target=target,
                inputs=inputs,
                labels=labels,
                threat_model=given.threat_model,
                stream=(self.settings.seed, first, "test time", name),
                counted=self.defense.classifier,
                # Random defenses draw from the global generators where nothing seeds them.
                global_seed=derive_seed(self.settings.seed, first, "test time draws", name),
            )
            attempt = yield task, Check(module=self.defense.classifier, name=name)
        begun = time.perf_counter()
        allowed = [outcome in ("found", "not_adversarial") for outcome in attempt.verified.outcomes]
        keep = torch.tensor(allowed, device=inputs.device).view(-1, *[1] * (inputs.dim() - 1))
        # What breaks the rules is no attempt: the clean input stands in its place.
        judged = torch.where(keep, attempt.verified.candidates, inputs)
        with torch.no_grad():
            static = (self.defense.classifier(judged).argmax(1) == labels).tolist()
            predictions = [self._right(judged, labels, first, number) for number in range(self.draws)]
        attempt.seconds["verify"] += time.perf_counter() - begun
        right = torch.stack(predictions, 1).tolist()
        return Block.of(rows, given.ids, attempt, judged, static=static, right=right)

    def _right(self, judged: Tensor, labels: Tensor, first: int, number: int) -> Tensor:
        """Whether one fresh prediction of the defense is right, bool ``(n,)``; those that are not finite are wrong."""
        with seeded_globals(derive_seed(self.settings.seed, first, "test time answers", self.title, number)):
            logits = self.defense(judged)
        right: Tensor = (logits.argmax(1) == labels) & torch.isfinite(logits).all(1)
        return right


def plan_runs(
    steps: Sequence[Step], given: EvaluationInputs, defense: AdaptiveDefense, settings: AdaptiveSettings
) -> list[StepRun]:
    """The run of the clean inputs, and one for each step."""
    model, group, size = given.threat_model, defense.group_size, settings.batch_size
    # Rows that go through the defense together, whole groups where it treats rows in groups.
    blocks = blocks_of(len(given.inputs), size if group is None else max(size // group, 1) * group)
    shared = {
        "defense": model_digest(defense),
        "defense_settings": _plain_settings(defense),
        "inputs": given.described["inputs"],
        "labels": given.described["labels"],
        "norm": model.norm,
        "epsilon": model.epsilon,
        "bounds": list(model.bounds),
        **settings.to_dict(),
    }
    return [
        StepRun(
            key=f"attacks/{number:02d}",
            title="clean" if step is None else step.name,
            blocks=blocks,
            identity=shared if step is None else {**shared, **_identity(step)},
            given=given,
            defense=defense,
            settings=settings,
            step=step,
        )
        for number, step in enumerate([None, *steps])
    ]


def _identity(step: Step) -> dict[str, Any]:
    found = {name: getattr(step, name) for name in ("name", "category", "exposure", "averaged")}
    found["attack"] = describe(step.attack)
    if isinstance(step.attack, Transfer):
        found["surrogates"] = {name: model_digest(one) for name, one in step.attack.surrogates.items()}
    return found


def _plain_settings(defense: AdaptiveDefense) -> dict[str, Any]:
    """What a defense and the modules in it keep beside tensors, by name: numbers, texts, and tuples of them."""
    found = {}
    for prefix, module in defense.named_modules():
        if module is defense.classifier:
            continue
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in _NO_SETTINGS and _is_plain(value):
                found[f"{prefix}.{name}" if prefix else name] = list(value) if isinstance(value, tuple) else value
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))
