"""RayS: the nearest decision boundary along rays to the corners of a cube, from predicted labels alone.

Source: Chen and Gu, "RayS: A Ray Searching Method for Hard-label Adversarial Attack" (2020), algorithms 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import broken, check_batch
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, Step, Watch
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
        help="How near to the boundary a binary search ends: Euclidean length along the ray as in the paper, for "
        "bounds one apart. In linf it is ``tolerance`` divided by the square root of the number of values.",
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
        if batch.targeted:
            raise AttackRefusedError(
                f"{self.name}: looks for any other class and cannot aim at one; do not aim, or choose another attack"
            )
        found = self.run(batch.target, batch.inputs, batch.labels, threat_model=batch.threat_model, watch=batch.watch)
        return found.candidates

    def run(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        watch: Watch | None = None,
    ) -> RaysResult:
        """Return candidates and more, on the inputs' device; arguments are those of :meth:`NativeAttack.search`.

        Of the threat model the bounds count, and the epsilon within which rows may stop; its norm is taken for linf.
        ``watch`` is called after each query; the loss is minus the linf distance known by then, -inf where none is.
        """
        inputs, labels = check_batch(target, inputs, labels, threat_model)
        state = _RaySearch(inputs.flatten(1), bounds=threat_model.bounds, tolerance=self.tolerance)
        queries = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        for number in range(self.queries):
            if not bool(state.open.any()):
                break
            queries += state.open
            points = state.points().view(inputs.shape)
            state.update(self._misclassified(target, points, labels, state.open))
            if self.stop:
                state.close(state.found & (state.radius <= threat_model.epsilon))
            if watch is not None:
                loss = -state.radius.where(state.found, torch.inf).to(inputs.dtype)
                watch(Step(number=number, total=self.queries, points=points, loss=loss))
        candidates = torch.where(state.found[:, None], state.best(), inputs.flatten(1)).view(inputs.shape)
        distances = (candidates.double() - inputs.double()).flatten(1).abs().amax(1) if len(inputs) else state.radius
        return RaysResult(
            candidates=candidates,
            found=state.found,
            distances=distances.where(state.found, torch.inf),
            queries=queries,
        )

    def _misclassified(self, target: Target, points: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """Return a mask of ``rows`` with another label or none, bool ``(N,)``; other rows may be queried too."""
        queried = torch.ones_like(rows) if self.keep_rows else rows
        with torch.no_grad():
            # Indexing copies, as a module may work on its input in place.
            logits = target.module(points[queried])
        wrong = (logits.argmax(1) != labels[queried]) | broken(logits)
        return torch.zeros_like(rows).masked_scatter_(queried, wrong) & rows


class _RaySearch:
    """The searches of a batch, each row at a place of its own.

    A row checks whether the best ray with a block of signs turned is misclassified at the best distance, and where it
    is, a binary search finds where on that ray the boundary lies. Blocks follow algorithm 3 of Chen and Gu (2020): the
    vector is cut into 1, 2, 4, ... parts, the last cut into single values being repeated. ``open`` are rows that are
    not finished and ``found`` those with a misclassified point, bool ``(N,)``; ``radius``, float64 ``(N,)``, is how far
    on the best ray it is, the width of the bounds without one.
    """

    def __init__(self, inputs: Tensor, *, bounds: tuple[float, float], tolerance: float) -> None:
        rows, values = inputs.shape
        width = bounds[1] - bounds[0]
        self._inputs, self._bounds, self._values = inputs, bounds, values
        # Halving intervals that float32 cannot tell apart would query the same point again and again.
        resolution = torch.finfo(inputs.dtype).eps * max(abs(bounds[0]), abs(bounds[1]))
        self._tolerance = max(tolerance * width / max(values, 1) ** 0.5, resolution)
        self._columns = torch.arange(values, device=inputs.device)
        self._last_level = max(values - 1, 0).bit_length()
        self._signs = torch.ones_like(inputs)
        self.found, self.open = inputs.new_zeros(rows, dtype=torch.bool), inputs.new_ones(rows, dtype=torch.bool)
        self.radius = inputs.new_full((rows,), width, dtype=torch.float64)
        # The first query is the input itself, the second the ray with no sign turned.
        self._at_input = self.open.clone()
        self._searching = torch.zeros_like(self.found)
        self._clear = inputs.new_zeros(rows, dtype=torch.float64)
        self._level, self._block, self._start, self._end = inputs.new_zeros(4, rows, dtype=torch.int64)
        self._changed, self._single = torch.zeros_like(self.found), torch.zeros_like(self.found)

    def points(self) -> Tensor:
        """The points to query, ``(N, D)``; of a finished row the best one."""
        queried = self._queried_radius().where(self.open, self.radius * self.found)
        turned = self._turned() & self.open[:, None]
        return self._on_ray(torch.where(turned, -self._signs, self._signs), queried)

    def best(self) -> Tensor:
        """The nearest misclassified points on the best rays, ``(N, D)``; on the farthest of all where none is known."""
        return self._on_ray(self._signs, self.radius)

    def close(self, rows: Tensor) -> None:
        """Finish some rows, bool ``(N,)``."""
        self.open = self.open & ~rows

    def update(self, wrong: Tensor) -> None:
        """Take in whether the points of open rows were misclassified, bool ``(N,)``, and choose the next ones."""
        hit, miss = wrong & self.open, ~wrong & self.open
        solved = hit & self._at_input
        self.radius = torch.where(solved, 0.0, self.radius)
        self.found = self.found | solved
        self.close(solved)
        queried = self._queried_radius()
        first = self._at_input & miss
        # A ray is taken over where it has a nearer point than the best one, or the first point of all.
        better = hit & ~solved & (self._searching | ~self.found)
        self._signs = torch.where(self._turned() & better[:, None], -self._signs, self._signs)
        self._start, self._end = self._start.where(~better, 0), self._end.where(~better, 0)
        self.radius = torch.where(better, queried, self.radius)
        self.found, self._changed = self.found | better, self._changed | better
        self._clear = torch.where(self._searching, torch.where(miss, queried, self._clear), 0.0)
        wide = self.radius - self._clear > self._tolerance
        self._searching = self.open & (hit | self._searching) & wide
        self._at_input = torch.zeros_like(first)
        self._advance(self.open & ~self._searching & ~first)

    def _advance(self, rows: Tensor) -> None:
        """Give rows their next block; finish those whose last pass over single values changed nothing."""
        begins = rows & (self._block == 0)
        self.close(begins & self._single & ~self._changed)
        self._changed = self._changed & ~begins
        self._single = torch.where(begins, self._level == self._last_level, self._single)
        size = (torch.full_like(self._level, self._values - 1) >> self._level) + 1
        start = self._block * size
        end = (start + size).clamp_max(self._values)
        self._start, self._end = torch.where(rows, start, self._start), torch.where(rows, end, self._end)
        passed = end == self._values
        following = torch.where(passed, self._level + 1, self._level).clamp_max(self._last_level)
        self._level = torch.where(rows, following, self._level)
        self._block = torch.where(rows, torch.where(passed, 0, self._block + 1), self._block)

    def _queried_radius(self) -> Tensor:
        """Return the radii of the points to query on their rays, ``(N,)``."""
        queried = torch.where(self._searching, (self._clear + self.radius) / 2, self.radius)
        return queried.where(~self._at_input, 0.0)

    def _turned(self) -> Tensor:
        """Return a mask of the signs that the queried rays have turned, bool ``(N, D)``."""
        turned: Tensor = (self._columns >= self._start[:, None]) & (self._columns < self._end[:, None])
        return turned

    def _on_ray(self, signs: Tensor, radius: Tensor) -> Tensor:
        points: Tensor = self._inputs + radius.to(signs.dtype)[:, None] * signs
        return points.clamp(*self._bounds)
