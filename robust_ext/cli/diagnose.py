"""``robust-ext diagnose``."""

from __future__ import annotations

from typing import Any

import typer

from robust_ext.cli.adaptation import AdaptationOptions
from robust_ext.cli.loading import ThreatOptions
from robust_ext.cli.options import command
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.evaluations.diagnosis import DiagnosisSettings, diagnose

STATUS = 3
"""Exit status where something of high or medium weight was found."""


@settings_class
class DiagnoseOptions(Settings):
    """Options of this command alone."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), module:callable or file.py:callable; repeatable.", panel="attack"
    )
    try_remedies: bool = setting(
        default=False,
        help="Run remedies on the same samples, at most four for an attack, until one fixes it, and see what changes.",
    )


@command(DiagnosisSettings, samples=32)
def diagnose_command(
    run: ThreatOptions, own: DiagnoseOptions, adapt: AdaptationOptions, settings: dict[str, Any]
) -> None:
    """Find out whether an attack works on a model, and if not, why, and what to do.

    Exit status: 3 where something of high or medium weight was found, 0 where nothing was, 2 for errors.
    """
    threat_model = run.threat_model
    run.begin()
    samples = run.load_samples(seed=settings["seed"])
    with run.context(samples):
        result = diagnose(
            adapt.check(run.load_model()),
            adapt.attacks(own.attack),
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
        raise typer.Exit(STATUS)
