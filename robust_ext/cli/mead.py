"""``robust-ext mead``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import typer

from robust_ext.cli.criteria import CriterionOptions
from robust_ext.cli.entries import EntryOptions
from robust_ext.cli.loading import AdaptationOptions, RunOptions, Samples
from robust_ext.cli.options import command, numbers
from robust_ext.core.errors import InvalidArgumentError, printable
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.engine.running import attack_worker
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead.api import mead
from robust_ext.evaluations.mead.fitting import NAMED, find_detectors
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.suites import as_arms, parse_arm
from robust_ext.registry.model import as_module

# Samples to fit and to calibrate detectors with, if the data has as many.
_FITTED, _CALIBRATING = 5000, 1000


@settings_class
class MeadOptions(AdaptationOptions):
    """Options of ``robust-ext mead`` alone."""

    detector: tuple[str, ...] = setting(
        help=f"{', '.join(NAMED)} (fitted on training data), or package.module:object or file.py:object; repeatable.",
        panel="detector",
    )
    suite: tuple[str, ...] = setting(
        default=(),
        help="paper-mnist, paper-cifar10, quick (the default), white-box or FILE.toml; repeatable.",
        panel="attack",
    )
    arm: tuple[str, ...] = setting(
        default=(),
        help="A further attack, NORM:EPS[,EPS]=ATTACK, as in linf:8/255=foolbox:LinfPGD(); or ATTACK alone, at --eps; "
        "repeatable.",
        panel="attack",
    )
    eps: str | None = setting(
        default=None,
        help="Budgets in --norm, as in 8/255 or 2/255,8/255, in place of those that suites have for their arms in that "
        "norm; their other arms are left out. Step sizes stay those of the suite.",
        panel="attack",
    )
    norm: str = setting(default="linf", help=f"Norm of --eps: {', '.join(NORMS)}.", choices=NORMS, panel="attack")
    allow_code: bool = setting(
        default=False,
        help="Run code that suites in files name, beside attacks of libraries.",
        cli="--allow-code",
        panel="attack",
    )
    train_data: str | None = setting(
        default=None, help="Data that detectors are fitted on; the train split of --data.", panel="detector"
    )
    train_samples: int | None = setting(
        default=None,
        help="Training samples that detectors are fitted on; at most 5000 by default.",
        minimum=1,
        panel="detector",
    )
    adversarial_samples: int = setting(
        default=2000, help="Training samples attacked to train supervised detectors.", minimum=1, panel="detector"
    )
    calibration_samples: int | None = setting(
        default=None,
        help="Further samples of the training data, for thresholds and to combine detectors; 1000, or a third of the "
        "data where that is less.",
        minimum=1,
        panel="detector",
    )
    preset: str = setting(
        default="auto",
        help="Constants of named detectors: auto, mnist or cifar10.",
        choices=("auto", "mnist", "cifar10"),
        panel="detector",
    )


@command(MeadSettings)
def mead_command(
    run: RunOptions, own: MeadOptions, valid: EntryOptions, judged: CriterionOptions, settings: dict[str, Any]
) -> None:
    """Evaluate detectors against many attacks at once."""
    # Naming an attack may load its code, which belongs into a process of its own.
    with attack_worker(**run.isolation):
        _run(run, own, valid, judged, settings)


def _run(
    run: RunOptions, own: MeadOptions, valid: EntryOptions, judged: CriterionOptions, settings: dict[str, Any]
) -> None:
    # Every arm brings a norm and an epsilon of its own.
    low, high = run.limits
    threat_model = valid.applied(ThreatModel(norm="linf", epsilon=max(high - low, 1e-9), bounds=run.limits))
    attacks = _attacks(own, threat_model)
    # Errors in arms come before any detector is fitted.
    arms, _ = as_arms(attacks, threat_model, allow_code=own.allow_code)
    if own.settings:
        attacks = own.arms(arms)
    criterion, samples = judged.choose(valid.load_samples(run, seed=settings["seed"]), seed=settings["seed"])
    model = own.model(run)
    training = _training_data(run, own, samples)
    fitted, calibrating = _sizes(own, training)
    rows, size = training.choose(fitted + calibrating, seed=settings["seed"]), run.size_for(training)
    clean, classes = training.take(rows[:fitted], bounds=run.limits, size=size)
    held_out, _ = training.take(rows[fitted:], bounds=run.limits, size=size)
    # Workers that fit detectors end before those that attack begin.
    with attack_worker(**run.isolation, **run.workers):
        detectors = find_detectors(
            own.detector,
            as_module(model).module,
            clean,
            classes,
            attacked=min(own.adversarial_samples, fitted),
            preset=own.preset,
            bounds=run.limits,
            seed=settings["seed"],
            folder=None if run.out is None else run.out / "detectors",
            repair=run.repair,
            fit=not run.dry_run,
            report=partial(typer.echo, err=True) if run.progress else lambda _: None,
        )
    trained = f"{training.name}, {fitted} samples, and {len(held_out)} to calibrate"
    with run.context(samples, training_data=trained):
        result = mead(
            model,
            attacks,
            samples.inputs,
            samples.labels,
            threat_model,
            detectors=detectors,
            detector_data=held_out,
            criterion=criterion,
            sample_ids=samples.ids,
            allow_code=own.allow_code,
            **run.keywords,
            **settings,
        )
    run.show(result)


def _training_data(run: RunOptions, own: MeadOptions, samples: Samples) -> Dataset:
    """Load the data to fit and calibrate detectors on, which must not be the samples."""
    training = load_dataset(own.train_data or run.data, root=run.data_root, split="train")
    if training.name == samples.dataset.name:
        expected = "other data than the samples, to fit and calibrate detectors on"
        raise InvalidArgumentError("--train-data", training.name, expected)
    return training


def _sizes(own: MeadOptions, training: Dataset) -> tuple[int, int]:
    """Return how many samples to fit detectors on and how many to calibrate them with, by default all."""
    there = len(training)
    calibrating = own.calibration_samples or max(1, min(_CALIBRATING, there // 3))
    fitted = own.train_samples or max(1, min(_FITTED, there - calibrating))
    if fitted + calibrating > there:
        wanted = f"{fitted} and {calibrating} to calibrate"
        raise InvalidArgumentError("--train-samples", wanted, f"at most {there} samples of {training.name}")
    usual = (own.train_samples or _FITTED, own.calibration_samples or _CALIBRATING)
    if (fitted, calibrating) != usual:
        note = f"{training.name} has {there} samples: {fitted} to fit detectors on, {calibrating} to calibrate them"
        typer.echo(printable(f"{note} (usually {usual[0]} and {usual[1]})."), err=True)
    return fitted, calibrating


def _attacks(own: MeadOptions, threat_model: ThreatModel) -> list[Any]:
    """Return suites and arms; with ``--eps``, only arms of suites in its norm, at its budgets."""
    suites = own.suite or (() if own.arm else ("quick",))
    epsilons = None if own.eps is None else numbers("--eps", own.eps)
    arms: list[Arm] = []
    for text in own.arm:
        if epsilons is None or text.partition("=")[0].partition(":")[0].strip() in (*NORMS, "none"):
            arms += parse_arm(text)
        else:
            arms += [Arm(attack=text, norm=own.norm, epsilon=epsilon) for epsilon in epsilons]
    if epsilons is None:
        return [*suites, *arms]
    found, _ = as_arms(list(suites), threat_model, allow_code=own.allow_code) if suites else ([], [])
    kept: dict[str, Arm] = {}
    for arm in (one for one in found if one.norm == own.norm):
        for epsilon in epsilons if arm.epsilon is not None else (None,):
            changed = replace(arm, epsilon=epsilon)
            kept.setdefault(changed.name, changed)
    if suites and not kept:
        norms = ", ".join(sorted({arm.norm for arm in found if arm.norm is not None}))
        raise InvalidArgumentError("--norm", own.norm, f"a norm that arms of {', '.join(suites)} have: {norms}")
    return [*kept.values(), *arms]
