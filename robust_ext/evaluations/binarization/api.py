"""The binarization test as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from robust_ext.evaluations.binarization import calibration as hardness
from robust_ext.evaluations.binarization.examples import load_examples, save_examples
from robust_ext.evaluations.binarization.forward import choose_forward
from robust_ext.evaluations.binarization.preparation import (
    as_attacks,
    check_ids,
    counted_parts,
    describe,
    inputs_digest,
    model_digest,
    versions,
)
from robust_ext.evaluations.binarization.protocol import (
    Job,
    Memory,
    Store,
    complete_groups,
    run_groups,
)
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.settings import make_settings
from robust_ext.evaluations.binarization.summary import decided_after, summarise_attack
from robust_ext.evaluations.binarization.verdict import overall, overall_reason
from robust_ext.evaluations.run import RunFolder
from robust_ext.reports import Example
from robust_ext.target import PassCounter
from robust_ext.threat import ThreatModel
from robust_ext.validation import check_inputs, check_integer

T = TypeVar("T")


def binarization_test(
    model: object,
    attack: object,
    inputs: Tensor,
    threat_model: ThreatModel,
    *,
    layer: str | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    calibrate_on: int = 0,
    progress: bool = False,
    target: str = "",
    origin: Mapping[str, str] | None = None,
    shard: tuple[int, int] = (0, 1),
    **settings: Any,
) -> BinarizationResult:
    """Test whether an attack finds adversarial examples that are known to exist (Zimmermann et al. 2022, section 3.1).

    For each input, a copy of the model with a two-class readout is made in which a random point of the ball is
    adversarial. The attack is run on it, and its candidates are verified. An attack that misses what was planted
    cannot support a claim of robustness of this model.

    Args:
        model: A torch module from inputs in the threat model's bounds to logits, in eval mode; a pair of modules
            ``(features, readout)``; a Foolbox model; an ART ``PyTorchClassifier``.
        attack: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, float ``(N, ...)`` in bounds. Labels are not needed: the problems bring their own.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        layer: Name of the linear layer that makes the logits; found when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, records survive a kill and the same call goes on; ``result.json`` and
            ``report.html`` are written there.
        calibrate_on: Number of samples on which the hardness is calibrated first (section 4.3); 0 for no calibration.
        progress: Show a progress bar on stderr.
        target: Words for what is attacked, for tables that hold several targets.
        origin: Where things came from, in words by name (``{"model": "net.py:make"}``), kept with the settings.
        shard: Number of this process, and of how many that share the run folder; a call without it completes them.
        **settings: Of the test, see :class:`BinarizationSettings`.

    Returns:
        The result; ``print`` shows its table.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits, or cannot be split.
        AttackRefusedError: An attack makes no sense on this target.
        AttackError: An attack raised, or returned no batch of candidates.
        RunFolderError: The folder holds another run.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        >>> def nothing(model, x, y):
        ...     return x
        >>> threat_model = ThreatModel(norm="linf", epsilon=0.1)
        >>> binarization_test(model.eval(), nothing, torch.rand(12, 1, 4, 4), threat_model, inner_points=50).verdict
        'failed'
    """
    checked = make_settings(threat_model, settings)
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    samples = check_ids(sample_ids, len(inputs))
    check_integer("calibrate_on", calibrate_on, minimum=0)
    attacks = as_attacks(attack)
    for one in attacks.values():
        one.check(threat_model=threat_model)
    counter = PassCounter()
    features, readout, device = counted_parts(model, inputs, threat_model, layer, counter)
    described = {
        **checked.to_dict(),
        "calibrate_on": calibrate_on,
        "attacks": {name: describe(one) for name, one in attacks.items()},
        "target": target,
        "samples": len(samples),
        **{f"{name}_origin": words for name, words in (origin or {}).items()},
        "model": model_digest(features, readout),
        "inputs": inputs_digest(inputs, samples),
    }
    store: Store = Memory()
    with ExitStack() as stack:
        folder: RunFolder | None = None
        if out is not None:
            folder = RunFolder(out, kind="binarization", settings=described, versions=versions(), shard=shard[0])
            store = stack.enter_context(folder)
        once = _at_once if folder is None else folder.once
        forward = choose_forward(features, inputs[:2].to(device), rows=checked.forward_batch, fold=checked.fold)
        calibration: dict[str, Any] | None = None
        if calibrate_on:
            some, ids = inputs[:calibrate_on].to(device), samples[:calibrate_on]
            calibration = once(
                "calibration",
                lambda: hardness.calibrate(features, readout, attacks, some, ids, checked, forward=forward),
            )
        examples: list[Example] = []
        bar = stack.enter_context(tqdm(total=len(samples), unit="sample", disable=not progress, desc="binarization"))

        counter.watch = _PassesShown(bar)

        def advance(done: int) -> None:
            bar.update(done)

        job = Job(
            features=features,
            readout=readout,
            attacks=attacks,
            inputs=inputs,
            samples=samples,
            settings=hardness.apply(checked, calibration),
            forward=forward,
            device=device,
            shard=shard,
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
