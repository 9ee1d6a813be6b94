"""The command line: ``robust-ext`` with one command an evaluation."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from robust_ext import __version__
from robust_ext.cli.adaptive import defense_command
from robust_ext.cli.loading import load_model
from robust_ext.cli.mead import mead_command
from robust_ext.cli.robust_accuracy import robust_accuracy_command
from robust_ext.cli.values import number, pair, share, size, torch_device, without_jobs
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_integer
from robust_ext.datasets import load_dataset
from robust_ext.demo.run import run_demo
from robust_ext.engine.workers import count_records, end_with_parent, run_shards
from robust_ext.evaluations.binarization import BinarizationSettings as Settings
from robust_ext.evaluations.binarization import binarization_test
from robust_ext.registry.base import adapters
from robust_ext.reports.attack_list import attack_table, list_attacks
from robust_ext.reports.conformance import matrix_page, matrix_table
from robust_ext.testing.conformance import Row, conformance

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch.",
)


@app.command()
def binarization(
    model: Annotated[
        str, typer.Option(help="digits, package.module:object or file.py:object; a model or what makes one.")
    ],
    attack: Annotated[
        list[str], typer.Option(help="library:Name(key=value), module:callable or file.py:callable; repeatable.")
    ],
    data: Annotated[
        str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.")
    ],
    eps: Annotated[str, typer.Option(help="Budget in the units of the inputs; fractions such as 8/255 are fine.")],
    norm: Annotated[str, typer.Option(help=f"One of {', '.join(NORMS)}.")] = "linf",
    bounds: Annotated[str, typer.Option(help="Lowest and highest input value of the model.")] = "0,1",
    weights: Annotated[str | None, typer.Option(help="State dict of the model: .safetensors, or a torch file.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Name of the linear layer that makes the logits; found by itself.")
    ] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder with the data's files.")] = None,
    data_split: Annotated[str, typer.Option(help="test or train.")] = "test",
    samples: Annotated[int, typer.Option(help="Number of samples (the paper used 512).")] = 64,
    order: Annotated[str, typer.Option(help="Which samples: random (by the seed) or first.")] = "random",
    out: Annotated[
        Path | None, typer.Option(help="Run folder; a killed run goes on there. result.json, report.html.")
    ] = None,
    detector: Annotated[
        str | None,
        typer.Option(help="package.module:object or file.py:object: a detector, or what makes one of a model."),
    ] = None,
    detector_fpr: Annotated[float, typer.Option(help="Share of clean inputs that it may detect.")] = 0.05,
    detector_samples: Annotated[
        int, typer.Option(help="Further samples of the data to calibrate a detector without a threshold.")
    ] = 200,
    view: Annotated[
        str, typer.Option(help="What attacks on logits see of model and detector: classifier, reject or margin.")
    ] = "classifier",
    reference_points: Annotated[
        int, typer.Option(help="With a detector: points outside the ball for attacks that imitate some.")
    ] = Settings.reference_points,
    reference_distance: Annotated[float, typer.Option(help="Their distance, in eps.")] = Settings.reference_distance,
    planting_tries: Annotated[
        int, typer.Option(help="With a detector: most points drawn for one that it lets pass.")
    ] = Settings.planting_tries,
    detector_draws: Annotated[
        int, typer.Option(help="How often a random detector is asked; the majority decides.")
    ] = Settings.detector_draws,
    inner_points: Annotated[int, typer.Option(help="Inner points a sample.")] = Settings.inner_points,
    boundary_points: Annotated[int, typer.Option(help="Planted points a sample.")] = Settings.boundary_points,
    boundary: Annotated[
        str, typer.Option(help="Where points are planted: auto, corners or surface.")
    ] = Settings.boundary,
    gap: Annotated[
        float, typer.Option(help="Margin between inner points and boundary, relative to eps.")
    ] = Settings.gap,
    kappa: Annotated[
        float, typer.Option(help="Closeness of the decision boundary to the planted point.")
    ] = Settings.kappa,
    kappa_convention: Annotated[str, typer.Option(help="paper, or reference (its code).")] = Settings.kappa_convention,
    readout: Annotated[str, typer.Option(help="logistic or max-margin.")] = Settings.readout,
    c: Annotated[float, typer.Option("--C", help="Weight of the losses in logistic regression.")] = Settings.C,
    logit_scale: Annotated[str, typer.Option(help="original (the network's range) or unit.")] = Settings.logit_scale,
    random_inner: Annotated[int, typer.Option(help="Random attack: points in the ball.")] = Settings.random_inner,
    random_corners: Annotated[int, typer.Option(help="Random attack: boundary points.")] = Settings.random_corners,
    canaries: Annotated[int, typer.Option(help="Samples also posed with the wrong label.")] = Settings.canaries,
    threshold: Annotated[float, typer.Option(help="Test score that passes.")] = Settings.threshold,
    maximum_random_score: Annotated[
        float, typer.Option(help="R-ASR above which nothing passes.")
    ] = Settings.maximum_random_score,
    minimum_samples: Annotated[int, typer.Option(help="Planted samples a pass needs.")] = Settings.minimum_samples,
    sequential: Annotated[bool, typer.Option(help="Stop drawing samples once the verdict is decided.")] = False,
    error_rate: Annotated[float, typer.Option(help="Of the sequential decision.")] = Settings.error_rate,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = Settings.confidence,
    calibrate: Annotated[bool, typer.Option(help="Find the hardness first, on --calibration-samples.")] = False,
    calibration_samples: Annotated[int, typer.Option(help="Samples for --calibrate.")] = 16,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Processes; needs --out.")] = 1,
    batch_size: Annotated[str, typer.Option(help="Problems attacked at once, or auto.")] = "auto",
    forward_batch: Annotated[str, typer.Option(help="Rows of a forward pass, or auto.")] = "auto",
    fold: Annotated[bool, typer.Option(help="Measure points with batch normalisation folded, where faster.")] = True,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    shard: Annotated[str, typer.Option(hidden=True)] = "0/1",
) -> None:
    """Plant adversarial examples in a model and see whether an attack finds them."""
    threat_model = ThreatModel(norm=norm, epsilon=number("--eps", eps), bounds=pair("--bounds", bounds))
    check_integer("--samples", samples, minimum=1)
    check_integer("--jobs", jobs, minimum=1)
    check_integer("--calibration-samples", calibration_samples, minimum=1)
    where = torch_device(device)
    part = share("--shard", shard)
    if jobs > 1 and out is None:
        raise InvalidArgumentError("--jobs", jobs, "a run folder (--out) when there is more than one")
    if part[1] > 1:
        end_with_parent()
    dataset = load_dataset(data, root=data_root, split=data_split)
    check_integer("--detector-samples", detector_samples, minimum=1)
    further = detector_samples if detector is not None else 0
    everything = dataset.choose(min(samples + further, max(samples, len(dataset))), seed=seed, order=order)
    chosen = everything[:samples]
    inputs, _ = dataset.take(chosen, bounds=threat_model.bounds)
    if jobs > 1 and out is not None:
        run_shards(
            without_jobs(sys.argv[1:]),
            jobs=jobs,
            total=samples,
            done=partial(count_records, out),
            progress=progress,
        )
    result = binarization_test(
        load_model(model, weights=weights, device=where),
        list(attack),
        inputs,
        threat_model,
        layer=layer,
        sample_ids=[int(index) for index in chosen],
        out=out,
        calibrate_on=min(calibration_samples, samples) if calibrate else 0,
        progress=progress and part[1] == 1 and jobs == 1,
        origin={
            "model": model if weights is None else f"{model}, weights {weights}",
            "data": f"{dataset.name}, order {order}",
            **({} if detector is None else {"detector": detector}),
        },
        shard=part,
        detector=detector,
        detector_data=dataset.take(everything[samples:], bounds=threat_model.bounds)[0] if further else None,
        detector_fpr=detector_fpr,
        view=view,
        reference_points=reference_points,
        reference_distance=reference_distance,
        planting_tries=planting_tries,
        detector_draws=detector_draws,
        inner_points=inner_points,
        boundary_points=boundary_points,
        boundary=boundary,
        gap=gap,
        kappa=kappa,
        kappa_convention=kappa_convention,
        readout=readout,
        C=c,
        logit_scale=logit_scale,
        random_inner=random_inner,
        random_corners=random_corners,
        canaries=canaries,
        threshold=threshold,
        maximum_random_score=maximum_random_score,
        minimum_samples=minimum_samples,
        sequential=sequential,
        error_rate=error_rate,
        confidence=confidence,
        seed=seed,
        batch_size=size("--batch-size", batch_size),
        forward_batch=size("--forward-batch", forward_batch),
        fold=fold,
    )
    if part[1] == 1:
        typer.echo(str(result))
        if out is not None:
            typer.echo(f"{out / 'result.json'} and {out / 'report.html'} hold the details.")


app.command("mead")(mead_command)
app.command("robust-accuracy")(robust_accuracy_command)
app.command("test-time")(defense_command)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and report.html.")] = None,
    samples: Annotated[int, typer.Option(help="Number of digits.")] = 64,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Show one strong attack passing and three weak ones failing, on an embedded network for digits."""
    result = run_demo(samples=check_integer("--samples", samples, minimum=1), seed=seed, progress=progress)
    typer.echo(str(result))
    if out is not None:
        result.save(out)
        typer.echo(f"{out / 'result.json'} and {out / 'report.html'} hold the details.")
    else:
        typer.echo("Add --out DIR for a report with plots.")


@app.command()
def attacks(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Run each of them on a small target, with small settings; takes minutes.")
    ] = False,
    library: Annotated[
        list[str] | None, typer.Option(help="Only this library's; repeatable. All that are installed when left out.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the list or the matrix to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the matrix to this file as documentation.")] = None,
    seed: Annotated[int, typer.Option(help="Of every draw of the matrix.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """List the attacks that can be named on the command line, or see which of them run (--matrix)."""
    check_integer("--seed", seed, minimum=0)
    missing: list[str] = []
    if matrix:
        rows = _matrix(library, seed, progress)
    else:
        rows, missing = list_attacks(library)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        if not matrix:
            raise InvalidArgumentError("--markdown", str(markdown), "to be given together with --matrix")
        names = dict.fromkeys(row["library"] for row in rows)
        outcomes = {(row["library"], row["attack"], row["target"]): row["outcome"] for row in rows}
        page = matrix_page({name: adapters()[name].list_attacks() for name in names}, outcomes)
        markdown.write_text(page, encoding="utf-8")
    for line in missing:
        typer.echo(line, err=True)
    typer.echo(matrix_table(rows).rstrip() if matrix else attack_table(rows))


def _matrix(libraries: list[str] | None, seed: int, progress: bool) -> list[dict[str, Any]]:
    with tqdm(disable=not progress, unit="run", desc="attacks") as bar:

        def show(row: Row | None, total: int) -> None:
            bar.total = total
            if row is not None:
                bar.set_postfix_str(f"{row.library}:{row.attack}", refresh=False)
                bar.update()

        return [row.to_dict() for row in conformance(libraries, seed=seed, progress=show)]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"robust-ext {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log to stderr.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")


def main() -> None:
    """Run the command line; errors of this project end it with a line on stderr and status 2."""
    try:
        app()
    except RobustExtError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
