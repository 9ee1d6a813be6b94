"""``robust-ext mead``."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer

from robust_ext.cli.adaptation import AdaptationOptions
from robust_ext.cli.loading import RunOptions, Samples
from robust_ext.cli.options import command
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.engine.isolation import attack_worker
from robust_ext.evaluations.mead.api import mead
from robust_ext.evaluations.mead.fitting import NAMED
from robust_ext.evaluations.mead.named import find_detectors
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.suites import as_arms, parse_arm
from robust_ext.registry.model import as_module


@settings_class
class MeadOptions(Settings):
    """Options of this command alone."""

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
        help="A further attack, NORM:EPS[,EPS]=ATTACK, as in linf:8/255=foolbox:LinfPGD(); repeatable.",
        panel="attack",
    )
    allow_code: bool = setting(
        default=False,
        help="Run code that suites in files name, beside attacks of libraries.",
        cli="--allow-code",
        panel="attack",
    )
    train_data: str | None = setting(
        default=None, help="Data that detectors are fitted on; the train split of --data.", panel="detector"
    )
    train_samples: int = setting(default=5000, help="Of them.", minimum=1, panel="detector")
    adversarial_samples: int = setting(
        default=2000, help="Of them, attacked to train supervised detectors.", minimum=1, panel="detector"
    )
    calibration_samples: int = setting(
        default=1000,
        help="Further samples of the training data, for thresholds and to combine detectors.",
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
def mead_command(run: RunOptions, own: MeadOptions, adapt: AdaptationOptions, settings: dict[str, Any]) -> None:
    """Evaluate detectors against many attacks at once."""
    run.begin()
    # Attacks are named before they are run.
    with attack_worker(**run.isolation):
        _run(run, own, adapt, settings)


def _run(run: RunOptions, own: MeadOptions, adapt: AdaptationOptions, settings: dict[str, Any]) -> None:
    suites = own.suite or (() if own.arm else ("quick",))
    # Every arm brings a norm and an epsilon of its own.
    low, high = run.limits
    threat_model = ThreatModel(norm="linf", epsilon=max(high - low, 1e-9), bounds=run.limits)
    attacks: list[Any] = [*suites, *(one for text in own.arm for one in parse_arm(text))]
    # Before any detector is fitted.
    arms, _ = as_arms(attacks, threat_model, allow_code=own.allow_code)
    if adapt.settings:
        attacks = adapt.arms(arms)
    samples = run.load_samples(seed=settings["seed"])
    model = adapt.check(run.load_model())
    training = _training_data(run, own, samples)
    rows = training.choose(own.train_samples + own.calibration_samples, seed=settings["seed"])
    clean, classes = training.take(rows[: own.train_samples], bounds=run.limits)
    held_out, _ = training.take(rows[own.train_samples :], bounds=run.limits)
    detectors = find_detectors(
        own.detector,
        as_module(model).module,
        clean,
        classes,
        attacked=min(own.adversarial_samples, own.train_samples),
        preset=own.preset,
        bounds=run.limits,
        seed=settings["seed"],
        folder=None if run.out is None else run.out / "detectors",
        repair=run.repair,
        report=partial(typer.echo, err=True) if run.progress else lambda _: None,
    )
    trained = f"{training.name}, {own.train_samples} samples, and {len(held_out)} to calibrate"
    with run.context(samples, training_data=trained):
        result = mead(
            model,
            attacks,
            samples.inputs,
            samples.labels,
            threat_model,
            detectors=detectors,
            detector_data=held_out,
            sample_ids=samples.ids,
            allow_code=own.allow_code,
            **run.keywords,
            **settings,
        )
    run.show(result)


def _training_data(run: RunOptions, own: MeadOptions, samples: Samples) -> Dataset:
    """What detectors are fitted and calibrated on: other data than the samples, and enough of it."""
    training = load_dataset(own.train_data or run.data, root=run.data_root, split="train")
    if training.name == samples.dataset.name:
        expected = "other data than the samples, to fit and calibrate detectors on"
        raise InvalidArgumentError("--train-data", training.name, expected)
    if own.train_samples + own.calibration_samples > len(training):
        wanted = f"{own.train_samples} and {own.calibration_samples} to calibrate"
        raise InvalidArgumentError("--train-samples", wanted, f"at most {len(training)} samples of {training.name}")
    return training
