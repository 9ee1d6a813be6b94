"""RayS: the nearest decision boundary along rays to the corners of a cube, from predicted labels alone.

Source: Chen and Gu, "RayS: A Ray Searching Method for Hard-label Adversarial Attack" (2020), algorithms 2 and 3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from robust_ext.attacks._common.rows import check_batch, hits
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, SearchOptions
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class RaysResult:
    """The candidates that RayS found.

    Args:
        candidates: The misclassified point on the best ray of each row, on the boundary up to the tolerance, ``(N,
            ...)``; the input where none was found, or where it is misclassified itself.
        found: Whether the candidate was misclassified when it was queried, bool ``(N,)``.
        distances: From input to candidate in linf, float64 ``(N,)``; inf where nothing was found.
        queries: Points queried for each row, int64 ``(N,)``; what finished rows are sent again for does not count.
    """

    candidates: Tensor
    found: Tensor
    distances: Tensor
    queries: Tensor


@settings_class
class RayS(NativeAttack):
    """Looks for the nearest misclassified point in linf by signs alone, and sees nothing but predicted labels.

    A ray leaves the input in the direction of a vector of signs, clipped to the bounds. Blocks of signs are turned, the
    whole vector first, then halves, quarters and so on down to single values. A turn that is still misclassified at the
    best distance known is followed by a binary search for the boundary. The search of a row ends when its queries are
    used up, or when a pass over all single values has changed nothing. There is no randomness.

    Every query sends one point for each unfinished row, and each row is searched on its own: its points depend on no
    other row. Of the logits the position of the largest is used, and nothing else; logits with NaN count for no label.
    The first query is the input. The paper starts by turning all signs of the ray to the upper corner; here that ray is
    queried too.

    The candidate lies on the boundary, wherever that is: epsilon decides no more than when a row may stop. On targets
    whose predictions are random it may be classified otherwise the next time. :meth:`run` returns more than candidates.

    Example:
        >>> RayS(queries=500)
        RayS(queries=500, tolerance=0.001, stop=True, keep_rows=True)
    """

    name = "RayS"
    ranks = True
    aims = False
    stops_at_epsilon = True
    traits = AttackTraits(
        batching="full",
        gradients=False,
        minimum_norm=True,
        norms=("linf",),
        leaves_ball=True,
        failure="input",
        seeds="none",
    )

    queries: int = setting(
        default=10_000,
        help="Most points queried for each row, the input among them; the default is the paper's.",
        minimum=1,
        trial=100,
        art="max_iter",
    )
    tolerance: float = setting(
        default=1e-3,
        help="Distance to the boundary at which a binary search ends: Euclidean length along the ray as in the paper, "
        "for bounds one apart. In linf it is ``tolerance`` divided by the square root of the number of values.",
        above=0,
    )
    stop: bool = setting(
        default=True,
        help="Whether a row is finished once a misclassified point within epsilon is found. If not, it is searched on "
        "for a nearer one until its queries are used up.",
        foolbox=None,
    )
    keep_rows: bool = setting(
        default=True,
        help="Whether every query sends the whole batch in row order, finished rows as they are. If not, finished "
        "rows are left out, which is cheaper, but changes what defenses that look at the batch see.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("traits", replace(type(self).traits, batching="full" if self.keep_rows else "any"))

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        return Cost(self.queries)

    def candidates(self, batch: Batch) -> Tensor:
        """The candidates of :meth:`run`; an AttackRefusedError where it is targeted."""
        return self._run(batch).candidates

    def run(self, target: Target, inputs: Tensor, labels: Tensor, **options: Unpack[SearchOptions]) -> RaysResult:
        """Return candidates and more, on the inputs' device; arguments are those of :meth:`NativeAttack.search`.

        Of the threat model the bounds count, and the epsilon within which rows may stop; its norm is taken for linf.
        ``watch`` is called after each query; the loss is minus the linf distance known by then, -inf where none is.
        """
        return self._run(Batch(target, inputs, labels, **options))

    def _run(self, batch: Batch) -> RaysResult:
        if batch.targeted:
            raise AttackRefusedError(
                f"{self.name}: looks for any other class and cannot aim at one; do not aim, or choose another attack"
            )
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        flat, (low, high) = inputs.flatten(1), batch.threat_model.bounds
        # Halving intervals that float32 cannot tell apart would query the same point again and again.
        resolution = torch.finfo(flat.dtype).eps * max(abs(low), abs(high))
        tolerance = max(self.tolerance * (high - low) / max(flat.shape[1], 1) ** 0.5, resolution)
        rows = [_Row(flat.shape[1], high - low, tolerance) for _ in flat]
        signs, columns = torch.ones_like(flat), torch.arange(flat.shape[1], device=flat.device)
        for number in range(self.queries):
            # Unless the batch keeps its rows, finished ones are left out.
            open_rows = [row.open for row in rows]
            if not any(open_rows):
                break
            sent = torch.tensor([self.keep_rows or one for one in open_rows], device=flat.device)
            blocks = torch.tensor([row.block for row in rows], device=flat.device)
            turned = (columns >= blocks[:, :1]) & (columns < blocks[:, 1:])
            points = _on_rays(flat, torch.where(turned, -signs, signs), [row.queried for row in rows], (low, high))
            points = points.view(inputs.shape)
            with torch.no_grad():
                # Indexing copies, as a module may work on its input in place.
                wrong = hits(batch.target.module(points[sent]), labels[sent], batch.goal)
            for row, hit in zip(rows, torch.zeros_like(sent).masked_scatter_(sent, wrong).tolist(), strict=True):
                row.answer(hit)
                if self.stop and row.found and row.radius <= batch.threat_model.epsilon:
                    row.finish()
            taken = torch.tensor([row.taken for row in rows], device=flat.device)
            signs = torch.where(turned & taken[:, None], -signs, signs)
            batch.show(number, self.queries, points, -inputs.new_tensor([row.distance for row in rows]))
        found = torch.tensor([row.found for row in rows], dtype=torch.bool, device=flat.device)
        best = _on_rays(flat, signs, [row.radius * row.found for row in rows], (low, high))
        candidates = torch.where(found[:, None], best, flat)
        distances = (candidates.double() - flat.double()).abs().amax(1).where(found, torch.inf)
        queries = torch.tensor([row.queries for row in rows], dtype=torch.int64, device=flat.device)
        return RaysResult(candidates=candidates.view(inputs.shape), found=found, distances=distances, queries=queries)


def _on_rays(inputs: Tensor, signs: Tensor, radius: list[float], bounds: tuple[float, float]) -> Tensor:
    points: Tensor = inputs + torch.tensor(radius, device=signs.device).to(signs.dtype)[:, None] * signs
    return points.clamp(*bounds)


class _Row:
    """The search of one row: algorithm 3 of Chen and Gu (2020).

    It checks whether the best ray with a block of signs turned is misclassified at the best distance, and where it is,
    a binary search finds where on that ray the boundary lies. The vector is cut into 1, 2, 4, ... blocks, the last cut
    into single values being repeated. The best point lies at ``radius`` on the best ray, once one is ``found``. While
    the row is ``open``, the point at ``queried`` on that ray with the signs of ``block`` turned is to be queried next;
    ``taken`` is whether the last turn was taken over.
    """

    def __init__(self, values: int, width: float, tolerance: float) -> None:
        self.radius, self.found, self.open, self.taken = width, False, True, False
        self.block, self.queried, self.queries = (0, 0), 0.0, 0
        self._values, self._tolerance = values, tolerance
        self._search = self._queries()
        next(self._search)

    def answer(self, wrong: bool) -> None:
        """Take in whether the queried point was misclassified, and choose the next one."""
        self.taken = False
        self.queries += self.open
        with contextlib.suppress(StopIteration):
            if self.open:
                self._search.send(wrong)
                return
        self.finish()

    @property
    def distance(self) -> float:
        """The distance of the best known point, infinite without one."""
        return self.radius if self.found else math.inf

    def finish(self) -> None:
        """Stay at the best point."""
        self.open, self.block, self.queried = False, (0, 0), self.radius * self.found

    def _queries(self) -> Generator[None, bool, None]:
        # The first query is the input itself, the second the ray with no sign turned.
        if (yield):
            self.found, self.radius = True, 0.0
            return
        yield from self._try(0, 0)
        level, last = 0, max(self._values - 1, 0).bit_length()
        while True:
            size, changed = max(((self._values - 1) >> level) + 1, 1), False
            for start in range(0, self._values, size):
                changed |= yield from self._try(start, min(start + size, self._values))
            if level == last and not changed:
                return
            level = min(level + 1, last)

    def _try(self, start: int, end: int) -> Generator[None, bool, bool]:
        """Turn a block, and return whether a point on that ray was taken over."""
        self.block, self.queried = (start, end), self.radius
        if not (yield):
            return False
        clear, changed = 0.0, not self.found
        if changed:
            self._take()
        while self.radius - clear > self._tolerance:
            self.queried = (clear + self.radius) / 2
            if (yield):
                changed = True
                self._take()
            else:
                clear = self.queried
        return changed

    def _take(self) -> None:
        self.found, self.radius, self.block, self.taken = True, self.queried, (0, 0), True
