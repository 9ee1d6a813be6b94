"""``robust-ext casestudies``, ``demo``, ``compare`` and ``show``."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from robust_ext.casestudies import CASE_STUDIES, run_case_studies
from robust_ext.cli.loading import SeedOptions, WorkerOptions, written
from robust_ext.cli.options import command
from robust_ext.core.files import replace_file
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.demo.run import run_demo
from robust_ext.evaluations.comparison import compare
from robust_ext.evaluations.unfinished import show_run


@settings_class
class CaseStudyOptions(WorkerOptions, SeedOptions):
    """Options of ``robust-ext casestudies``."""

    names: tuple[str, ...] = setting(
        default=(), help=f"All when left out: {', '.join(CASE_STUDIES)}.", cli="NAME", panel="data"
    )
    data: str = setting(
        default="digits", help="digits, mnist or cifar10.", choices=("digits", "mnist", "cifar10"), panel="data"
    )
    data_root: str | None = setting(default=None, help="Folder with the data's files.", panel="data")
    samples: int = setting(default=64, help="Test images that recipes are judged on.", minimum=1, panel="data")
    images: int = setting(default=5000, help="Training images at most.", minimum=100, panel="data")


@command()
def casestudies(own: CaseStudyOptions) -> None:
    """Train small versions of thirteen published defenses; judge their authors' attack recipes and right ones."""
    result = run_case_studies(
        own.names,
        data=own.data,
        data_root=own.data_root,
        samples=own.samples,
        images=own.images,
        seed=own.seed,
        out=own.out,
        device=own.device,
        progress=own.progress,
        **own.isolation,
        **own.workers,
    )
    own.show(result)


@settings_class
class DemoOptions(SeedOptions):
    """Options of ``robust-ext demo``."""

    out: Path | None = setting(default=None, help="Folder for result.json and report.html.", panel="run")
    samples: int = setting(default=64, help="Number of digits.", minimum=1, panel="run")


@command()
def demo(own: DemoOptions) -> None:
    """Show one strong attack passing and three weak ones failing, on an embedded network for digits."""
    result = run_demo(samples=own.samples, seed=own.seed, progress=own.progress)
    typer.echo(str(result))
    if own.out is not None:
        result.save(own.out)
    typer.echo("Add --out DIR for a report with plots." if own.out is None else written(own.out))


@settings_class
class CompareOptions(Settings):
    """Options of ``robust-ext compare``."""

    runs: tuple[str, ...] = setting(help="Two or more run folders of one kind of evaluation.", cli="RUN...")
    json_file: Path | None = setting(default=None, help="Write the comparison to this file.", cli="--json", panel="run")


@command()
def compare_runs(own: CompareOptions) -> None:
    """Compare runs with the first of them: verdicts, scores, settings and versions."""
    found = compare(*own.runs)
    if own.json_file is not None:
        replace_file(own.json_file, json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    typer.echo(str(found).rstrip())


@settings_class
class ShowOptions(Settings):
    """Options of ``robust-ext show``."""

    run: Path = setting(help="Folder of a run, finished or not, or a result.json.", cli="RUN")


@command()
def show(own: ShowOptions) -> None:
    """Print the result of a run folder, or its table so far where the run is not finished."""
    typer.echo(show_run(own.run).rstrip())
