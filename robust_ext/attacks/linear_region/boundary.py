"""The nearest adversarial point along the decision boundary of any network that has gradients.

Cheap starts come first, and then basin hops from those that may become the nearest. The linear-region attack begins
with the same search.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.linear_region.hops import LAST, Hops
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.starts import Portfolio
from robust_ext.attacks.linear_region.state import KINDS, LinearRegionResult, SearchRecord, SearchState
from robust_ext.attacks.native import Batch, NativeAttack, SearchOptions
from robust_ext.core.cost import Cost
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels

# The share of the budget after which the last steps are made and regions are solved, where they are: by then hops gain
# little, and regions little more.
_UNTIL = 0.9


def _images(value: Any) -> Tensor:
    try:
        found: Tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError("pool", type(value).__name__, "images (P, ...) as a tensor or array") from error
    if found.dim() == 0:
        raise InvalidArgumentError("pool", value, "images (P, ...) as a tensor or array")
    return found


def _labels(value: Any) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError("pool_labels", type(value).__name__, "integers (P,), one an image") from error


@settings_class
class BoundarySearch(NativeAttack):
    """Searches for the smallest adversarial perturbation of each input along the decision boundary.

    The search keeps the smallest perturbation that the true network has confirmed; epsilon has no influence. At the
    end it moves points out, by at most a thousandth, so that rounding does not take them back across the boundary. A
    row's result depends on the others by rounding alone, unless the budget is in seconds. Each row draws one seed from
    the generator, in order, and all other random numbers from that seed.

    The search also begins at the target's ``starting_points``, such as the candidates of other attacks; no result is
    farther than the nearest adversarial one of them. :meth:`run` returns more than the candidates.

    Example:
        >>> BoundarySearch(budget=10, budget_unit="seconds").name
        'BoundarySearch'
    """

    name = "BoundarySearch"
    ranks = True
    takes_starting_points: ClassVar[bool] = True
    traits = AttackTraits(
        minimum_norm=True,
        batching="any",
        norms=("l2", "linf", "l1"),
        leaves_ball=True,
        failure="input",
        seeds="generator",
    )

    budget: float = setting(
        default=5000.0,
        help="Budget of each input for everything, starts included, in ``budget_unit``. It is checked before each "
        "step and each round of regions, so a search ends at most one of these later.",
        above=0,
        trial=600.0,
    )
    budget_unit: str = setting(
        default="passes",
        help='``"passes"``: rows sent forward and backward. ``"seconds"``: CPU seconds of this process (those of all '
        "threads), of which inputs that are searched together share what they have in all; results then depend on the "
        "speed of the machine and on the rest of the batch.",
        choices=("passes", "seconds"),
    )
    starts: tuple[str, ...] = setting(
        default=("descent", "boundary", "noise"),
        help='Kinds of starts besides starting points that are given. ``"descent"``: steepest descents in a shrinking '
        'ball, in l1 proximal steps, from the input. ``"boundary"``: steps of the fast adaptive boundary attack, from '
        'the input. ``"noise"``: adversarial noise, blended with the input. ``"nearest"``: the nearest images of the '
        "likeliest other classes in ``pool``.",
        choices=KINDS[1:],
    )
    target_classes: int = setting(
        default=3,
        help="Likeliest other classes that steps from the input, and descents in l2 and linf, are aimed at, besides "
        "those at any class.",
        minimum=0,
    )
    draws: int = setting(default=8, help="Starts of noise of each input, and nearest images.", minimum=1, trial=4)
    start_steps: int = setting(
        default=60,
        help="Steps of each start from the input (descents in l1 take four times as many), and half as many from "
        "noise, images and given points; 0 to search on from these as they are.",
        minimum=0,
        trial=10,
    )
    survivors: int = setting(
        default=4,
        help="Starts of an input that are searched on from at once: those that may become the nearest.",
        minimum=1,
    )
    hops: int = setting(
        default=1000, help="Most random jumps from these starts, each with a few steps back.", minimum=0, trial=2
    )
    batch: int = setting(default=128, help="Most points handled at once.", minimum=1, art=None)
    pool: Tensor | None = setting(
        default=None, help='Images for ``"nearest"`` starts, ``(P, ...)`` in bounds.', check=_images
    )
    pool_labels: Tensor | None = setting(
        default=None,
        help="Labels of the pool, ``(P,)``: images that the network classifies otherwise are then left out, as in the "
        "paper.",
        check=_labels,
    )

    @property
    def searches_on(self) -> bool:
        """True if something follows the starts, which then leave most of the budget to it."""
        return self.hops > 0

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """See :meth:`Attack.cost`: each gradient takes a pass forward and one back, everything else goes forward."""
        return Cost(self.budget, self.budget / 2) if self.budget_unit == "passes" else None

    def candidates(self, batch: Batch) -> Tensor:
        """Return the candidates of :meth:`run`."""
        return self._run(batch).candidates

    def run(
        self, target: Target, inputs: Tensor, labels: Tensor, **options: Unpack[SearchOptions]
    ) -> LinearRegionResult:
        """Search, and return the distances and the history too; arguments are those of :meth:`NativeAttack.search`.

        Inputs of any floating point dtype are taken as float32. ``watch`` is called before each step and round with
        the nearest points found so far (the input without one) and minus their distances; how many steps there
        will be is reckoned from the share of the budget that is spent.

        Returns:
            Candidates, distances and history. An input that is adversarial as it is comes back with distance 0.

        Raises:
            InvalidArgumentError: Arguments are not as described, or do not fit the setting ``starts``.
            ModelError: The attack solves regions, and the network is not piecewise affine or cannot be followed.
            AttackError: The target gives no gradients.
        """
        return self._run(Batch(target, inputs, labels, **options))

    def _run(self, batch: Batch) -> LinearRegionResult:
        target = batch.target
        inputs = check_inputs("inputs", batch.inputs, bounds=target.bounds)
        labels = check_labels("labels", batch.labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        given, pool = self._checked(target, inputs)
        seeds = [draw_seed(batch.generator) for _ in range(len(inputs))]
        oracle = BoundaryOracle(target, inputs, labels, threat_model=batch.threat_model, targeted=batch.targeted)
        found = SearchRecord(oracle, budget=self.budget, unit=self.budget_unit, watch=batch.watch)
        if len(inputs) > 0:
            every = torch.arange(len(inputs), device=inputs.device)
            oracle.adversarial(inputs, every, beyond_rounding=False)
            recorded = self._recorded(oracle)
            state = Portfolio(self, oracle, found, seeds, given, pool).starts()
            self._hop(Hops(oracle, batch=self.batch), state, found)
            self._refine(oracle, recorded, state, found)
            oracle.move_beyond_rounding()
            found.add(state)
        return found.result()

    def _recorded(self, oracle: BoundaryOracle) -> Any:
        """Return what :meth:`_refine` needs of the network; refuse a network before anything is searched."""

    def _refine(self, oracle: BoundaryOracle, recorded: Any, state: SearchState, found: SearchRecord) -> None:
        """Search on from the starts after the hops."""

    def _hop(self, hops: Hops, state: SearchState, found: SearchRecord) -> None:
        going = partial(found.going, until=_UNTIL)
        for _ in range(self.hops):
            if not self._improve(state, found, lambda near, _: hops(near, going=going), until=_UNTIL):
                break
        if self.hops:
            self._improve(state, found, lambda near, _: hops.made(LAST, near, going=found.going))

    def _improve(
        self,
        state: SearchState,
        found: SearchRecord,
        nearer: Callable[[SearchState, Tensor], SearchState],
        *,
        alive: int | None = None,
        until: float = 1.0,
    ) -> bool:
        """Search from ``alive`` starts of each input within a share of the budget; return whether any was left."""
        open_samples = found.going(torch.arange(len(found.regions)), until=until)
        rows = state.promising(self.survivors if alive is None else alive, open_samples)
        if len(rows):
            latest = nearer(state.select(rows), rows)
            state.update(rows, latest)
            found.add(latest)
        return len(rows) > 0

    def _checked(self, target: Target, inputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the starting points and the pool, as float32 on the inputs' device."""
        given, pool, tail = target.starting_points, self.pool, tuple(inputs.shape[1:])
        if given is not None:
            shape = tuple(given.shape)
            if shape[:1] != (len(inputs),) or shape[2:] != tail:
                expected = f"shape ({len(inputs)}, S, {', '.join(map(str, tail))})"
                raise InvalidArgumentError("starting_points", f"shape {shape}", expected)
            given = check_inputs("starting_points", given.flatten(0, 1), bounds=target.bounds)
            given = given.to(inputs.device).view(shape)
        elif not self.starts:
            raise InvalidArgumentError("starting_points", None, "points, as starts=() has none; or choose starts")
        if "nearest" in self.starts:
            if pool is None or len(pool) == 0:
                raise InvalidArgumentError("pool", "no images", "images for 'nearest'; or choose other starts")
            pool = check_inputs("pool", pool, bounds=target.bounds).to(inputs.device)
            if tuple(pool.shape[1:]) != tail:
                raise InvalidArgumentError("pool", f"shape {tuple(pool.shape)}", f"images like {tail}")
            if self.pool_labels is not None and tuple(self.pool_labels.shape) != (len(pool),):
                shown = f"shape {tuple(self.pool_labels.shape)}"
                raise InvalidArgumentError("pool_labels", shown, f"shape ({len(pool)},), one an image of the pool")
        return given, pool
