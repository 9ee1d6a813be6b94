"""``robust-ext evaluate``, ``binarization``, ``diagnose``, ``robust-accuracy`` and ``test-time``."""

from __future__ import annotations

from typing import Any

import typer

from robust_ext.cli.criteria import CriterionOptions
from robust_ext.cli.entries import EntryOptions, ExportOptions
from robust_ext.cli.loading import AdaptationOptions, RunOptions, ThreatOptions
from robust_ext.cli.models import load_model
from robust_ext.cli.options import command, labelled, numbers
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.evaluations.adaptive import AdaptiveSettings, evaluate_defense
from robust_ext.evaluations.binarization import BinarizationSettings, binarization_test
from robust_ext.evaluations.diagnosis import DiagnosisSettings, diagnose
from robust_ext.evaluations.evaluate import EvaluateSettings, evaluate
from robust_ext.evaluations.robust_accuracy import robust_accuracy
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings

FOUND = 3
"""Exit status of a diagnosis that found something of high or medium weight."""
_NEGATIVES = 1024  # Further samples next to one image; as many as its group has are used.


@settings_class
class DetectorOptions(Settings):
    """The detector of a command."""

    detector: str | None = setting(
        default=None,
        help="package.module:object or file.py:object: a detector, or what makes one of a model.",
        panel="detector",
    )
    detector_samples: int = setting(
        default=200,
        help="Further samples of the data to calibrate a detector without a threshold.",
        minimum=1,
        panel="detector",
    )


@settings_class
class SideOptions(DetectorOptions):
    """Options of ``robust-ext evaluate`` alone."""

    defense: str | None = setting(
        default=None,
        help=f"A test-time defense of the model: {', '.join(NAMED)}, with settings as in hd(steps=5); or "
        "package.module:object or file.py:object, see robust-ext test-time.",
        panel="model",
    )
    defense_weights: str | None = setting(
        default=None,
        help=f"Trained parts of a named defense ({', '.join(TRAINED)}), a .safetensors file.",
        panel="model",
    )


@command(EvaluateSettings, samples=128)
def evaluation(
    run: ThreatOptions, own: SideOptions, valid: ExportOptions, judged: CriterionOptions, settings: dict[str, Any]
) -> None:
    """Robust accuracy under a standard suite, with a certificate that the attack behind the number works."""
    valid.check(run)
    threat_model, further = valid.applied(run.threat_model), 0 if own.detector is None else own.detector_samples
    samples = valid.load_samples(run, seed=settings["seed"], further=further, at_most=True)
    criterion, samples = judged.choose(samples, seed=settings["seed"])
    defense = own.defense if own.defense_weights is None else f"{own.defense}, weights {own.defense_weights}"
    with run.context(samples, defense=defense, detector=own.detector):
        result = evaluate(
            run.loaded.model,
            samples.inputs,
            samples.labels,
            threat_model,
            criterion=criterion,
            defense=own.defense,
            defense_weights=own.defense_weights,
            detector=own.detector,
            detector_data=samples.further,
            sample_ids=samples.ids,
            **run.keywords,
            **settings,
        )
    run.show(result)
    valid.export(run, samples, threat_model, criterion)


@settings_class
class AttackOptions(AdaptationOptions):
    """The attacks of a command, and how they are adapted."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), or LABEL=library:Name(key=value); module:callable or file.py:callable; "
        "repeatable.",
        panel="attack",
    )


@settings_class
class BinarizationOptions(AttackOptions):
    """Options of ``robust-ext binarization`` alone."""

    calibrate: bool = setting(default=False, help="Find the hardness first, on --calibration-samples.")
    calibration_samples: int = setting(default=16, help="Samples for --calibrate.", minimum=1)


# With up to 128 samples, the sequential rule passes a good attack as often as all of 64 samples do.
@command(BinarizationSettings, samples=128, sequential=True)
def binarization(
    run: ThreatOptions,
    own: BinarizationOptions,
    detecting: DetectorOptions,
    valid: EntryOptions,
    settings: dict[str, Any],
) -> None:
    """Plant adversarial examples in a model and see whether an attack finds them."""
    threat_model = valid.applied(run.threat_model)
    further = 0 if detecting.detector is None else detecting.detector_samples
    samples = valid.load_samples(run, seed=settings["seed"], further=further, at_most=settings["sequential"])
    with run.context(samples, detector=detecting.detector):
        result = binarization_test(
            own.model(run),
            own.attacks(own.attack),
            samples.inputs,
            threat_model,
            labels=samples.labels,
            sample_ids=samples.ids,
            calibrate_on=min(own.calibration_samples, len(samples.ids)) if own.calibrate else 0,
            detector=detecting.detector,
            detector_data=samples.further,
            **run.keywords,
            **settings,
        )
    run.show(result)


@settings_class
class DiagnoseOptions(AttackOptions):
    """Options of ``robust-ext diagnose`` alone."""

    try_remedies: bool = setting(
        default=False,
        help="Run remedies on the same samples, at most four for an attack, until one fixes it, and see what changes.",
    )


@command(DiagnosisSettings, samples=32)
def diagnosis(run: ThreatOptions, own: DiagnoseOptions, valid: EntryOptions, settings: dict[str, Any]) -> None:
    """Find out whether an attack works on a model, and if not, why, and what to do.

    Exit status: 3 where something of high or medium weight was found, 0 where nothing was, 2 for errors.
    """
    threat_model, samples = valid.applied(run.threat_model), valid.load_samples(run, seed=settings["seed"])
    with run.context(samples):
        result = diagnose(
            own.model(run),
            own.attacks(own.attack),
            samples.inputs,
            samples.labels,
            threat_model,
            sample_ids=samples.ids,
            try_remedies=own.try_remedies,
            **run.keywords,
            **settings,
        )
    run.show(result)
    if any(finding.weight != "low" for finding in result.findings):
        raise typer.Exit(FOUND)


@settings_class
class RobustAccuracyOptions(AdaptationOptions):
    """Options of ``robust-ext robust-accuracy`` alone."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), or LABEL=library:Name(key=value); module:callable; repeatable.", panel="attack"
    )
    eps: str = setting(help="Budgets in the units of the inputs, as in 0.5,1,1.5 or 2/255,8/255.", panel="attack")
    norm: str = setting(default="linf", help=f"One of {', '.join(NORMS)}.", choices=NORMS, panel="attack")


@command(RobustAccuracySettings)
def accuracy(
    run: RunOptions,
    own: RobustAccuracyOptions,
    valid: ExportOptions,
    judged: CriterionOptions,
    settings: dict[str, Any],
) -> None:
    """Robust accuracy at several budgets, under each attack and under all of them."""
    epsilons = RobustAccuracySettings(epsilons=tuple(numbers("--eps", own.eps))).epsilons or ()
    attacks = labelled(own.attack)
    valid.check(run)
    threat_model = valid.applied(ThreatModel(norm=own.norm, epsilon=epsilons[-1], bounds=run.limits))
    criterion, samples = judged.choose(valid.load_samples(run, seed=settings["seed"]), seed=settings["seed"])
    with run.context(samples):
        result = robust_accuracy(
            own.model(run),
            own.named(attacks),
            samples.inputs,
            samples.labels,
            threat_model,
            criterion=criterion,
            epsilons=epsilons,
            sample_ids=samples.ids,
            **run.keywords,
            **settings,
        )
    run.show(result)
    valid.export(run, samples, threat_model, criterion)


@settings_class
class DefenseOptions(Settings):
    """Options of ``robust-ext test-time`` alone."""

    defense: str = setting(
        help=f"{', '.join(NAMED)}, with settings as in hd(steps=5); or package.module:object or file.py:object: a "
        "function that purifies inputs, an AdaptiveDefense, or what makes one of a classifier.",
        panel="model",
    )
    defense_weights: str | None = setting(
        default=None,
        help=f"Trained parts of a named defense ({', '.join(TRAINED)}), a .safetensors file.",
        panel="model",
    )
    surrogate: tuple[str, ...] = setting(
        default=(),
        help="A further network to transfer points from, as --model, with its weights after an @ as in "
        "net.py:make@FILE; repeatable.",
        panel="attack",
    )
    one_image: bool = setting(
        default=False,
        help="Defend each row of a batch-level defense alone beside further samples of the data, which no attack "
        "changes; otherwise whole groups are attacked.",
        panel="attack",
    )


@command(AdaptiveSettings, samples=64)
def at_test_time(
    run: ThreatOptions, own: DefenseOptions, valid: EntryOptions, judged: CriterionOptions, settings: dict[str, Any]
) -> None:
    """Evaluate a defense that acts at test time against the static model it defends."""
    threat_model, device = valid.applied(run.threat_model), check_device(run.device, argument="--device")
    samples = valid.load_samples(run, seed=settings["seed"], further=_NEGATIVES if own.one_image else 0)
    criterion, samples = judged.choose(samples, seed=settings["seed"])
    surrogates = {}
    for text in own.surrogate:
        spec, at, weights = text.partition("@")
        if not spec or (at and not weights):
            raise InvalidArgumentError("--surrogate", text, "a model, or a model with weights, SPEC@FILE")
        surrogates[text] = load_model(spec, weights=weights or None, device=device).model
    defense = own.defense if own.defense_weights is None else f"{own.defense}, weights {own.defense_weights}"
    with run.context(samples, defense=defense):
        result = evaluate_defense(
            own.defense,
            None,
            samples.inputs,
            samples.labels,
            threat_model,
            criterion=criterion,
            classifier=run.loaded.model,
            defense_weights=own.defense_weights,
            surrogates=surrogates,
            negatives=samples.further,
            sample_ids=samples.ids,
            **run.keywords,
            **settings,
        )
    run.show(result)
