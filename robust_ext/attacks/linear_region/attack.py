"""The linear-region attack: the nearest adversarial point, searched for one linear region after another.

Source: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
robustness using established attacks" (2019), algorithm 1 and section 4. Beyond the paper: starts of noise of which the
worse are given up on the way, cheap steps along the boundary and hops before the first region, and the norms linf and
l1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.linear_region.fab import fab_steps, random_jump
from robust_ext.attacks.linear_region.network.recording import record
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.results import LinearRegionResult, SearchRecord
from robust_ext.attacks.linear_region.search import RegionSearch
from robust_ext.attacks.linear_region.starts import initial_state
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels, check_number

# Length and steps of basin hops, by trial on images of digits.
_HOPS = {"linf": (0.1, 30), "l2": (1.5, 12), "l1": (1.5, 12)}
# After steps along the boundary: the share of the perturbation that is kept in the bisection to the input, and how
# much farther than before they may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


def _improvement(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgumentError("improvement", value, "a pair (first round, last round)")
    return tuple(check_number("improvement", one, minimum=0, maximum=0.999, open_minimum=True) for one in value)


def _images(value: Any) -> Tensor:
    try:
        found: Tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError("pool", type(value).__name__, "images (P, ...) as a tensor or array") from error
    if found.dim() == 0:
        raise InvalidArgumentError("pool", value, "images (P, ...) as a tensor or array")
    return found


@settings_class
class LinearRegion(NativeAttack):
    """Searches for the smallest adversarial perturbation of each input, in one linear region after another.

    The smallest that was found at any time is kept, and the true network has confirmed each; epsilon has no influence.
    A row's result depends on the others by rounding alone, unless there is a limit in seconds; the solver can make per
    cents of it in l1, and other points of nearly the same distance in linf. Each row draws one seed from the
    generator, in order, and everything else from that seed.

    The target is a piecewise affine network in eval mode, see
    :func:`robust_ext.attacks.linear_region.network.recording.record`. Its ``starting_points``, such as the candidates
    of other attacks, are begun at besides the starts that are searched for; no result is farther than the nearest of
    them that is adversarial. :meth:`run` returns more than the candidates.

    Example:
        >>> LinearRegion(regions=20, halving=2).successive_halving(12)
        [(4, 1), (4, 1), (2, 2), (2, 2), (1, 4)]
    """

    name = "LinearRegion"
    traits = AttackTraits(
        minimum_norm=True,
        batching="any",
        norms=("l2", "linf", "l1"),
        leaves_ball=True,
        failure="input",
        seeds="generator",
    )

    starts: int = setting(default=12, help="Starts of each input that are searched for.", minimum=1, trial=4)
    start: str = setting(
        default="noise",
        help='``"noise"``: adversarial noise, blended with the input. ``"nearest"``: the nearest images of the '
        'likeliest other classes in ``pool``. ``"given"``: only starting points that are given.',
        choices=("noise", "nearest", "given"),
    )
    fab_steps: int = setting(
        default=30, help="First steps along the boundary, of the fast adaptive boundary attack.", minimum=0, trial=10
    )
    survivors: int = setting(
        default=4, help="Starts that go on then; all do when there are no such steps and no hops.", minimum=1
    )
    basin_hops: int = setting(
        default=24, help="Random jumps before the first region, each with a few steps back.", minimum=0, trial=2
    )
    hop_length: float | None = setting(
        default=None,
        help="Of a jump, as a multiple of the perturbation's l2 norm; .1 in linf and 1.5 in l2 and l1 when left out.",
        above=0,
    )
    hop_steps: int | None = setting(
        default=None, help="Steps back; 30 in linf and 12 in l2 and l1 when left out.", minimum=1, trial=5
    )
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
    passes: int | None = setting(
        default=None, help="Rows sent forward and backward after which an input gets no further round.", minimum=1
    )
    seconds: float | None = setting(
        default=None,
        help="Wall-clock time after which no further step is made. Results then depend on the speed of the machine "
        "and on the rest of the batch.",
        above=0,
    )
    batch: int = setting(default=128, help="Most points handled at once.", minimum=1, art=None)
    pool: Tensor | None = setting(
        default=None, help='Images for ``start="nearest"``, ``(P, ...)`` in bounds.', check=_images
    )

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Return the candidates of :meth:`run`, with the same arguments."""
        return self.run(target, inputs, labels, **given).candidates

    def run(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
    ) -> LinearRegionResult:
        """Search, and return the distances and the history too; for the arguments see :meth:`NativeAttack.search`.

        Inputs of any floating point dtype are taken as float32. ``watch`` is called after each hop and round with the
        nearest points found so far (the input where there is none) and minus their distances.

        Returns:
            Candidates, distances and history. An input that is adversarial as it is comes back with distance 0.

        Raises:
            InvalidArgumentError: Arguments are not as described, or do not fit the setting ``start``.
            ModelError: The network is not piecewise affine, or cannot be followed.
            AttackError: The target gives no gradients.
        """
        inputs = check_inputs("inputs", inputs, bounds=target.bounds)
        labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        given, pool = self._checked(target, inputs)
        seeds = [draw_seed(generator) for _ in range(len(inputs))]
        oracle = BoundaryOracle(target, inputs, labels, threat_model=threat_model, targeted=targeted)
        found = SearchRecord(oracle, passes=self.passes, seconds=self.seconds, watch=watch)
        if len(inputs) > 0:
            every = torch.arange(len(inputs), device=inputs.device)
            found.distances[oracle.adversarial(inputs, every, beyond_rounding=False)] = 0
            self._search(oracle, found, seeds, given, pool)
        return found.result()

    def _search(
        self, oracle: BoundaryOracle, found: SearchRecord, seeds: list[int], given: Tensor | None, pool: Tensor | None
    ) -> None:
        # Recording counts its own pass, as any query of the module.
        recorded = record(oracle.target.module, oracle.inputs[:1])
        search = RegionSearch(oracle, recorded, self.batch, self.q, self.gamma, self.classes, self.iterations)
        found.regions = search.regions
        state = initial_state(
            oracle, seeds, found.open_samples(), self.start, self.starts, batch=self.batch, given=given, pool=pool
        )
        rounds = self.successive_halving(len(state.streams) // len(seeds))
        found.add(state)
        if self.fab_steps:
            state = self._stepped(oracle, state, state.points, found, steps=self.fab_steps)
            found.add(state)
        state = state.select(torch.isfinite(state.distances).nonzero().flatten())
        total = self.basin_hops + len(rounds)
        for number in range(total):
            turn = number - self.basin_hops
            alive, draws = (self.survivors, 1) if turn < 0 else rounds[turn]
            state = state.nearest(alive, found.open_samples())
            if len(state.streams) == 0 or not found.in_time():
                break
            if turn < 0:
                state = self._hopped(oracle, state, found)
            else:
                first, last = self.improvement
                improvement = float(first * (last / first) ** (turn / max(1, len(rounds) - 1)))
                state = search.round(state, draws=draws, number=turn, improvement=improvement)
            found.add(state, number=number, total=total)

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

    def _hopped(self, oracle: BoundaryOracle, state: SearchState, found: SearchRecord) -> SearchState:
        """The starts after a random jump and a few steps back, or where they were."""
        inputs, bounds = oracle.inputs[state.sample_index], oracle.threat_model.bounds
        length, steps = _HOPS[oracle.threat_model.norm]
        away = random_jump(state.points, inputs, state.streams, length=self.hop_length or length, bounds=bounds)
        return self._stepped(oracle, state, away, found, steps=self.hop_steps or steps)

    def _stepped(
        self, oracle: BoundaryOracle, state: SearchState, away: Tensor, found: SearchRecord, *, steps: int
    ) -> SearchState:
        """The starts after steps from points ``away``, or where they were."""
        points, distances, samples = state.points.clone(), state.distances.clone(), state.sample_index
        for rows in torch.split(found.open_samples()[samples].nonzero().flatten(), self.batch):
            reached, lengths = fab_steps(oracle, away[rows], samples[rows], steps=steps, in_time=found.in_time)
            good = torch.isfinite(lengths) & (lengths < distances[rows] * _WORTH)
            rows = rows[good]
            moved = oracle.bisect_to_input(reached[good], samples[rows], least=_LEAST)
            lengths = oracle.distances(moved, samples[rows])
            nearer = lengths < distances[rows]
            points[rows[nearer]], distances[rows[nearer]] = moved[nearer], lengths[nearer]
        return SearchState(samples, points, distances, state.streams)

    def _checked(self, target: Target, inputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The starting points and the pool, as float32 on the inputs' device."""
        given, pool, tail = target.starting_points, self.pool, tuple(inputs.shape[1:])
        if given is not None:
            shape = tuple(given.shape)
            if shape[:1] != (len(inputs),) or shape[2:] != tail:
                expected = f"shape ({len(inputs)}, S, {', '.join(map(str, tail))})"
                raise InvalidArgumentError("starting_points", f"shape {shape}", expected)
            given = check_inputs("starting_points", given.flatten(0, 1), bounds=target.bounds)
            given = given.to(inputs.device).view(shape)
        elif self.start == "given":
            raise InvalidArgumentError("starting_points", None, "points for start='given'; or choose start='noise'")
        if self.start == "nearest":
            if pool is None or len(pool) == 0:
                raise InvalidArgumentError("pool", "no images", "images for start='nearest'; or choose start='noise'")
            pool = check_inputs("pool", pool, bounds=target.bounds).to(inputs.device)
            if tuple(pool.shape[1:]) != tail:
                raise InvalidArgumentError("pool", f"shape {tuple(pool.shape)}", f"images like {tail}")
        return given, pool
