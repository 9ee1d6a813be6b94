"""The Square attack: random search by square windows, without gradients.

Source: Andriushchenko et al., "Square Attack: a query-efficient black-box adversarial attack via random search" (2020),
algorithm 1; what is tried is in :mod:`robust_ext.attacks._common.square_windows`.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from robust_ext.attacks._common.best_points import BestPoints
from robust_ext.attacks._common.square_windows import L1Windows, L2Windows, LinfWindows, Windows
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import NativeAttack, Step, Watch
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels, check_number

LOSSES = ("margin", "ce")

# Of 10,000 queries, those after which the windows' share of the pixels is halved; other numbers are scaled to it.
_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_WINDOWS: dict[str, type[Windows]] = {"linf": LinfWindows, "l2": L2Windows, "l1": L1Windows}
# Queries whose numbers are drawn together. It does not follow `queries`, or other numbers would draw other windows.
_BLOCK = 100


def window_share(changes: int, *, queries: int, p: float) -> float:
    """Share of the pixels in a window.

    The schedule is that of the paper's published code.

    Args:
        changes: How many windows were tried before this one.
        queries: All queries of the run.
        p: The share at the start.

    Example:
        >>> [window_share(changes, queries=10_000, p=0.8) for changes in (10, 11, 51)]
        [0.8, 0.4, 0.2]
    """
    return float(p / 2 ** bisect_left(_HALVED_AFTER, changes * 10_000 // queries))


class Square(NativeAttack):
    """Changes one square window of the perturbation at a time, and keeps what raises the loss.

    Every query sends the whole batch, in row order, through the target once; a row that is misclassified sends the
    point that is, and the search ends when all rows are. Points misclassified are kept before others. Each row draws
    one seed from the generator, in order, and all its windows from that seed.

    In linf a window that would change nothing turns its signs, which the paper's sampling allows to happen. Images may
    have any height and width: windows are squares of the same share of the pixels.

    Args:
        queries: Points asked about in each run, the first one among them, at least 1.
        p: Share of the pixels in the first windows, in (0, 1]; it falls as in :func:`window_share`. The paper has .05
            for linf and .1 for l2 on ImageNet, and .8 is in wide use.
        restarts: Runs from first points of their own, at least 1; later runs are for rows that are not solved.
        loss: What is raised: ``"margin"``, or ``"ce"``, the paper's for attacks that aim at a class.
        stop_early: Whether rows that are misclassified stay as they are. If not, their loss is raised further, and
            all queries are made.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> Square(queries=200).description
        "Square(queries=200, p=0.8, restarts=1, loss='margin', stop_early=True)"
    """

    name = "Square"
    traits = AttackTraits(batching="full", gradients=False, failure="best", seeds="generator")

    def __init__(
        self,
        *,
        queries: int = 5000,
        p: float = 0.8,
        restarts: int = 1,
        loss: str = "margin",
        stop_early: bool = True,
    ) -> None:
        self.queries = check_integer("queries", queries, minimum=1)
        self.p = check_number("p", p, minimum=0, maximum=1, open_minimum=True)
        self.restarts = check_integer("restarts", restarts, minimum=1)
        self.loss = check_choice("loss", loss, LOSSES)
        if not isinstance(stop_early, bool):
            raise InvalidArgumentError("stop_early", stop_early, "True or False")
        self.stop_early = stop_early

    @property
    def description(self) -> str:
        """All settings."""
        names = ("queries", "p", "restarts", "loss", "stop_early")
        return "Square(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return one candidate for each input, see :meth:`NativeAttack.search`.

        Raises:
            AttackRefusedError: The inputs are no images ``(N, C, H, W)``.
            InvalidArgumentError: Inputs or labels are not as described.
        """
        inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
        labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        if inputs.dim() != 4:
            raise AttackRefusedError(
                f"{self.name}: works on images (N, C, H, W), and inputs here are {tuple(inputs.shape)}; reshape them "
                "inside the model, or choose robust_ext:RandomSearch"
            )
        seeds = [draw_seed(generator) for _ in range(len(inputs))]
        windows = _WINDOWS[threat_model.norm](inputs, threat_model)
        best = BestPoints(inputs, labels, loss=self.loss, targeted=targeted)
        for restart in range(self.restarts):
            run = BestPoints(inputs, labels, loss=self.loss, targeted=targeted)
            draws = _Draws(seeds, restart)
            for query in range(self.queries):
                known = run if query else best
                closed = known.solved if self.stop_early else torch.zeros_like(known.solved)
                if bool(closed.all()):
                    break
                tried = self._try(windows, query, draws, run.points, closed)
                points = torch.where(closed[:, None, None, None], known.points, tried)
                with torch.no_grad():
                    # A copy, as a module may work on its input in place.
                    logits = target.module(points.clone())
                loss = run.update(points, logits, closed=closed if query else None)
                if watch is not None:
                    number = restart * self.queries + query
                    watch(Step(number=number, total=self.restarts * self.queries, points=points, loss=loss))
            best.merge(run)
        return best.points

    def _try(self, windows: Windows, query: int, draws: _Draws, points: Tensor, closed: Tensor) -> Tensor:
        if query == 0:
            return windows.first(draws.first(windows.first_numbers, closed))
        side = windows.side(window_share(query - 1, queries=self.queries, p=self.p))
        return windows.change(points, side, draws.of(query, windows.numbers, closed))


class _Draws:
    """Numbers uniform in [0, 1), from a stream for each row and run; closed rows draw none and get zeros."""

    def __init__(self, seeds: list[int], restart: int) -> None:
        self._seeds, self._restart = seeds, restart
        self._block = torch.empty(0)

    def first(self, numbers: int, closed: Tensor) -> Tensor:
        """Numbers ``(N, numbers)`` of the first point."""
        return self._draw("first", 0, (numbers,), closed)

    def of(self, query: int, numbers: int, closed: Tensor) -> Tensor:
        """Numbers ``(N, numbers)`` of a query, from 1 on in order."""
        place = (query - 1) % _BLOCK
        if place == 0:
            self._block = self._draw("windows", query, (_BLOCK, numbers), closed)
        return self._block[:, place]

    def _draw(self, purpose: str, query: int, shape: tuple[int, ...], closed: Tensor) -> Tensor:
        drawn = torch.zeros(len(self._seeds), *shape, dtype=torch.float64)
        for row in (~closed).nonzero().flatten().tolist():
            drawn[row].uniform_(generator=stream(self._seeds[row], purpose, self._restart, query))
        return drawn
