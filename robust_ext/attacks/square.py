"""The Square attack: random search by square windows, without gradients.

Source: Andriushchenko et al., "Square Attack: a query-efficient black-box adversarial attack via random search" (2020),
algorithm 1; its windows are in :mod:`robust_ext.attacks._common.square_windows`.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from robust_ext.attacks._common.best import BestPoints
from robust_ext.attacks._common.rows import check_batch, given_start, query
from robust_ext.attacks._common.square_windows import L1Windows, L2Windows, LinfWindows, Windows
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import CountedRows, derive_seed
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel

LOSSES = ("margin", "ce")

# Of 10,000 queries, those after which the windows' share of the pixels is halved; other numbers are scaled to it.
_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_WINDOWS: dict[str, type[Windows]] = {"linf": LinfWindows, "l2": L2Windows, "l1": L1Windows}
# Queries whose numbers are drawn together.
_BLOCK = 100


def window_share(changes: int, *, queries: int, p: float) -> float:
    """Share of the pixels in a window after ``changes`` others, of all ``queries``; ``p`` at first.

    The schedule is that of the paper's published code.

    Example:
        >>> [window_share(changes, queries=10_000, p=0.8) for changes in (10, 11, 51)]
        [0.8, 0.4, 0.2]
    """
    return float(p / 2 ** bisect_left(_HALVED_AFTER, changes * 10_000 // queries))


@settings_class
class Square(NativeAttack):
    """Changes one square window of the perturbation at a time, and keeps what raises the loss.

    Every query sends the whole batch, in row order, through the target once; a row that is misclassified sends the
    point that is, and the search ends when all rows are. Points misclassified are kept before others. Each row draws
    one seed from the generator, in order, and all its windows from that seed.

    Where the target has starting points, the first run begins at each row's first one, projected onto the ball, and not
    at random.

    In linf a window that would change nothing turns its signs, which the paper's sampling allows to happen. Images may
    have any height and width: windows are squares of the same share of the pixels. Of vectors ``(N, D)`` and series
    ``(N, C, L)`` they are intervals.

    Example:
        >>> Square(queries=200)
        Square(queries=200, p=0.8, restarts=1, loss='margin', stop_early=True, schedule=None)
    """

    name = "Square"
    ranks = True
    traits = AttackTraits(batching="full", gradients=False, failure="best", seeds="generator")

    queries: int = setting(
        default=5000, help="Points queried in each run, the first one among them.", minimum=1, trial=40, art="max_iter"
    )
    p: float = setting(
        default=0.8,
        help="Share of the pixels in the first windows; it falls as in :func:`window_share`. The paper has .05 for "
        "linf and .1 for l2 on ImageNet, and .8 is in wide use.",
        above=0,
        maximum=1,
        art="p_init",
    )
    restarts: int = setting(
        default=1,
        help="Runs from first points of their own; later runs are for rows that are not solved.",
        minimum=1,
        art="num_random_init",
    )
    loss: str = setting(
        default="margin",
        help='Loss that is maximised: ``"margin"``, or ``"ce"``, the paper\'s for attacks that aim at a class.',
        choices=LOSSES,
    )
    stop_early: bool = setting(
        default=True,
        help="Whether rows that are misclassified stay as they are. If not, their loss is raised further, and all "
        "queries are made.",
    )
    schedule: int | None = setting(
        default=None,
        help="Queries over which the windows' share falls; those of a run when left out. A short run with the schedule "
        "of a long one is its beginning.",
        minimum=1,
    )

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        return Cost(self.queries * self.restarts)

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; AttackRefusedError for inputs of more than four dimensions."""
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        if inputs.dim() > 4:
            raise AttackRefusedError(
                f"{self.name}: works on images (N, C, H, W), series (N, C, L) and vectors (N, D), and inputs here are "
                f"{tuple(inputs.shape)}; reshape them inside the model, or choose robust_ext:RandomSearch"
            )
        shape = inputs.shape
        # A series is an image one pixel high, a vector a series of one channel.
        images = inputs.view(len(inputs), *{2: (1, 1), 3: (shape[1], 1), 4: shape[1:3]}[inputs.dim()], shape[-1])
        seeds = [draw_seed(batch.generator) for _ in range(len(inputs))]
        windows = _WINDOWS[batch.threat_model.norm](images, batch.threat_model)
        best = BestPoints(images, labels, loss=self.loss, goal=batch.goal)
        for restart in range(self.restarts):
            run = BestPoints(images, labels, loss=self.loss, goal=batch.goal)
            draws = _Draws(seeds, restart)
            for turn in range(self.queries):
                known = run if turn else best
                closed = known.solved if self.stop_early else torch.zeros_like(known.solved)
                if bool(closed.all()):
                    break
                given = given_start(batch.target, inputs, batch.threat_model) if turn == restart == 0 else None
                tried = self._try(windows, turn, draws, run.points) if given is None else given.view_as(images)
                points = torch.where(closed[:, None, None, None], known.points, tried)
                loss = run.update(points, query(batch.target, points.view(shape)), closed=closed if turn else None)
                batch.show(restart * self.queries + turn, self.restarts * self.queries, points.view(shape), loss)
            best.merge(run)
        return best.points.view(shape)

    def _try(self, windows: Windows, turn: int, draws: _Draws, points: Tensor) -> Tensor:
        if turn == 0:
            return windows.first(draws.of(0, windows.first_numbers))
        side = windows.side(window_share(turn - 1, queries=self.schedule or self.queries, p=self.p))
        return windows.change(points, side, draws.of(turn, windows.numbers))


class _Draws:
    """Numbers uniform in [0, 1), counted by query, of keys for each row and run."""

    def __init__(self, seeds: list[int], restart: int) -> None:
        self._keys = [derive_seed(seed, restart) for seed in seeds]
        self._block = torch.empty(0)

    def of(self, query: int, numbers: int) -> Tensor:
        """Numbers ``(N, numbers)`` of a query; that of the first point is 0, others follow in order."""
        if query == 0:
            return CountedRows(self._keys, 1).uniforms(numbers)[:, 0]
        place = (query - 1) % _BLOCK
        if place == 0:
            self._block = CountedRows(self._keys, _BLOCK, start=query).uniforms(numbers)
        return self._block[:, place]
