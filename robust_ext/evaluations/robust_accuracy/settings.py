"""Settings of robust accuracy."""

from __future__ import annotations

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class


@settings_class
class RobustAccuracySettings(Settings):
    """At which budgets robust accuracy is stated, and how attacks are run."""

    label = "robust accuracy"

    epsilons: tuple[float, ...] | None = setting(
        default=None,
        help="Budgets above 0, in the units of the inputs, each once; the epsilon of the threat model alone where "
        "left out.",
        above=0,
        cli=None,
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )
    seed: int = setting(default=0, help="Of every draw.", minimum=0, maximum=LARGEST_SEED, panel="run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilons is not None:
            if not self.epsilons:
                raise InvalidArgumentError("epsilons", self.epsilons, "a list of at least one budget")
            if len(set(self.epsilons)) < len(self.epsilons):
                raise InvalidArgumentError("epsilons", self.epsilons, "each budget once")
            self._set("epsilons", tuple(sorted(self.epsilons)))
