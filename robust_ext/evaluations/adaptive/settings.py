"""Settings of the evaluation of an adaptive test-time defense."""

from __future__ import annotations

from robust_ext.core.settings import setting, settings_class
from robust_ext.engine.judge import JudgedSettings


@settings_class
class AdaptiveSettings(JudgedSettings):
    """How hard a defense is attacked, and how often a random one is queried."""

    label = "the evaluation of a test-time defense"

    steps: int = setting(default=50, help="Of APGD in each run.", minimum=1)
    queries: int = setting(default=500, help="Of Square and RayS for each sample.", minimum=1)
    draws: int = setting(default=8, help="Draws that gradients of a random defense are averaged over.", minimum=1)
    repeats: int = setting(
        default=5,
        help="How often a random defense is queried about each candidate: so often to choose the worst attack on each "
        "sample, and so often again, afresh, to state what is left.",
        minimum=1,
    )
    batch_size: int = setting(
        default=64,
        help="Samples attacked and judged at once; for batch-level defenses the nearest number of whole groups.",
        minimum=1,
        panel="run",
    )
