"""A diagnosis as one function."""

from __future__ import annotations

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
from robust_ext.core.validation import Array, check_inputs, check_labels
from robust_ext.engine.classifiers import as_classifier
from robust_ext.engine.context import current_context, limited
from robust_ext.engine.estimate import Estimate, EstimatedError
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation, with_judge_seed
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import check_ids, describe
from robust_ext.engine.inputs import as_attacks, bounded_module, prepare_inputs
from robust_ext.engine.progress import Progress, paced, showing
from robust_ext.engine.running import attack_worker
from robust_ext.engine.task import Worker
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.causes.setup import ACCURACY, find_setup
from robust_ext.evaluations.diagnosis.content import make_content
from robust_ext.evaluations.diagnosis.examination import Examination, find
from robust_ext.evaluations.diagnosis.examining import Examiner, Work
from robust_ext.evaluations.diagnosis.options import DiagnosisOptions
from robust_ext.evaluations.diagnosis.settings import DiagnosisResult, DiagnosisSettings
from robust_ext.evaluations.diagnosis.trying import Trials, evaluated, rank, reordered

_FIRST = "first passes of the model"


def diagnose(
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
    problems (:func:`robust_ext.binarization_test`). What its queries showed becomes findings, each with its evidence
    and remedies. A model that cannot be evaluated as it is, or an attack that raises, is a finding too.

    Args:
        model: A torch module from inputs in bounds to logits; a Foolbox model; an ART ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds; 32 are enough.
        labels: Their classes, integers ``(N,)``, or one-hot ``(N, K)``.
        threat_model: The norm, epsilon and bounds.
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder, in which the same call resumes a killed run; gets result and report.
        isolate: Run each attack in a process of its own, which has what an attacker has, see docs/threats.md.
        attack_timeout: Seconds an attack may then take for a batch; None for any time.
        executor: What runs the blocks, see docs/clusters.md; this process when left out.
        devices: The devices that its workers use; the model's own when left out.
        progress: Show a progress bar on stderr.
        callbacks: Told of the result, and of records as they come, see :class:`robust_ext.Callback`.
        try_remedies: Run remedies on the same samples and seeds, at most four for an attack, until with one it finds
            the planted points, and see what they change.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`DiagnosisSettings`.

    Returns:
        The result; ``print`` shows it, ``likely`` is the most likely cause, or None.

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
    with listening(callbacks) as tell:
        begun, checked = time.perf_counter(), make_settings(DiagnosisSettings, options, base=settings)
        module = bounded_module(model, threat_model, device=device)
        inputs, labels = _check_samples(inputs, labels, threat_model, device=run_device(module, device))
        workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
        with limited(checked.minutes), showing("diagnosis", shown=progress) as bar, workers as worker:
            with paced(module, _FIRST):
                module = as_classifier(module, inputs, labels)
            named = as_attacks(attacks)
            for attack in named.values():
                attack.check(threat_model=threat_model)
            folder, asked = as_folder(out), {**checked.to_dict(), "minutes": None}
            holds = {f"{name}: {describe(attack)}": name for name, attack in named.items()}
            begin_evaluation(folder, "diagnosis", holds=holds, settings=asked)
            diagnosis = _Diagnosis(
                attacks=named,
                inputs=inputs,
                labels=labels,
                threat_model=threat_model,
                ids=check_ids(sample_ids, len(inputs)),
                settings=with_judge_seed(checked, out=out, worker=worker),
                out=folder,
                worker=worker,
            )
            return tell(diagnosis.run(module, begun=begun, bar=bar, trying=try_remedies).saved(out))


def _check_samples(
    inputs: Array, labels: Array, threat_model: ThreatModel, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and labels on the device, at least one; what the model makes of them is for the probes."""
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds).to(device)
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    threat_model.check_resolution(inputs[0].numel())
    return inputs, check_labels("labels", labels, samples=len(inputs)).to(device)


@dataclass(frozen=True, kw_only=True)
class _Diagnosis:
    """The checked arguments of a diagnosis."""

    attacks: Mapping[str, Attack]
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    ids: Sequence[int]
    settings: DiagnosisSettings
    out: Path | None
    worker: Worker
    work: Work = field(default_factory=Work)

    def run(self, module: nn.Module, *, begun: float, bar: Progress | None, trying: bool) -> DiagnosisResult:
        """Probe, examine, find, and try."""
        watch = partial(_step, bar)
        with paced(module, _FIRST):
            examiner, refusal = self._examiner(module)
        with limited(_third()):
            probe = probe_model(
                module, self.inputs, self.labels, threat_model=self.threat_model, seed=self.settings.seed
            )
        if current_context().dry_run:
            raise EstimatedError(self._estimated(examiner, refusal))
        if examiner is None and not any(one.weight != "low" for one in probe.findings):
            raise ModelError(str(refusal))
        setup = [] if examiner is None else self._setup(examiner)
        if any(one.code in ACCURACY for one in setup):
            # An attack would be judged by what no attack can change.
            examination, refusal = Examination(examiner=examiner), setup[0].cause
        else:
            examination = Examination.of(examiner, self.attacks, watch=watch)
            if examiner is not None and not examination.attacks:
                refusal = "the time that was given was over"
        caller = Caller(module=module, attacks=self.attacks, images=self.inputs.dim() == 4)
        # What a wrong setup does to an attack is no fault of the attack.
        found = setup or find(examination, probe, threat_model=self.threat_model)
        findings = caller.addressed(ranked(found))
        probe = replace(probe, findings=tuple(caller.addressed(probe.findings)))
        tried, left_out = None, list(examination.left_out)
        if trying:
            tried, cut = self._try(module, examination, findings, watch)
            left_out += ["remedies"] if cut else []
        if left_out:
            warn(f"The time was over before this was run: {'; '.join(left_out)}. Give more minutes for it.")
        findings = reordered(findings, tried or (), self.attacks)
        content = make_content(
            module=module,
            probe=probe,
            examination=examination,
            findings=findings,
            tried=tried,
            left_out=left_out,
            refusal=refusal,
            inputs=self.inputs,
            threat_model=self.threat_model,
            settings=self.settings,
            work=self.work,
            begun=begun,
        )
        return DiagnosisResult(content)

    def _setup(self, examiner: Examiner) -> list[Finding]:
        """Find faults of the samples; none where the time is over first."""
        try:
            with paced(examiner.given.module, "checks of the samples"):
                return find_setup(examiner.given, seed=self.settings.seed)
        except OutOfTimeError:
            return []

    def _estimated(self, examiner: Examiner | None, refusal: str | None) -> Estimate:
        """Estimate the cost of the attacks and their references; probes and remedies are unknown in advance."""
        if examiner is None:
            raise ModelError(str(refusal))
        parts = [part for attack in self.attacks.values() for part in examiner.estimates(attack)]
        parts += examiner.estimated_references(self.attacks.values()) if self.settings.references else []
        unknown: Costs = {("rest", None): Cost(unknown=("probes of the model", "larger budgets and remedies"))}
        return sum(parts, Estimate(title="diagnosis", costs=unknown, size=0))

    def _examiner(self, module: nn.Module, folder: str = "") -> tuple[Examiner | None, str | None]:
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
            return None, str(error)
        out = None if self.out is None else self.out / folder
        return Examiner(given=given, settings=self.settings, out=out, worker=self.worker, work=self.work), None

    def _try(
        self, module: nn.Module, examination: Examination, findings: Sequence[Finding], watch: Callable[[str], object]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Run the remedies of findings; those that did not help come last. Returns whether the time cut them off."""

        def in_eval_mode() -> Examiner | None:
            return self._examiner(evaluated(module), "in-eval-mode")[0]

        trials = Trials(
            attacks=self.attacks,
            before=examination.attacks,
            references=examination.references,
            examiner=examination.examiner,
            in_eval_mode=in_eval_mode,
        )
        tried, cut = [], False
        try:
            for entry in trials.run(findings):
                watch(f"remedy: {entry['remedy']['words']}")
                tried.append(entry)
        except OutOfTimeError:
            cut = True
        return sorted(tried, key=lambda entry: rank(entry["outcome"])), cut


def _third() -> float | None:
    """A third of the minutes that are left; None where the time has no end."""
    deadline = current_context().deadline
    return None if deadline is None else max(0.0, deadline - time.monotonic()) / 180


def _step(bar: Progress | None, words: str) -> None:
    if bar is not None:
        bar.advance()
        bar.phase(words)
