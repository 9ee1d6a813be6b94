"""Running the arms: every attack once, its candidates verified and kept, and scored by every detector."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError, RunFolderBusyError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import PassCounter, Target, count_calls
from robust_ext.engine.arm import ArmRun
from robust_ext.engine.identity import versions
from robust_ext.engine.references import draw_references
from robust_ext.engine.store import Floats, FolderRun, MemoryRun, RunStore
from robust_ext.engine.subject import Finished, NaturalScores, RunOutcome, Subject, Watched
from robust_ext.engine.verify import verify
from robust_ext.models.defended import Defended

logger = logging.getLogger(__name__)

# How long to wait for another process to finish an arm before looking again.
_PATIENCE = 0.5


def run_everything(
    runs: Sequence[ArmRun],
    subject: Subject,
    *,
    folder: Path | None,
    wait: bool,
    advance: Callable[[str, int], None],
) -> Finished:
    """Run and score everything that is not there yet.

    Args:
        runs: Of attacks.
        subject: What is attacked and judged.
        folder: Run folder; None keeps everything in memory.
        wait: Whether to wait for runs that another process has; otherwise they are left to it.
        advance: Told of every finished block: a title, and how many samples.
    """
    described, found = subject.described, versions()
    outcomes: dict[str, RunOutcome] = {}
    stores: dict[str, RunStore] = {}

    def open_store(key: str, settings: Mapping[str, Any]) -> RunStore:
        if folder is None:
            return MemoryRun()
        return FolderRun(folder / "arms" / key, settings={**described, **settings}, versions=found)

    left = sorted(runs, key=_cheap)
    while left:
        busy = []
        for run in left:
            settings = dict(run.described)
            if run.knows is not None:
                settings["detector"] = subject.find(run.knows).digest
            try:
                store = open_store(run.key, settings)
            except RunFolderBusyError:
                busy.append(run)
                continue
            try:
                outcomes[run.key] = _run_and_score(run, subject, store, advance)
            finally:
                store.close()
            stores[run.key] = store
        if not wait:
            break
        if len(busy) == len(left):
            time.sleep(_PATIENCE)
        left = busy
    natural = NaturalScores(scores={}, score_seconds={})
    if wait:
        store = open_store("clean", {})
        try:
            natural = NaturalScores(**_scores(None, subject, store))
        finally:
            store.close()
    # In the order of the suite.
    ordered = {run.key: outcomes[run.key] for run in runs if run.key in outcomes}
    return Finished(natural=natural, outcomes=ordered, stores=stores)


def _cheap(run: ArmRun) -> bool:
    """Whether a run is likely to be short; long ones are begun first, so that no process is left with one at last."""
    return not (run.attack.traits.minimum_norm or run.knows is not None)


def _run_and_score(run: ArmRun, subject: Subject, store: RunStore, advance: Callable[[str, int], None]) -> RunOutcome:
    done = {record["index"] for record in store.records()}
    try:
        target = _target(run, subject)
        for rows in subject.blocks():
            if rows[0] not in done:
                _run_block(run, rows, subject, target, store)
            advance(run.title, len(rows))
    except AttackRefusedError as error:
        if run.knows is None:
            raise
        logger.warning("%s", error)
        advance(run.title, len(subject.inputs))
        return RunOutcome(run=run, records=[], timings=[], scores={}, score_seconds={}, refusal=str(error))
    return RunOutcome(run=run, records=store.records(), timings=store.timings(), **_scores(run, subject, store))


def _scores(run: ArmRun | None, subject: Subject, store: RunStore) -> dict[str, Any]:
    """The scores of every detector, and the seconds they took: those that are kept, and new ones."""
    scores, seconds = {}, {}
    for one in subject.watched:
        kept = store.scores(one.name, one.digest)
        if kept is None:
            kept = _score(run, one, subject, store)
            store.keep_scores(one.name, one.digest, *kept)
        scores[one.name], seconds[one.name] = kept
    return {"scores": scores, "score_seconds": seconds}


def _target(run: ArmRun, subject: Subject) -> Target:
    """What an attack may query; one that knows a detector sees it beside the classifier."""
    defended = None
    if run.knows is not None:
        known = subject.find(run.knows)
        if not known.calibrated:
            raise AttackRefusedError(
                f"{run.title}: detector {known.name} has no threshold, which attacks that know it need; give clean "
                "inputs to calibrate it on"
            )
        defended = Defended(subject.module, known.detector)
    run.attack.check(threat_model=run.threat_model, detector=defended is not None)
    return Target(
        module=subject.module,
        bounds=subject.bounds,
        classes=subject.logits.shape[1],
        input_shape=tuple(subject.inputs.shape[1:]),
        device=subject.inputs.device,
        counter=PassCounter(),
        defended=defended,
    )


def _run_block(run: ArmRun, rows: range, subject: Subject, target: Target, store: RunStore) -> None:
    """Attack some rows, verify what comes back, and keep it."""
    inputs, labels = subject.inputs[rows[0] : rows[-1] + 1], subject.labels[rows[0] : rows[-1] + 1]
    first = subject.samples[rows[0]]
    if run.knows is not None and run.attack.traits.references:
        references = draw_references(
            subject.inputs, subject.logits, rows, detector=subject.find(run.knows).detector, seed=subject.seed
        )
        target = replace(target, references=references)
    counter = target.counter
    before = counter.snapshot()
    begun = time.perf_counter()
    with count_calls(subject.module, counter):
        candidates = run_attack(
            run.attack,
            target,
            inputs,
            labels,
            threat_model=run.threat_model,
            generator=stream(subject.seed, first, "arm", *run.stream_keys),
        )
    middle = time.perf_counter()
    passes = counter.since(before)
    checked = verify(
        candidates, inputs, labels, module=subject.module, threat_model=run.threat_model, attack=run.attack.name
    )
    store.append(
        [
            {
                "index": row,
                "sample": subject.samples[row],
                "outcome": checked.outcomes[place],
                "distance": _plain(checked.distances[place]),
                "predicted": int(checked.logits[place].argmax()),
            }
            for place, row in enumerate(rows)
        ],
        {
            "block": rows[0],
            "seconds": {"attack": middle - begun, "verify": time.perf_counter() - middle},
            "passes": {"forward": passes.forward, "backward": passes.backward},
        },
        checked.candidates,
    )


def _score(run: ArmRun | None, watched: Watched, subject: Subject, store: RunStore) -> tuple[Floats, float]:
    """A detector's scores of a run's candidates, or of the clean inputs, and the seconds they took."""
    begun, parts = time.perf_counter(), []
    for rows in subject.blocks():
        if run is None:
            points = subject.inputs[rows[0] : rows[-1] + 1]
        else:
            points = store.candidates(rows[0]).to(subject.inputs.device)
        # Random detectors draw from the global generators, in each block anew.
        seed = derive_seed(subject.seed, subject.samples[rows[0]], "arm scores", watched.name)
        with seeded_globals(seed), torch.no_grad():
            parts.append(watched.detector.score(points).double().cpu())
    scores: Floats = torch.cat(parts).numpy() if parts else np.empty(0)
    return scores, time.perf_counter() - begun


def _plain(value: Tensor) -> float | None:
    number = float(value)
    return number if number - number == 0 else None
