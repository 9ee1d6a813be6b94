"""The linear-region attack: the nearest adversarial point, searched for one linear region after another.

Source: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
robustness using established attacks" (2019), algorithm 1 and section 4. Beyond the paper: the cheap search of
:class:`BoundarySearch` before the first region, and the norms linf and l1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from typing_extensions import Self

from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.linear_region.network.recording import record_checked
from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.search import RegionSearch
from robust_ext.attacks.linear_region.state import SearchRecord, SearchState
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_number
from robust_ext.datasets import load_dataset

# Rounds between halvings of the number of starts, and rounds until the least improvement suffices.
_HALVING, _FALLING = 3, 8


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

    :meth:`paper` makes the paper's own algorithm.

    Example:
        >>> [LinearRegion(survivors=4).sharing(number, 100) for number in (0, 3, 6)]
        [(4, 1), (2, 2), (1, 4)]
        >>> LinearRegion.paper(None).sharing(6, 2000)
        (5, 1)
    """

    name = "LinearRegion"
    ranks = False

    regions: int = setting(
        default=1000, help="Most regions sampled for an input, over all its starts.", minimum=0, trial=4, art="max_iter"
    )
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
        help="Share by which a region has to beat its start to be solved to the end: in the first round, and in late "
        "ones; in between it falls geometrically. Both in (0, 1).",
        check=_improvement,
    )
    iterations: int = setting(default=100, help="Most iterations of the solver for one region.", minimum=1)
    halving: bool = setting(
        default=True,
        help="Whether half as many starts of an input take part after every three rounds, each with twice the regions.",
    )

    @classmethod
    def paper(
        cls,
        pool: Any,
        *,
        labels: Any = None,
        root: str | None = None,
        points: int = 5,
        regions: int = 500,
        gamma: float = 6.0,
    ) -> Self:
        """Return algorithm 1 of the paper as section 5.1 runs it; as text ``robust_ext:LinearRegion.paper(...)``.

        It differs from the paper in three points: it also solves the region of each start itself, a region that one
        start has ruled out is not solved for the others, and up to three more points are drawn where a region was
        solved before.

        Args:
            pool: Training images ``(P, ...)``, of which the nearest of the likeliest other classes are starts; or what
                :func:`robust_ext.datasets.load_dataset` takes, whose training images in [0, 1] are taken with their
                labels.
            labels: Of the images, ``(P,)``; those that the network gets wrong are no starts. Without labels every
                image is of the class that the network predicts.
            root: Folder of a data set that is named.
            points: M, starting points of an input (5 on MNIST, 15 on GTS, 3 on CIFAR-10).
            regions: N, regions of each starting point (500; 400 on CIFAR-10).
            gamma: 6 on MNIST, 9 on GTS and CIFAR-10.
        """
        if isinstance(pool, str):
            data = load_dataset(pool, root=root, split="train")
            pool, labels = data.take(range(len(data)))
        given = {"pool": pool, "draws": points, "survivors": points, "regions": points * regions, "gamma": gamma}
        return cls(
            starts=("nearest",),
            start_steps=0,
            hops=0,
            classes="all",
            iterations=500,
            halving=False,
            improvement=(1e-3, 1e-3),
            budget=1e9,
            pool_labels=labels,
            **given,
        )

    @property
    def searches_on(self) -> bool:
        """See :attr:`BoundarySearch.searches_on`."""
        return self.hops > 0 or self.regions > 0

    def _recorded(self, oracle: BoundaryOracle) -> Regions:
        # Recording counts its own passes, as any query of the module.
        return record_checked(oracle.target.module, oracle.inputs, oracle.threat_model.bounds)

    def _refine(self, oracle: BoundaryOracle, recorded: Regions, state: SearchState, found: SearchRecord) -> None:
        search = RegionSearch(self, oracle, recorded, found, state.points)
        left, number = self.regions, 0
        first, last = self.improvement
        while left > 0:
            alive, draws = self.sharing(number, left)
            improvement = max(last, first * (last / first) ** (number / _FALLING))
            nearer = partial(search.round, draws=draws, number=number, improvement=improvement)
            if not self._improve(state, found, nearer, alive=alive):
                break
            left, number = left - alive * draws, number + 1

    def sharing(self, number: int, left: int) -> tuple[int, int]:
        """Return the number of an input's starts in a round, and the number of regions for each, out of ``left``.

        Fewer starts sample more regions each, which keeps batches large.
        """
        alive = min(left, max(1, self.survivors >> (number // _HALVING if self.halving else 0)))
        return alive, max(1, min(left, self.survivors) // alive)
