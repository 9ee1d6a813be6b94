"""One binarization test of prepared attacks: run, kept in a folder, and summed up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from robust_ext.attacks.base import Attack
from robust_ext.core.target import Counted, PassCounter, count_calls
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.run_folder import RunFolder
from robust_ext.evaluations.binarization import calibration as hardness
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.examples import load_examples, save_examples
from robust_ext.evaluations.binarization.forward import choose_forward
from robust_ext.evaluations.binarization.protocol import (
    Job,
    Memory,
    Store,
    complete_groups,
    run_groups,
)
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.summary import decided_after, summarise_attack
from robust_ext.evaluations.binarization.verdict import overall, overall_reason
from robust_ext.reports import Example

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tested, made ready.

    Args:
        features: The network's features, counted.
        readout: What makes its logits of them.
        device: Of the network.
        attacks: By name.
        inputs: Clean samples ``(N, ...)``.
        samples: Their ids.
        settings: Of the test.
        described: All that identifies a run, as plain values.
    """

    features: Counted
    readout: nn.Module
    device: torch.device
    attacks: Mapping[str, Attack]
    inputs: Tensor
    samples: Sequence[int]
    settings: BinarizationSettings
    described: Mapping[str, Any]


def run_test(
    subject: Subject,
    *,
    out: str | os.PathLike[str] | None,
    calibrate_on: int = 0,
    progress: bool = False,
    shard: tuple[int, int] = (0, 1),
    defense: Defense | None = None,
) -> BinarizationResult:
    """Run one test.

    Args:
        subject: What is tested.
        out: Run folder; None keeps everything in memory.
        calibrate_on: Number of samples on which the hardness is calibrated first.
        progress: Show a progress bar on stderr.
        shard: Number of this process, and of how many that share the run folder.
        defense: The detector of a regular or inverted test.
    """
    features, inputs, samples, checked = subject.features, subject.inputs, subject.samples, subject.settings
    described, device, counter = subject.described, subject.device, subject.features.counter
    store: Store = Memory()
    with ExitStack() as stack:
        folder: RunFolder | None = None
        if out is not None:
            folder = RunFolder(out, kind="binarization", settings=described, versions=versions(), shard=shard[0])
            store = stack.enter_context(folder)
        once = _at_once if folder is None else folder.once
        forward = choose_forward(features, inputs[:2].to(device), rows=checked.forward_batch, fold=checked.fold)
        if defense is not None:
            stack.enter_context(count_calls(defense.detector.classifier, counter))
        calibration: dict[str, Any] | None = None
        if calibrate_on:
            some, ids = inputs[:calibrate_on].to(device), samples[:calibrate_on]
            calibration = once(
                "calibration",
                lambda: hardness.calibrate(
                    features, subject.readout, subject.attacks, some, ids, checked, forward=forward
                ),
            )
        examples: list[Example] = []
        title = "binarization" if defense is None else f"binarization, {defense.test}"
        bar = stack.enter_context(tqdm(total=len(samples), unit="sample", disable=not progress, desc=title))
        counter.watch = _PassesShown(bar)

        def advance(done: int) -> None:
            bar.update(done)

        job = Job(
            features=features,
            readout=subject.readout,
            attacks=subject.attacks,
            inputs=inputs,
            samples=samples,
            settings=hardness.apply(checked, calibration),
            forward=forward,
            device=device,
            shard=shard,
            defense=defense,
            progress=advance,
            show=examples.extend if folder is None else lambda new: save_examples(folder.path, new),
        )
        run_groups(job, store)
        if folder is not None:
            examples = load_examples(folder.path)
        records, timings = _used(job, store)
        content = _content(job, records, timings, described, calibration)
        result = BinarizationResult(content, records, examples)
        if folder is not None and shard[1] == 1:
            folder.finish(records)
            result.save(folder.path)
        return result


class _PassesShown:
    """Rows sent forward, shown at the bar at most twice a second: a group can take long before it advances the bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._shown = time.monotonic()

    def __call__(self, counter: PassCounter) -> None:
        if not self._bar.disable and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            self._bar.set_postfix_str(f"{counter.forward:,} rows forward")


def _at_once(_name: str, compute: Callable[[], T]) -> T:
    return compute()


def _used(job: Job, store: Store) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Records and timings up to where the last attack was decided; all of them where the protocol is not sequential."""
    groups = complete_groups(job, store.records())
    if job.settings.sequential:
        needed = [decided_after(name, groups, job.settings) or len(groups) for name in job.attacks]
        groups = groups[: max(needed)]
    timings = {entry["group"]: entry for entry in store.timings() if entry["group"] < len(groups)}
    return [record for group in groups for record in group], list(timings.values())


def _content(
    job: Job,
    records: Sequence[Mapping[str, Any]],
    timings: Sequence[Mapping[str, Any]],
    described: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    attacks = []
    for name, attack in job.attacks.items():
        mine = _until_decided(name, job, records)
        last = len(mine)
        attacks.append(
            summarise_attack(
                name,
                mine,
                [entry for entry in timings if job.groups[entry["group"]].start < last],
                job.settings,
                description=describe(attack),
                target=described["target"],
            )
        )
    return {
        "kind": "binarization",
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "calibration": calibration,
        "settings": {
            **described,
            **job.settings.to_dict(),
            "forward_batch": job.forward.rows,
            "fold": job.forward.module is not job.features,
        },
        "versions": versions(),
        "seed": job.settings.seed,
    }


def _until_decided(name: str, job: Job, records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not job.settings.sequential:
        return records
    groups = complete_groups(job, records)
    number = decided_after(name, groups, job.settings)
    return records if number is None else [record for group in groups[:number] for record in group]
