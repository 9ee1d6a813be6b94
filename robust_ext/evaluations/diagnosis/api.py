"""A diagnosis as one function."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.devices import run_device
from robust_ext.core.errors import InvalidArgumentError, ModelError, OutOfTimeError, warn
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_labels
from robust_ext.engine.classifiers import as_classifier
from robust_ext.engine.context import current_context, limited
from robust_ext.engine.estimate import Estimate, EstimatedError
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import check_ids, describe
from robust_ext.engine.inputs import as_attacks, bounded_module, check_samples, prepare_inputs
from robust_ext.engine.progress import Progress, paced, showing
from robust_ext.engine.run import Outcome
from robust_ext.engine.task import Worker
from robust_ext.evaluations.arms import ArmRun
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.causes.setup import ACCURACY, find_setup
from robust_ext.evaluations.caveats import Part, time_table
from robust_ext.evaluations.diagnosis.content import make_content
from robust_ext.evaluations.diagnosis.examination import Examination
from robust_ext.evaluations.diagnosis.examining import Examiner
from robust_ext.evaluations.diagnosis.settings import DiagnosisResult, DiagnosisSettings
from robust_ext.evaluations.diagnosis.trying import Trials, rank, reordered
from robust_ext.evaluations.options import DiagnosisOptions
from robust_ext.evaluations.run_keywords import RunKeywords

_FIRST = "first passes of the model"


def diagnose(  # noqa: D417
    model: object,
    attacks: object,
    inputs: Array,
    labels: Array,
    threat_model: ThreatModel,
    *,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    try_remedies: bool = False,
    settings: DiagnosisSettings | None = None,
    **options: Unpack[DiagnosisOptions],
) -> DiagnosisResult:
    """Find out whether an attack works on a model, and if not, why, and what to do about it.

    The model is probed, the attack is run on the samples next to others to compare it with, and on a few planted
    problems. What its queries showed becomes findings, each with its evidence and remedies; ``likely`` is the most
    likely cause, or None. A model that cannot be evaluated, or an attack that raises, is a finding too.

    Args:
        model: A torch module from inputs in bounds to logits; a Foolbox model; an ART ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds; 32 are enough.
        labels: Their classes, integers ``(N,)``, or one-hot ``(N, K)``.
        threat_model: The norm, epsilon and bounds.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: How it is run, see
            :class:`robust_ext.evaluations.run_keywords.RunKeywords`.
        try_remedies: Run remedies on the same samples and seeds, at most four for an attack, until with one it finds
            the planted points, and see what they change.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`DiagnosisSettings`.

    Raises:
        RobustExtError: An argument or the run folder is not as described, or the attack does not fit the threat model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
        >>> x, threat_model = torch.rand(12, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.1)
        >>> y = network(x).argmax(1)
        >>> diagnose(network, "robust_ext:APGD(steps=20)", x, y, threat_model, inner_points=50).likely is None
        True
    """
    begun = time.perf_counter()
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        checked = make_settings(DiagnosisSettings, options, base=settings)
        module = bounded_module(model, threat_model, device=device)
        samples = _check_samples(inputs, labels, threat_model, device=run_device(module, device))
        with limited(checked.minutes), showing("diagnosis", shown=progress) as bar:
            diagnosis = _prepare(run, module, attacks, *samples, threat_model, checked, bar)
            return finish(diagnosis.run(begun=begun, trying=try_remedies))


def _prepare(
    run: RunKeywords,
    module: nn.Module,
    attacks: object,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    settings: DiagnosisSettings,
    bar: Progress | None,
) -> _Diagnosis:
    """Check attacks against the model, and claim the run folder."""
    with paced(module, _FIRST):
        module = as_classifier(module, inputs, labels)
    named = as_attacks(attacks)
    for attack in named.values():
        attack.check(threat_model=threat_model)
    folder, asked = as_folder(run.out), {**settings.to_dict(), "minutes": None}
    holds = {f"{name}: {describe(attack)}": name for name, attack in named.items()}
    begin_evaluation(folder, "diagnosis", holds=holds, settings=asked)
    return _Diagnosis(
        module=module,
        attacks=named,
        inputs=inputs,
        labels=labels,
        threat_model=threat_model,
        ids=check_ids(run.sample_ids, len(inputs)),
        settings=run.judged(settings),
        out=folder,
        worker=run.worker,
        watch=partial(_step, bar),
    )


def _check_samples(
    inputs: Array, labels: Array, threat_model: ThreatModel, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and labels on the device, at least one; what the model makes of them is for the probes."""
    inputs = check_samples(inputs, threat_model).to(device)
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    threat_model.check_resolution(inputs[0].numel())
    return inputs, check_labels("labels", labels, samples=len(inputs)).to(device)


def _step(bar: Progress | None, words: str) -> None:
    if bar is not None:
        bar.advance()
        bar.phase(words)


@dataclass(frozen=True, kw_only=True)
class _Diagnosis:
    """The checked arguments of a diagnosis; ``watch`` is called with words for each step."""

    module: nn.Module
    attacks: Mapping[str, Attack]
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    ids: Sequence[int]
    settings: DiagnosisSettings
    out: Path | None
    worker: Worker
    watch: Callable[[str], object]
    outcomes: list[Outcome[ArmRun]] = field(default_factory=list)  # All runs with their costs
    planted: list[Part] = field(default_factory=list)  # Likewise, of binarization tests

    def run(self, *, begun: float, trying: bool) -> DiagnosisResult:
        """Probe, examine, find, and try."""
        deadline = current_context().deadline
        with paced(self.module, _FIRST):
            examiner = self._examiner(self.module)
        refusal = examiner if isinstance(examiner, str) else None
        # A third of the minutes that are left is for the probes.
        with limited(None if deadline is None else max(0.0, deadline - time.monotonic()) / 180):
            probe = probe_model(
                self.module, self.inputs, self.labels, threat_model=self.threat_model, seed=self.settings.seed
            )
        if isinstance(examiner, str):
            if current_context().dry_run or not any(one.weight != "low" for one in probe.findings):
                raise ModelError(examiner)
            examination, setup = Examination(examiner=None), list[Finding]()
        else:
            if current_context().dry_run:
                # What the attacks and their references cost; probes and remedies are unknown in advance.
                unknown: Costs = {("rest", None): Cost(unknown=("probes of the model", "larger budgets and remedies"))}
                parts = examiner.estimates(list(self.attacks.values()))
                raise EstimatedError(sum(parts, Estimate(title="diagnosis", costs=unknown, size=0)))
            examination, setup = Examination(examiner=examiner), self._setup(examiner)
            if any(one.code in ACCURACY for one in setup):
                # An attack would be judged by what no attack can change.
                refusal = setup[0].cause
            else:
                examination.run(self.attacks, self.watch)
                refusal = None if examination.attacks else "the time that was given was over"
        caller = Caller(module=self.module, attacks=self.attacks, images=self.inputs.dim() == 4)
        # What a wrong setup does to an attack is no fault of the attack.
        findings = caller.addressed(ranked(setup or examination.findings(probe, self.threat_model)))
        probe = replace(probe, findings=tuple(caller.addressed(probe.findings)))
        tried, left_out = None, examination.left_out
        if trying:
            tried = self._try(examination, findings)
        if left_out:
            warn(f"The time was over before this was run: {'; '.join(left_out)}. Give more minutes for it.")
        content = make_content(
            module=self.module,
            probe=probe,
            examination=examination,
            findings=reordered(findings, tried or (), self.attacks),
            tried=tried,
            refusal=refusal,
            inputs=self.inputs,
            threat_model=self.threat_model,
            settings=self.settings,
            time=time_table(self.outcomes, begun=begun, others=self.planted),
        )
        return DiagnosisResult(content)

    def _examiner(self, module: nn.Module, folder: str = "") -> Examiner | str:
        """Return the runner of attacks on the model, or the reason why none can run."""
        try:
            given = prepare_inputs(
                module,
                self.inputs,
                self.labels,
                threat_model=self.threat_model,
                sample_ids=self.ids,
                batch_size=self.settings.batch_size,
            )
        except ModelError as error:
            return str(error)
        out = None if self.out is None else self.out / folder
        return Examiner(
            given=given,
            settings=self.settings,
            out=out,
            worker=self.worker,
            outcomes=self.outcomes,
            planted=self.planted,
        )

    def _setup(self, examiner: Examiner) -> list[Finding]:
        """Find faults of the samples; none where the time is over first."""
        try:
            with paced(examiner.given.module, "checks of the samples"):
                return find_setup(examiner.given, seed=self.settings.seed)
        except OutOfTimeError:
            return []

    def _try(self, examination: Examination, findings: Sequence[Finding]) -> list[dict[str, Any]]:
        """Run the remedies of findings until the time is over; those that did not help come last."""

        def in_eval_mode() -> Examiner | None:
            found = self._examiner(copy.deepcopy(self.module).eval(), "in-eval-mode")
            return None if isinstance(found, str) else found

        tried = []
        try:
            for entry in Trials(attacks=self.attacks, examination=examination, in_eval_mode=in_eval_mode).run(findings):
                self.watch(f"remedy: {entry['remedy']['words']}")
                tried.append(entry)
        except OutOfTimeError:
            examination.left_out.append("remedies")
        return sorted(tried, key=lambda entry: rank(entry["outcome"]))
