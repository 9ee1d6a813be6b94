"""Settings of the evaluation of an adaptive test-time defense."""

from __future__ import annotations

from robust_ext.core.settings import setting, settings_class
from robust_ext.engine.judge import JudgedSettings

CATEGORIES = ("naive", "transfer", "black-box", "white-box")
APART = ("only", "skip", "minutes")
"""Settings that decide which steps are run, and nothing of what a step that is run leaves."""


@settings_class
class AdaptiveSettings(JudgedSettings):
    """How hard a defense is attacked, and how often a random one is queried."""

    label = "the evaluation of a test-time defense"

    steps: int = setting(default=50, help="Of APGD through the defense.", minimum=1)
    transfer_steps: int = setting(
        default=50, help="Of APGD on the static model and on other networks, at least 50.", minimum=50
    )
    queries: int = setting(
        default=500,
        help="Of Square and RayS for each sample; unless full, Square takes a fifth or a tenth of them first.",
        minimum=1,
    )
    draws: int = setting(default=8, help="Draws that gradients of a random defense are averaged over.", minimum=1)
    repeats: int = setting(
        default=20,
        help="How often a random defense is queried about each candidate: so often to choose the worst attack on each "
        "sample, and so often again, afresh, to state what is left.",
        minimum=1,
    )
    only: tuple[str, ...] = setting(
        default=(),
        help=f"Run no attacks but those of this category, repeatable: {', '.join(CATEGORIES)}.",
        choices=CATEGORIES,
    )
    skip: tuple[str, ...] = setting(default=(), help="Run no attack of this category; repeatable.", choices=CATEGORIES)
    full: bool = setting(
        default=False,
        help="Run every attack on every sample. If not, cheap ones come first and others run on what they left.",
    )
    minutes: float | None = setting(
        default=None, help="Begin no further attack after so long; what was not run is stated.", above=0
    )
    batch_size: int = setting(
        default=64,
        help="Samples attacked and judged at once; for batch-level defenses the nearest number of whole groups.",
        minimum=1,
        panel="run",
    )
