"""Running the steps: candidates of each, verified, and judged by the static model and by fresh draws of the defense."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import AttackError, AttackRefusedError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import PassCounter, Target, count_calls
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.identity import describe, inputs_digest, model_digest, versions
from robust_ext.engine.store import FolderRun, MemoryRun, RunStore
from robust_ext.engine.verify import verify
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense

CLEAN = "clean"

# Where a module stands, not what it does.
_NO_SETTINGS = ("training", "draw", "fixed")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is attacked.

    Args:
        defense: The defense; its ``classifier`` is the static model.
        inputs: Clean samples ``(N, ...)``, float32, on its device.
        labels: Their classes.
        samples: Their ids.
        threat_model: What candidates may be.
        classes: Columns of the logits.
        settings: Of the run.
    """

    defense: AdaptiveDefense
    inputs: Tensor
    labels: Tensor
    samples: Sequence[int]
    threat_model: ThreatModel
    classes: int
    settings: AdaptiveSettings

    @property
    def described(self) -> dict[str, Any]:
        """What identifies it."""
        model = self.threat_model
        return {
            "defense": model_digest(self.defense, nn.Module()),
            "defense_settings": _plain_settings(self.defense),
            "inputs": inputs_digest(self.inputs, self.samples),
            "labels": inputs_digest(self.labels, self.samples),
            "norm": model.norm,
            "epsilon": model.epsilon,
            "bounds": list(model.bounds),
            **self.settings.to_dict(),
        }

    @property
    def draws(self) -> int:
        """Answers taken of each candidate: two sets of repeats, or one answer where it never changes."""
        return 2 * self.settings.repeats if self.defense.random else 1

    def blocks(self) -> list[range]:
        """Rows that go through the defense together, whole groups where it treats rows in groups."""
        size, group = self.settings.batch_size, self.defense.group_size
        if group is not None:
            size = max(size // group, 1) * group
        rows = len(self.inputs)
        return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step left.

    Args:
        step: The step; None for the clean inputs.
        records: One a sample: ``outcome`` of its verification, ``static`` (whether the static model is right) and
            ``right`` (of each answer of the defense).
        timings: One a block.
        refusal: Why it could not be run; the rest is then empty.
    """

    step: Step | None
    records: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]
    refusal: str | None = None


def run_steps(
    steps: Sequence[Step], subject: Subject, *, folder: Path | None, advance: Callable[[str, int], None]
) -> tuple[list[Outcome], dict[str, RunStore]]:
    """Run what is not there yet: the clean inputs, and every step.

    Args:
        steps: With different names.
        subject: What is attacked.
        folder: Run folder; None keeps everything in memory.
        advance: Told of every finished block: a title, and how many samples.

    Returns:
        The clean inputs first, then the steps in order; and where each is kept, by name.
    """
    described = subject.described
    outcomes, stores = [], {}
    for number, step in enumerate([None, *steps]):
        name = CLEAN if step is None else step.name
        settings = {**described, **({} if step is None else _described(step))}
        store: RunStore = (
            MemoryRun()
            if folder is None
            else FolderRun(folder / "attacks" / f"{number:02d}", settings=settings, versions=versions())
        )
        try:
            outcomes.append(_run_step(step, subject, store, advance))
        finally:
            store.close()
        stores[name] = store
    return outcomes, stores


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


def _described(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "category": step.category,
        "view": step.view,
        "averaged": step.averaged,
        "attack": describe(step.attack),
        **_surrogates(step.attack),
    }


def _surrogates(attack: Attack) -> dict[str, Any]:
    if not isinstance(attack, Transfer):
        return {}
    return {"surrogates": {name: model_digest(one, nn.Module()) for name, one in attack.surrogates.items()}}


def _run_step(step: Step | None, subject: Subject, store: RunStore, advance: Callable[[str, int], None]) -> Outcome:
    title = CLEAN if step is None else step.name
    done = {record["index"] for record in store.records()}
    try:
        if step is not None:
            check_step(step, subject)
        for rows in subject.blocks():
            if rows[0] not in done:
                _run_block(step, rows, subject, store)
            advance(title, len(rows))
    except (AttackRefusedError, AttackError, ModelError) as error:
        # A view may have no gradients at all: that is for the report, not the end of the evaluation.
        if step is None or step.view == "static" or step.category not in ("naive", "white-box"):
            raise
        advance(title, len(subject.inputs))
        return Outcome(step=step, records=[], timings=[], refusal=str(error))
    return Outcome(step=step, records=store.records(), timings=store.timings())


def check_step(step: Step, subject: Subject) -> None:
    """Raise where a step cannot be run on a defense.

    Raises:
        AttackRefusedError: The attack does not fit, or sends batches that a batch-level defense does not take.
    """
    step.attack.check(threat_model=subject.threat_model)
    if subject.defense.batch_level and step.view != "static" and step.attack.traits.batching != "full":
        raise AttackRefusedError(
            f"{step.name}: {step.attack.name} sends rows in other batches than they came in, which a "
            "batch-level defense answers differently; choose an attack that keeps the batch in order"
        )


def _run_block(step: Step | None, rows: range, subject: Subject, store: RunStore) -> None:
    inputs, labels = subject.inputs[rows[0] : rows[-1] + 1], subject.labels[rows[0] : rows[-1] + 1]
    defense, first = subject.defense, subject.samples[rows[0]]
    counter, begun = PassCounter(), time.perf_counter()
    name = CLEAN if step is None else step.name
    candidates = inputs
    if step is not None:
        target = Target(
            module=step.module(defense, subject.settings),
            bounds=subject.threat_model.bounds,
            classes=subject.classes,
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
            counter=counter,
        )
        seed = derive_seed(subject.settings.seed, first, "test time draws", name)
        # Random defenses draw from the global generator where nothing seeds them.
        with count_calls(defense.classifier, counter), seeded_globals(seed):
            candidates = run_attack(
                step.attack,
                target,
                inputs,
                labels,
                threat_model=subject.threat_model,
                generator=stream(subject.settings.seed, first, "test time", name),
            )
    middle = time.perf_counter()
    checked = verify(
        candidates,
        inputs,
        labels,
        module=defense.classifier,
        threat_model=subject.threat_model,
        attack=name,
    )
    allowed = [outcome in ("found", "not_adversarial") for outcome in checked.outcomes]
    keep = torch.tensor(allowed, device=inputs.device).view(-1, *[1] * (inputs.dim() - 1))
    # What breaks the rules is no attempt: the clean input stands in its place.
    judged = torch.where(keep, checked.candidates, inputs)
    with torch.no_grad():
        static = defense.classifier(judged).argmax(1) == labels
        right = torch.stack(
            [_answer(subject, judged, labels, first, name, number) for number in range(subject.draws)], 1
        )
    store.append(
        [
            {
                "index": row,
                "sample": subject.samples[row],
                "outcome": checked.outcomes[place],
                "static": bool(static[place]),
                "right": [bool(value) for value in right[place].tolist()],
            }
            for place, row in enumerate(rows)
        ],
        {
            "block": rows[0],
            "seconds": {"attack": middle - begun, "verify": time.perf_counter() - middle},
            "passes": {"forward": counter.forward, "backward": counter.backward},
        },
        judged,
    )


def _answer(subject: Subject, judged: Tensor, labels: Tensor, first: int, name: str, number: int) -> Tensor:
    """Whether one fresh answer of the defense is right, bool ``(n,)``; answers that are not finite are wrong."""
    seed = derive_seed(subject.settings.seed, first, "test time answers", name, number)
    with seeded_globals(seed):
        logits = subject.defense(judged)
    right: Tensor = (logits.argmax(1) == labels) & torch.isfinite(logits).all(1)
    return right
