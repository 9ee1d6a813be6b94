"""``robust-ext demo``."""

from __future__ import annotations

from pathlib import Path

import typer

from robust_ext.cli.loading import written
from robust_ext.cli.options import command
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.demo.run import run_demo


@settings_class
class DemoOptions(Settings):
    """Options of this command."""

    out: Path | None = setting(default=None, help="Folder for result.json and report.html.", panel="run")
    samples: int = setting(default=64, help="Number of digits.", minimum=1, panel="run")
    seed: int = setting(default=0, help="Of every draw.", minimum=0, maximum=LARGEST_SEED, panel="run")
    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")


@command()
def demo(own: DemoOptions) -> None:
    """Show one strong attack passing and three weak ones failing, on an embedded network for digits."""
    result = run_demo(samples=own.samples, seed=own.seed, progress=own.progress)
    typer.echo(str(result))
    if own.out is not None:
        result.save(own.out)
        typer.echo(written(own.out))
    else:
        typer.echo("Add --out DIR for a report with plots.")
