"""The nearest adversarial point along the decision boundary of any network that has gradients.

Cheap starts come first, and then basin hops from those that may become the nearest: a random jump and steps back, of
several kinds that share the passes of each input. The linear-region attack begins with the same search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.linear_region.fab import fab_steps, random_jump
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.starts import Portfolio
from robust_ext.attacks.linear_region.state import KINDS, LinearRegionResult, SearchRecord, SearchState
from robust_ext.attacks.linear_region.stepping import Going, Steps, descent_steps, proximal_steps, stepped
from robust_ext.attacks.linear_region.trust_region import then_trust_region, trust_region_steps
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels

# The least share of each kind of hop, and the factor by which its gain fades with each hop.
_LEAST, _FADING = 0.1, 0.5


@dataclass(frozen=True)
class Hop:
    """A jump's length, as a multiple of the perturbation's l2 norm, and the steps back.

    ``limited`` steps stay nearer than the nearest known point. Costly hops are made from the ``most`` promising starts
    of each input alone.
    """

    take: Steps
    length: float
    steps: int
    limited: bool = False
    most: int | None = None


HOPS = {
    "linf": (Hop(descent_steps, 0.5, 24, limited=True), Hop(fab_steps, 0.1, 30)),
    "l2": (Hop(fab_steps, 1.5, 12), Hop(descent_steps, 2.0, 60, most=2)),
    # Steps in l2 end at other points than steps in l1 do, of which some are nearer once they were made sparse.
    "l1": (
        Hop(partial(then_trust_region, first=fab_steps, last=20), 1.5, 32, most=2),
        Hop(partial(then_trust_region, first=descent_steps, last=40, norm="l2"), 2.0, 100, most=2),
        Hop(proximal_steps, 4.0, 240, most=2),
        Hop(partial(proximal_steps, length=0.1), 4.0, 240, most=2),
    ),
}
# Steps after all hops, without a jump: the others end up to per cents away from the nearest point around.
LAST = Hop(trust_region_steps, 0.0, 40)


class Hops:
    """Hops from the starts of inputs; the kinds share the passes of an input in proportion to their gains there."""

    def __init__(self, oracle: BoundaryOracle, *, batch: int) -> None:
        self._oracle, self._batch = oracle, batch
        self._kinds = HOPS[oracle.threat_model.norm]
        # Of each kind of hop and input, what it gained for a pass, and its passes.
        shape = (2, len(oracle.inputs), len(self._kinds))
        self._gains, self._spent = torch.zeros(shape, dtype=torch.float64, device=oracle.inputs.device)

    def __call__(self, state: SearchState, *, going: Going) -> SearchState:
        """Return the starts after a hop, of one kind for each input; starts move only if they get nearer."""
        oracle, samples, kinds = self._oracle, state.sample_index, self._chosen()
        passes, nearest = oracle.passes.clone(), oracle.nearest.clone()
        points, distances = state.points.clone(), state.distances.clone()
        for number, hop in enumerate(self._kinds):
            rows = state.promising(hop.most or len(samples), kinds == number)
            if len(rows):
                latest = self.made(hop, state.select(rows), going=going)
                points[rows], distances[rows] = latest.points, latest.distances
                self._learn(number, samples[rows], passes, nearest)
        return replace(state, points=points, distances=distances)

    def made(self, hop: Hop, state: SearchState, *, going: Going) -> SearchState:
        """Return the starts after a hop of this kind; a start moves only if it gets nearer."""
        oracle, bounds, samples = self._oracle, self._oracle.threat_model.bounds, state.sample_index
        away = random_jump(state.points, oracle.inputs[samples], state.streams, length=hop.length, bounds=bounds)
        more = {"limits": oracle.nearest[samples]} if hop.limited else {}
        return stepped(oracle, state, away, hop.take, steps=hop.steps, going=going, batch=self._batch, **more)

    def _chosen(self) -> Tensor:
        """Return the kind of hop that is farthest below its share of passes for each input, int64 ``(N,)``."""
        total = self._gains.sum(1, keepdim=True)
        shares = _LEAST + torch.where(total > 0, self._gains / total, 0)
        kinds: Tensor = (self._spent / shares).argmin(1)
        return kinds

    def _learn(self, number: int, samples: Tensor, passes: Tensor, nearest: Tensor) -> None:
        samples = torch.unique(samples)
        spent = (self._oracle.passes - passes)[samples].double()
        gained = (1 - self._oracle.nearest[samples] / nearest[samples]).nan_to_num(0, 0, 0) / spent.clamp_min(1)
        self._gains[samples, number] = torch.maximum(gained, self._gains[samples, number] * _FADING)
        self._spent[samples, number] += spent


# The share of the budget after which no further start is made.
_START_SHARE = 0.4

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
        help="For each input and for everything, starts included, in ``budget_unit``. It is looked at before each step "
        "and each round of regions, so that a search ends at most one of these later.",
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
        inputs = check_inputs("inputs", inputs, bounds=target.bounds)
        labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        given, pool = self._checked(target, inputs)
        seeds = [draw_seed(generator) for _ in range(len(inputs))]
        oracle = BoundaryOracle(target, inputs, labels, threat_model=threat_model, targeted=targeted)
        found = SearchRecord(oracle, budget=self.budget, unit=self.budget_unit, watch=watch)
        if len(inputs) > 0:
            every = torch.arange(len(inputs), device=inputs.device)
            oracle.adversarial(inputs, every, beyond_rounding=False)
            self._search(oracle, found, seeds, given, pool)
        return found.result()

    def _search(
        self, oracle: BoundaryOracle, found: SearchRecord, seeds: list[int], given: Tensor | None, pool: Tensor | None
    ) -> None:
        refine = self._refinement(oracle, found)
        portfolio = Portfolio(
            oracle=oracle,
            found=found,
            seeds=seeds,
            kinds=self.starts,
            draws=self.draws,
            steps=self.start_steps,
            target_classes=self.target_classes,
            batch=self.batch,
            until=_START_SHARE,
            given=given,
            pool=pool,
        )
        state = portfolio.starts()
        hops = Hops(oracle, batch=self.batch)
        hopped = partial(hops, going=partial(found.going, until=_UNTIL))
        for _ in range(self.hops):
            if not self._improve(state, found, hopped, alive=self.survivors, until=_UNTIL):
                break
        if self.hops:
            self._improve(state, found, partial(hops.made, LAST, going=found.going), alive=self.survivors)
        if refine is not None:
            refine(state)
        oracle.move_beyond_rounding()
        found.add(state)

    def _refinement(self, oracle: BoundaryOracle, found: SearchRecord) -> Callable[[SearchState], None] | None:
        """Return a further search from the starts after the hops, if there is one."""
        return None

    def _improve(
        self,
        state: SearchState,
        found: SearchRecord,
        nearer: Callable[[SearchState], SearchState],
        *,
        alive: int,
        until: float = 1.0,
    ) -> bool:
        """Search from ``alive`` starts of each input within a share of the budget; return whether any was left."""
        rows = state.promising(alive, found.going(torch.arange(len(found.regions)), until=until))
        if len(rows) == 0:
            return False
        latest = nearer(state.select(rows))
        state.update(rows, latest)
        found.add(latest)
        return True

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
        return given, pool
