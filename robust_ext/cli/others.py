"""``robust-ext attacks``, ``casestudies``, ``demo``, ``compare`` and ``show``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from robust_ext.casestudies import CASE_STUDIES, run_case_studies
from robust_ext.casestudies.reproduction import PAPERS, items, reproduce
from robust_ext.cli.loading import ExecutorOptions, SeedOptions, WorkerOptions, written
from robust_ext.cli.models import load_model
from robust_ext.cli.options import command
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.files import replace_file
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.tabular import table
from robust_ext.core.validation import check_choice
from robust_ext.demo.run import run_demo
from robust_ext.engine.progress import showing
from robust_ext.evaluations.comparison import compare
from robust_ext.evaluations.unfinished import show_run
from robust_ext.registry.base import AttackListing, adapters
from robust_ext.reports.conformance import matrix_cell, matrix_page, matrix_table

_OTHERS = (
    "Besides these: package.module:callable and path/to/file.py:callable, (model, x, y) -> x_adv; and any of them with "
    "BPDA and EoT, robust_ext:AdaptedAttack(attack='...', bpda='LAYER', eot=8)."
)


@settings_class
class AttacksOptions(ExecutorOptions, SeedOptions):
    """Options of ``robust-ext attacks``."""

    matrix: bool = setting(
        default=False,
        help="Run each of them on a small target, with small settings; takes minutes.",
        cli="--matrix",
        panel="attack",
    )
    library: tuple[str, ...] = setting(
        default=(), help="Only attacks of this library; repeatable. All installed libraries by default.", panel="attack"
    )
    json_file: Path | None = setting(
        default=None, help="Write the list or the matrix to this file.", cli="--json", panel="run"
    )
    markdown: Path | None = setting(default=None, help="Write the matrix to this file as documentation.", panel="run")


@command()
def attacks(own: AttacksOptions) -> None:
    """List the attacks that can be named on the command line, or see which of them run (--matrix)."""
    if own.markdown is not None and not own.matrix:
        raise InvalidArgumentError("--markdown", str(own.markdown), "to be given together with --matrix")
    libraries = list(own.library) or None
    rows, missing = (_matrix(own, libraries), []) if own.matrix else _listed(libraries)
    if own.json_file is not None:
        own.json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if own.markdown is not None:
        names = dict.fromkeys(row["library"] for row in rows)
        cells = {(row["library"], row["attack"], row["target"]): matrix_cell(row) for row in rows}
        page = matrix_page({name: adapters()[name].list_attacks() for name in names}, cells)
        own.markdown.write_text(page, encoding="utf-8")
    for line in missing:
        typer.echo(line, err=True)
    typer.echo(matrix_table(rows).rstrip() if own.matrix else _table(rows))


def _matrix(own: AttacksOptions, libraries: list[str] | None) -> list[dict[str, Any]]:
    # It imports the demo's data and network, which no other command needs.
    from robust_ext.testing.conformance import Row, conformance

    with showing("attacks", shown=own.progress, unit="run") as bar:

        def show(row: Row | None, total: int) -> None:
            if bar is not None:
                bar.total = total
            if row is not None and bar is not None:
                bar.phase(f"{row.library}:{row.attack}")
                bar.advance()

        rows = conformance(libraries, seed=own.seed, progress=show, executor=own.make_executor())
        return [row.to_dict() for row in rows]


def _listed(libraries: Sequence[str] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each attack of some libraries, or of all; and why libraries are missing."""
    rows, missing = [], []
    known = adapters()
    for name in known if libraries is None else libraries:
        check_choice("library", name, tuple(known))
        try:
            rows += [_row(name, listing) for listing in known[name].list_attacks()]
        except MissingDependencyError as error:
            missing.append(f"{name}: {error}")
    return rows, missing


def _row(library: str, listing: AttackListing) -> dict[str, Any]:
    traits = asdict(listing.traits)
    return {
        "name": f"{library}:{listing.name}",
        "aliases": [f"{library}:{alias}" for alias in listing.aliases],
        **{key: list(value) if isinstance(value, tuple) else value for key, value in traits.items()},
        "kind": listing.traits.kind,
        **{key: getattr(listing, key) for key in ("channels", "reason", "defect")},
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each attack, then the refused ones with their reasons."""
    lines = [("attack", "kind", "norms", "batching", "also called")]
    refused = [f"{row['name']}: {row['reason']}" for row in rows if row["reason"]]
    for row in rows:
        if not row["reason"]:
            norms, aliases = " ".join(row["norms"]), " ".join(row["aliases"])
            lines.append((row["name"], row["kind"], norms, row["batching"], aliases))
    refused = ["", "Not usable here:", *refused] if refused else []
    return "\n".join([*table(lines, words=range(5), width=1000), *refused, "", _OTHERS])


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
class ReproductionOptions(WorkerOptions, SeedOptions):
    """Options of ``robust-ext reproduce``."""

    paper: str | None = setting(default=None, help=f"{', '.join(PAPERS)}.", cli="PAPER", panel="data")
    item: str | None = setting(default=None, help="As in 'figure 2'; all are listed when left out.", cli="ITEM")
    data: str = setting(
        default="digits", help="Data of the case studies and of MEAD: digits, mnist or cifar10.", panel="data"
    )
    data_root: str | None = setting(default=None, help="Folder with the data's files.", panel="data")
    samples: int = setting(default=64, help="Test images.", minimum=1, panel="data")
    only: tuple[str, ...] = setting(
        default=(), help="Case studies of a figure; repeatable. All when left out.", panel="data"
    )
    model: str | None = setting(default=None, help="The network of MEAD; that of digits when left out.", panel="data")
    weights: str | None = setting(default=None, help="Weights of --model.", panel="data")
    suite: str | None = setting(default=None, help="Attacks of MEAD instead of the paper's collection.", panel="data")
    tolerance: float = setting(default=0.1, help="Largest difference that counts as agreement.", minimum=0)


@command()
def reproduction(own: ReproductionOptions) -> None:
    """Run the small version of a paper's table or figure next to the paper's numbers, or list where each is."""
    if own.paper and own.item:
        asked = {
            name: getattr(own, name)
            for name in ("data", "data_root", "samples", "only", "suite", "tolerance", "seed", "out")
        }
        if own.model is not None:
            asked["model"] = load_model(own.model, weights=own.weights).model
        own.show(reproduce(own.paper, own.item, progress=own.progress, **asked, **own.isolation, **own.workers))
        return
    if own.paper:
        check_choice("PAPER", own.paper, tuple(PAPERS))
    rows = [
        (one.paper, one.name, one.what, f"robust-ext reproduce {one.paper} '{one.name}'" if one.runs else one.where)
        for one in items()
        if own.paper in (None, one.paper)
    ]
    typer.echo("\n".join(table([("paper", "item", "what", "where"), *rows], words=range(4), width=1000)))


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
