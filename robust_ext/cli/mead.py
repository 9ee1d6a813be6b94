"""``robust-ext mead``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from robust_ext.cli.loading import load_model
from robust_ext.cli.values import pair, share, torch_device, without_jobs
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer
from robust_ext.datasets import load_dataset
from robust_ext.engine.arm import plan_runs
from robust_ext.engine.workers import count_records, end_with_parent, run_shards
from robust_ext.evaluations.mead.api import mead
from robust_ext.evaluations.mead.fitting import NAMED
from robust_ext.evaluations.mead.named import TrainingData, find_detectors
from robust_ext.evaluations.mead.settings import MeadSettings as Settings
from robust_ext.evaluations.mead.suites import load_suite, parse_arm
from robust_ext.registry.model import as_module


def mead_command(
    model: Annotated[
        str, typer.Option(help="digits, package.module:object or file.py:object; a model or what makes one.")
    ],
    data: Annotated[
        str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.")
    ],
    detector: Annotated[
        list[str],
        typer.Option(
            help=f"{', '.join(NAMED)} (fitted on training data), or package.module:object or file.py:object; "
            "repeatable."
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(help="paper-mnist, paper-cifar10, quick (the default), white-box or FILE.toml; repeatable."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="A further attack, NORM:EPS[,EPS]=ATTACK, as in linf:8/255=foolbox:LinfPGD(); repeatable."),
    ] = None,
    bounds: Annotated[str, typer.Option(help="Lowest and highest input value of the model.")] = "0,1",
    weights: Annotated[str | None, typer.Option(help="State dict of the model: .safetensors, or a torch file.")] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder with the data's files.")] = None,
    data_split: Annotated[str, typer.Option(help="test or train.")] = "test",
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 100,
    order: Annotated[str, typer.Option(help="Which samples: random (by the seed) or first.")] = "random",
    train_data: Annotated[
        str | None, typer.Option(help="Data that detectors are fitted on; the train split of --data.")
    ] = None,
    train_samples: Annotated[int, typer.Option(help="Of them.")] = 5000,
    adversarial_samples: Annotated[int, typer.Option(help="Of them, attacked to train supervised detectors.")] = 2000,
    calibration_samples: Annotated[
        int, typer.Option(help="Further samples of the training data, for thresholds and to combine detectors.")
    ] = 1000,
    preset: Annotated[str, typer.Option(help="Constants of named detectors: auto, mnist or cifar10.")] = "auto",
    detector_fpr: Annotated[
        float, typer.Option(help="Share of clean inputs that a detector may flag.")
    ] = Settings.detector_fpr,
    combine: Annotated[
        list[str] | None, typer.Option(help="Judge all detectors as one too: mean, max or mixture; repeatable.")
    ] = None,
    naturals: Annotated[
        str, typer.Option(help="Misclassified samples: kept, as in the paper, or filtered.")
    ] = Settings.naturals,
    resamples: Annotated[int, typer.Option(help="Of the bootstrap intervals; 0 for none.")] = Settings.resamples,
    published: Annotated[bool, typer.Option(help="State too what the paper's public code computes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; a killed run goes on there. result.json, report.html.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Processes; needs --out.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Samples attacked at once.")] = Settings.batch_size,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    shard: Annotated[str, typer.Option(hidden=True)] = "0/1",
) -> None:
    """Evaluate detectors against many attacks at once."""
    for argument, value in (
        ("--samples", samples),
        ("--jobs", jobs),
        ("--train-samples", train_samples),
        ("--adversarial-samples", adversarial_samples),
        ("--calibration-samples", calibration_samples),
    ):
        check_integer(argument, value, minimum=1)
    limits, where, part = pair("--bounds", bounds), torch_device(device), share("--shard", shard)
    if jobs > 1 and out is None:
        raise InvalidArgumentError("--jobs", jobs, "a run folder (--out) when there is more than one")
    if part[1] > 1:
        end_with_parent()
    suites = list(suite or ([] if arm else ["quick"]))
    arms = [one for text in arm or [] for one in parse_arm(text)]
    planned = [*(one for name in suites for one in load_suite(name, bounds=limits)), *arms]
    dataset = load_dataset(data, root=data_root, split=data_split)
    chosen = dataset.choose(samples, seed=seed, order=order)
    inputs, labels = dataset.take(chosen, bounds=limits)
    made = load_model(model, weights=weights, device=where)
    training = load_dataset(train_data or data, root=data_root, split="train")
    if training.name == dataset.name:
        raise InvalidArgumentError(
            "--train-data", training.name, "other data than the samples, to fit and calibrate detectors on"
        )
    module = as_module(made).module
    if train_samples + calibration_samples > len(training):
        asked = f"{train_samples} and {calibration_samples} to calibrate"
        raise InvalidArgumentError("--train-samples", asked, f"at most {len(training)} samples of {training.name}")
    rows = training.choose(train_samples + calibration_samples, seed=seed)
    clean, classes = training.take(rows[:train_samples], bounds=limits)
    held_out, _ = training.take(rows[train_samples:], bounds=limits)
    watched = find_detectors(
        detector,
        module,
        TrainingData(
            clean=clean,
            labels=classes,
            attacked=min(adversarial_samples, train_samples),
            preset=preset,
            bounds=limits,
            seed=seed,
        ),
        folder=None if out is None else out / "detectors",
        say=partial(typer.echo, err=True) if progress else lambda _: None,
    )
    if jobs > 1 and out is not None:
        runs = plan_runs(planned, bounds=limits, values=inputs[0].numel(), detectors=list(watched))
        run_shards(
            without_jobs(sys.argv[1:]),
            jobs=jobs,
            total=len(runs) * samples,
            done=partial(count_records, *(out / "arms" / run.key for run in runs)),
            progress=progress,
            title="mead",
            unit="candidate",
        )
    result = mead(
        made,
        watched,
        inputs,
        labels,
        suite=suites,
        arms=arms,
        bounds=limits,
        sample_ids=[int(index) for index in chosen],
        detector_data=held_out,
        out=out,
        progress=progress and part[1] == 1 and jobs == 1,
        origin={
            "model": model if weights is None else f"{model}, weights {weights}",
            "data": f"{dataset.name}, order {order}",
            "training_data": f"{training.name}, {train_samples} samples, and {len(held_out)} to calibrate",
        },
        shard=part,
        naturals=naturals,
        resamples=resamples,
        combine=tuple(combine or ()),
        detector_fpr=detector_fpr,
        published=published,
        batch_size=batch_size,
        seed=seed,
    )
    if part[1] == 1:
        typer.echo(str(result))
        if out is not None:
            typer.echo(f"{out / 'result.json'} and {out / 'report.html'} hold the details.")
