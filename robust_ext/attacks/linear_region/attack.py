"""The linear-region attack: the nearest adversarial point, searched for one linear region after another.

Source: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
robustness using established attacks" (2019), algorithm 1 and section 4. Beyond the paper: the cheap search of
:class:`BoundarySearch` before the first region, and the norms linf and l1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from robust_ext.attacks.linear_region.boundary import BoundarySearch, Round
from robust_ext.attacks.linear_region.network.recording import record_checked
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.results import SearchRecord
from robust_ext.attacks.linear_region.search import RegionSearch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_number


def _improvement(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgumentError("improvement", value, "a pair (first round, last round)")
    return tuple(check_number("improvement", one, minimum=0, maximum=0.999, open_minimum=True) for one in value)


@settings_class
class LinearRegion(BoundarySearch):
    """Searches for the smallest adversarial perturbation of each input, in one linear region after another.

    :class:`BoundarySearch` comes first; regions near its nearest points are solved then. The target is a piecewise
    affine network in eval mode, see
    :func:`robust_ext.attacks.linear_region.network.recording.record_checked`. The solver can make a row's result depend
    on the others by per cents in l1, and by other points of nearly the same distance in linf.

    Example:
        >>> LinearRegion(regions=20, halving=2).successive_halving(12)
        [(4, 1), (4, 1), (2, 2), (2, 2), (1, 4)]
    """

    name = "LinearRegion"

    regions: int = setting(
        default=40, help="Regions sampled for an input, over all its starts.", minimum=0, trial=4, art="max_iter"
    )
    halving: int = setting(default=3, help="Rounds after which the worse half of the starts is given up.", minimum=1)
    q: float = setting(
        default=0.8,
        help="Probability that a region is sampled on the input's side (paper: .8).",
        minimum=0.5,
        maximum=1,
    )
    gamma: float = setting(
        default=6.0, help="How close to the best point regions are sampled: the larger, the closer (paper: 6).", above=0
    )
    classes: str = setting(
        default="runner-up",
        help='``"runner-up"``: one problem for each region, for the strongest class at the sampled point. ``"all"``: '
        "one for each class (the paper's). Makes no difference to a targeted attack.",
        choices=("runner-up", "all"),
    )
    improvement: tuple[float, float] = setting(
        default=(0.02, 0.001),
        help="Share by which a region has to beat the best point to be solved to the end: in the first round, and in "
        "the last; it falls geometrically. Both in (0, 1).",
        check=_improvement,
    )
    iterations: int = setting(default=100, help="Most iterations of the solver for one region.", minimum=1)

    def _rounds(self, oracle: BoundaryOracle, found: SearchRecord) -> Callable[[int], list[Round]]:
        # Recording counts its own passes, as any query of the module.
        recorded = record_checked(oracle.target.module, oracle.inputs, oracle.threat_model.bounds)
        search = RegionSearch(oracle, recorded, self.batch, self.q, self.gamma, self.classes, self.iterations)
        found.regions = search.regions
        first, last = self.improvement

        def of(starts: int) -> list[Round]:
            halved = self.successive_halving(starts)
            rounds: list[Round] = []
            for number, (alive, draws) in enumerate(halved):
                improvement = float(first * (last / first) ** (number / max(1, len(halved) - 1)))
                improved = partial(search.round, draws=draws, number=number, improvement=improvement)
                rounds.append((alive, improved))
            return rounds

        return of

    def successive_halving(self, starts: int) -> list[tuple[int, int]]:
        """How many starts of an input take part in each round, and how many regions each of them samples.

        As starts are given up, the others sample more, so that there is as much to compute at once.

        Args:
            starts: How many there are at first.
        """
        first = min(starts, self.survivors) if self.fab_steps or self.basin_hops else starts
        rounds: list[tuple[int, int]] = []
        left = self.regions if starts else 0
        while left > 0:
            alive = min(left, max(1, first >> (len(rounds) // self.halving)))
            draws = min(left, first) // alive
            rounds.append((alive, draws))
            left -= alive * draws
        return rounds
