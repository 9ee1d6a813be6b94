"""The protocol: groups of samples are measured, fitted and attacked, until all are done or every verdict is decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.target import Counted, PassCounter
from robust_ext.evaluations.binarization.attacking import Attacked, attack_problems
from robust_ext.evaluations.binarization.defense import Defense, Drawn, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import Problems, fit, measure
from robust_ext.evaluations.binarization.random_attack import random_reach
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.summary import decided_after
from robust_ext.reports import Example

EXAMPLES = 3


class Store(Protocol):
    """Where records go: a list in memory, or a run folder."""

    def records(self) -> list[dict[str, Any]]:
        """All records so far, sorted by index."""

    def timings(self) -> list[dict[str, Any]]:
        """All timings so far."""

    def append(self, records: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> None:
        """Keep the records of a finished group, and what it took."""


@dataclass
class Memory:
    """A store that forgets."""

    kept: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)

    def records(self) -> list[dict[str, Any]]:
        """See :class:`Store`."""
        return list(self.kept)

    def timings(self) -> list[dict[str, Any]]:
        """See :class:`Store`."""
        return list(self.times)

    def append(self, records: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> None:
        """See :class:`Store`."""
        self.kept.extend(dict(record) for record in records)
        self.times.append(dict(timing))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is tested.

    Args:
        features: The network's features, counted.
        readout: What makes its logits of them.
        attacks: By name.
        inputs: Clean samples ``(N, ...)``, on the CPU or on the device.
        samples: Their ids.
        settings: Of the test.
        forward: How points are measured.
        device: Of the network.
        shard: Number of this process, and of how many; group g is done by process g modulo their number.
        defense: The detector beside the network, where there is one.
        progress: Called with the number of samples that are done.
        show: Called with candidates worth showing.
    """

    features: Counted
    readout: nn.Module
    attacks: Mapping[str, Attack]
    inputs: Tensor
    samples: Sequence[int]
    settings: BinarizationSettings
    forward: Forward
    device: torch.device
    shard: tuple[int, int] = (0, 1)
    defense: Defense | None = None
    progress: Callable[[int], None] = lambda _: None
    show: Callable[[list[Example]], None] = lambda _: None

    @property
    def groups(self) -> list[range]:
        """Indices of the samples of each group."""
        size, total = self.settings.group_size, len(self.samples)
        return [range(start, min(start + size, total)) for start in range(0, total, size)]


def run_groups(job: Job, store: Store) -> None:
    """Run what the store does not hold yet; a group that is there in part is run again and completed."""
    number, count = job.shard
    for group in range(number, len(job.groups), count):
        indices = job.groups[group]
        records = store.records()
        open_attacks = undecided(job, records)
        if not open_attacks:
            break
        present = {record["index"] for record in records}
        if present.issuperset(indices):
            job.progress(len(indices))
            continue
        done, timing = _run_group(job, group, open_attacks)
        store.append([record for record in done if record["index"] not in present], timing)
        job.progress(len(indices))


def undecided(job: Job, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Attacks that still need samples, judged by the groups that are complete from the first on."""
    if not job.settings.sequential:
        return list(job.attacks)
    complete = complete_groups(job, records)
    return [name for name in job.attacks if decided_after(name, complete, job.settings) is None]


def complete_groups(job: Job, records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records by group, up to the first group that is not complete."""
    by_index = {record["index"]: record for record in records}
    complete: list[list[Mapping[str, Any]]] = []
    for indices in job.groups:
        if not all(index in by_index for index in indices):
            break
        complete.append([by_index[index] for index in indices])
    return complete


def _run_group(job: Job, group: int, attacks: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    indices, settings = job.groups[group], job.settings
    position = settings.boundary_position
    samples = [job.samples[index] for index in indices]
    before, clock = job.features.counter.snapshot(), _Clock()
    inputs = job.inputs[indices.start : indices.stop].to(job.device)
    drawn = (
        None
        if job.defense is None
        else [draw_accepted(x, sample, settings, job.defense) for x, sample in zip(inputs, samples, strict=True)]
    )
    usable = [row for row in range(len(samples)) if drawn is None or drawn[row].planted is not None]
    if not usable:
        # Nothing can be planted in any sample of the group, and there is nothing to attack.
        return _nothing(job, indices, drawn or [], clock, before)
    measured = measure(
        job.forward,
        inputs[usable],
        [samples[row] for row in usable],
        settings,
        planted=None if drawn is None else _stacked([drawn[row].planted for row in usable]),
        references=None if drawn is None else _stacked([drawn[row].references for row in usable]),
    )
    clock.stop("features")
    problems = fit(measured, job.readout, settings)
    del measured
    clock.stop("readout")
    reach, draws = random_reach(job.forward, [problems], [position], settings, defense=job.defense)
    clock.stop("random")
    shared = job.features.counter.since(before)
    separable = [row for row in range(len(usable)) if bool(problems.separable[row])]
    posed = problems.select(separable)
    canaries = frozenset(job.samples[: settings.canaries])
    results = {
        name: attack_problems(
            job.attacks[name],
            posed,
            job.features,
            settings,
            position=position,
            canaries=canaries,
            defense=job.defense,
        )
        for name in attacks
    }
    if group == 0:
        job.show(_examples(posed, results, settings.threat_model.bounds))
    records = []
    for row, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        place = usable.index(row) if row in usable else None
        good = place is not None and bool(problems.separable[place])
        record = {
            "index": index,
            "sample": sample,
            "separable": good,
            "random_reach": float(reach[place, 0]) if good else None,
            "random_draws": 0 if place is None else int(draws[place]),
            "attacks": {name: result.records[sample] for name, result in results.items() if sample in result.records},
        }
        if drawn is not None:
            record["planting"] = _planting(drawn[row])
        records.append(record)
    timing = {
        "group": group,
        "seconds": clock.seconds,
        "passes": {"forward": shared.forward, "backward": shared.backward},
        "attacks": {name: {"seconds": r.seconds, "passes": r.passes} for name, r in results.items()},
    }
    return records, timing


def _nothing(
    job: Job, indices: range, drawn: Sequence[Drawn], clock: _Clock, before: PassCounter
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Records and timing of a group in which nothing could be planted."""
    records = [
        {
            "index": index,
            "sample": job.samples[index],
            "separable": False,
            "random_reach": None,
            "random_draws": 0,
            "attacks": {},
            "planting": _planting(one),
        }
        for index, one in zip(indices, drawn, strict=True)
    ]
    for phase in ("features", "readout", "random"):
        clock.stop(phase)
    spent = job.features.counter.since(before)
    passes = {"forward": spent.forward, "backward": spent.backward}
    group = indices.start // job.settings.group_size
    return records, {"group": group, "seconds": clock.seconds, "passes": passes, "attacks": {}}


def _planting(drawn: Drawn) -> dict[str, Any]:
    return {"found": drawn.planted is not None, "source": drawn.source, "tries": drawn.tries}


def _stacked(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([part for part in parts if part is not None])


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._start
        self._start = now


def _examples(problems: Problems, results: Mapping[str, Attacked], bounds: tuple[float, float]) -> list[Example]:
    return [
        Example(
            attack=name,
            sample=sample,
            outcome=result.records[sample]["outcome"],
            clean=problems.inputs[row].cpu().numpy(),
            candidate=result.candidates[sample].cpu().numpy(),
            bounds=bounds,
        )
        for name, result in results.items()
        for row, sample in enumerate(problems.samples[:EXAMPLES])
    ]
