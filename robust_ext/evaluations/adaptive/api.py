"""The evaluation of a test-time defense as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from robust_ext.core.criteria import Criterion, MultiLabel
from robust_ext.core.devices import on_device
from robust_ext.core.errors import InvalidArgumentError, ModelError, OutOfTimeError
from robust_ext.core.finding_texts import sentence
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.classifiers import as_classifier
from robust_ext.engine.context import limited
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import PROBES, Batches, EvaluationInputs, Samples, check_model, check_samples
from robust_ext.engine.progress import paced, showing
from robust_ext.engine.run import check_some_ran
from robust_ext.engine.task import drive
from robust_ext.evaluations.adaptive.cascade import Cascade
from robust_ext.evaluations.adaptive.content import make_content
from robust_ext.evaluations.adaptive.plan import as_steps
from robust_ext.evaluations.adaptive.probes import affordable, measure_cost, probe_outputs, with_costs
from robust_ext.evaluations.adaptive.protocol import plan_runs
from robust_ext.evaluations.adaptive.settings import AdaptiveResult, AdaptiveSettings
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.options import AdaptiveOptions
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.company import one_image
from robust_ext.registry.defense import as_defense
from robust_ext.registry.model import as_module


def evaluate_defense(  # noqa: D417
    defense: object,
    attacks: object,
    inputs: Array,
    labels: Array,
    threat_model: ThreatModel,
    *,
    criterion: Criterion | None = None,
    classifier: object = None,
    defense_weights: str | os.PathLike[str] | None = None,
    surrogates: Mapping[str, object] | None = None,
    negatives: Array | None = None,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: AdaptiveSettings | None = None,
    **options: Unpack[AdaptiveOptions],
) -> AdaptiveResult:
    """Evaluate a defense that acts at test time against the static model it defends (Croce et al. 2022, section 4).

    Candidates are judged by the static model and by fresh draws of the defense; the worst case of all attacks counts.

    Args:
        defense: Anything :func:`robust_ext.as_defense` takes, as ``"hd(steps=5)"``.
        attacks: None or ``"recommended"``: all of :func:`plan_steps`. Else a :class:`Step`, anything
            :func:`robust_ext.as_attack` takes, or a list of these, ``"recommended"`` among them.
        inputs: Clean samples, floats ``(N, ...)`` in bounds; for batch-level defenses a whole number of groups.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        classifier: The static model: a torch module, a Foolbox model or an ART ``PyTorchClassifier``; or the defense's.
        defense_weights: File of the trained parts of a named defense.
        negatives: Clean images ``(M, ...)`` for a batch-level defense, at least ``group_size - 1``: each row is
            defended alone next to the first of them, as for an attacker of one image (section 2.4).
        surrogates: Further networks by name, anything that ``classifier`` may be, to transfer points from.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`AdaptiveSettings`.
        labels, criterion: As of :func:`robust_ext.robust_accuracy`.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: Likewise.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5)).eval()
        >>> x, threat_model = torch.rand(6, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.5)
        >>> rounded, y = lambda x: (x * 8).round() / 8, network(x).argmax(1)
        >>> evaluate_defense(rounded, "robust_ext:APGD()", x, y, threat_model, classifier=network).static <= 1
        True
    """
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        chosen = make_settings(AdaptiveSettings, options, base=settings)
        subject = defense, classifier, inputs, labels, threat_model, run
        size = chosen.batch_size
        more: dict[str, Any] = {"weights": defense_weights, "negatives": negatives, "criterion": criterion}
        given, made = prepare_defense(*subject, batch_size=size, **more)
        result = evaluate_prepared(attacks, given, made, run.judged(chosen), run, surrogates=surrogates)
        return finish(replace(result, records=()))


def prepare_defense(
    defense: object,
    classifier: object,
    inputs: Array | Batches | Samples,
    labels: Array | None,
    threat_model: ThreatModel,
    run: RunKeywords,
    *,
    batch_size: int,
    weights: str | os.PathLike[str] | None = None,
    negatives: Array | None = None,
    criterion: Criterion | None = None,
) -> tuple[EvaluationInputs, AdaptiveDefense]:
    """Check a static model with its samples, and a defense of it; the arguments are as of :func:`evaluate_defense`."""
    if isinstance(defense, nn.Module):
        defense = on_device(defense, run.device, argument="defense")
    if classifier is None and isinstance(defense, AdaptiveDefense):
        classifier = defense.classifier
    if classifier is None:
        raise InvalidArgumentError(
            "classifier", None, "the static model that is defended, as only an AdaptiveDefense brings its own"
        )
    if isinstance(criterion, MultiLabel) and isinstance(defense, AdaptiveDefense):
        expected = "another criterion, or a class or function that makes the defense of a classifier of label sets"
        raise InvalidArgumentError("criterion", repr(criterion), f"with a defense of its own classifier, {expected}")
    given = run.prepare(classifier, inputs, labels, threat_model, batch_size=batch_size, criterion=criterion)
    made = as_defense(defense, given.module, given.inputs[:2], weights=weights, bounds=threat_model.bounds)
    threat_model.check_resolution(given.inputs[0].numel())
    group = made.group_size if made.batch_level else None
    if negatives is not None:
        made, group = one_image(made, check_samples(negatives, threat_model)[: (group or 1) - 1]), None
    if group is not None and len(given.inputs) % group and not made.pad:
        raise InvalidArgumentError(
            "inputs", f"{len(given.inputs)} samples", f"a multiple of {group}: the defense treats so many together"
        )
    return given, made


def evaluate_prepared(
    attacks: object,
    given: EvaluationInputs,
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    run: RunKeywords,
    *,
    surrogates: object = None,
    detector: NamedDetector | None = None,
) -> AdaptiveResult:
    """Evaluate a checked defense with settings that have a judge's seed; what a detector flags breaks nothing."""
    begun, networks = time.perf_counter(), _networks(surrogates, given.inputs, given.labels)
    steps = as_steps(attacks, defense, settings, threat_model=given.threat_model, surrogates=networks)
    runs = plan_runs(steps, given, defense, settings, detector)
    if len(runs) == 1:
        chosen = f"only={settings.only}, skip={settings.skip}"
        raise InvalidArgumentError("skip", chosen, "at least one category of which there are attacks")
    for one in runs:
        one.check()
    with limited(settings.minutes):
        with showing("test time", shown=run.progress), paced(defense, "probes of the defense"):
            check_model(defense, given.inputs[:PROBES], bounds=given.bounds, argument="defense", draws=True)
            some, their_labels = given.rows(affordable(defense, given, runs[0].blocks[0]))
            warnings = probe_outputs(defense, some, their_labels)
            cost = measure_cost(defense, some)
        runs = with_costs(runs, queried=(cost["forward"], cost["backward"]))
        cascade = Cascade()
        outcomes = drive(run.tasks(runs, title="test time", choose=cascade), run.worker)
    attacked = [one for one in outcomes.values() if one.run.step is not None]
    check_some_ran(attacked)
    if outcomes[runs[0].key].cut or not any(one.records for one in attacked):
        if setup := find_setup(given, seed=settings.seed):
            raise ModelError(sentence(setup[0].to_dict()))
        reasons = "; ".join(dict.fromkeys(cascade.not_run.values()))
        raise OutOfTimeError(f"no attack was run on any sample, so nothing can be stated: {reasons}")
    # The causes are looked for when all attacks are done, in a tenth of the time more.
    with limited(settings.minutes and settings.minutes / 10), showing("test time", shown=run.progress):
        stated, every = cascade.stated(attacked), list(outcomes.values())
        content, records = make_content(every, cost=cost, warnings=warnings, not_run=stated, planned=runs, begun=begun)
        return AdaptiveResult(content, records=records)


def _networks(surrogates: object, inputs: Tensor, labels: Tensor) -> dict[str, nn.Module]:
    """Surrogates by name as modules, on the device of labelled inputs ``(N, ...)``."""
    if surrogates is None:
        return {}
    if not isinstance(surrogates, Mapping) or not all(isinstance(name, str) for name in surrogates):
        raise InvalidArgumentError("surrogates", type(surrogates).__name__, "a dict of models by name")
    modules = {name: as_module(one, argument="surrogates").module for name, one in surrogates.items()}
    return {
        name: as_classifier(on_device(one, inputs.device, argument="surrogates"), inputs, labels)
        for name, one in modules.items()
    }
