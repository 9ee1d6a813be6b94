"""The nearest adversarial point, searched for along the decision boundary of any network that has gradients.

Noise starts of which the worse are given up on the way, cheap steps along the boundary, and hops. It is also how the
linear-region attack begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.linear_region.fab import fab_steps, random_jump
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.results import LinearRegionResult, SearchRecord
from robust_ext.attacks.linear_region.starts import initial_state
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels

# Length and steps of basin hops, by trial on images of digits.
_HOPS = {"linf": (0.1, 30), "l2": (1.5, 12), "l1": (1.5, 12)}
# After steps along the boundary: the share of the perturbation that is kept in the bisection to the input, and how
# much farther than before they may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


# How many starts of an input take part, and what makes them nearer.
Round = tuple[int, Callable[[SearchState], SearchState]]


def _images(value: Any) -> Tensor:
    try:
        found: Tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError("pool", type(value).__name__, "images (P, ...) as a tensor or array") from error
    if found.dim() == 0:
        raise InvalidArgumentError("pool", value, "images (P, ...) as a tensor or array")
    return found


@settings_class
class BoundarySearch(NativeAttack):
    """Searches for the smallest adversarial perturbation of each input along the decision boundary.

    The smallest that was found at any time is kept, and the true network has confirmed each; epsilon has no influence.
    A row's result depends on the others by rounding alone, unless there is a limit in seconds. Each row draws one seed
    from the generator, in order, and everything else from that seed.

    The target's ``starting_points``, such as the candidates of other attacks, are begun at besides the starts that are
    searched for; no result is farther than the nearest of them that is adversarial. :meth:`run` returns more than the
    candidates.

    Example:
        >>> BoundarySearch(basin_hops=40).name
        'BoundarySearch'
    """

    name = "BoundarySearch"
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
            ModelError: The attack solves regions, and the network is not piecewise affine or cannot be followed.
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
        further = self._rounds(oracle, found)
        state = initial_state(
            oracle, seeds, found.open_samples(), self.start, self.starts, batch=self.batch, given=given, pool=pool
        )
        found.add(state)
        if self.fab_steps:
            state = self._stepped(oracle, state, state.points, found, steps=self.fab_steps)
            found.add(state)
        hop: Round = self.survivors, partial(self._hopped, oracle, found)
        rounds = [hop] * self.basin_hops + further(len(state.streams) // len(seeds))
        state = state.select(torch.isfinite(state.distances).nonzero().flatten())
        for number, (alive, improved) in enumerate(rounds):
            state = state.nearest(alive, found.open_samples())
            if len(state.streams) == 0 or not found.in_time():
                break
            state = improved(state)
            found.add(state, number=number, total=len(rounds))

    def _rounds(self, oracle: BoundaryOracle, found: SearchRecord) -> Callable[[int], list[Round]]:
        """The rounds after the hops, for how many starts each input has."""
        return lambda starts: []

    def _hopped(self, oracle: BoundaryOracle, found: SearchRecord, state: SearchState) -> SearchState:
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
