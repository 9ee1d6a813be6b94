"""``robust-ext casestudies``."""

from __future__ import annotations

import typer

from robust_ext.casestudies import CASE_STUDIES, run_case_studies
from robust_ext.cli.loading import written
from robust_ext.cli.options import command
from robust_ext.cli.workers import WorkerOptions
from robust_ext.core.settings import LARGEST_SEED, setting, settings_class


@settings_class
class CaseStudyOptions(WorkerOptions):
    """Options of this command."""

    names: tuple[str, ...] = setting(
        default=(), help=f"All when left out: {', '.join(CASE_STUDIES)}.", cli="NAME", panel="data"
    )
    data: str = setting(
        default="digits", help="digits, mnist or cifar10.", choices=("digits", "mnist", "cifar10"), panel="data"
    )
    data_root: str | None = setting(default=None, help="Folder with the data's files.", panel="data")
    samples: int = setting(default=64, help="Test images that recipes are judged on.", minimum=1, panel="data")
    images: int = setting(default=5000, help="Training images at most.", minimum=100, panel="data")
    seed: int = setting(default=0, help="Of every draw.", minimum=0, maximum=LARGEST_SEED, panel="run")
    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")


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
    typer.echo(str(result))
    if own.out is not None:
        typer.echo(written(own.out))
