"""Random search: points drawn in the ball until one is adversarial. What it finds needs no attack to be found."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.best import BestPoints
from robust_ext.attacks._common.rows import check_batch, over_rows, query
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.cost import Cost
from robust_ext.core.random import derive_seed
from robust_ext.core.sampling import evenly_mixed
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel

# Rounds whose points are drawn together.
_BLOCK = 10


@settings_class
class RandomSearch(NativeAttack):
    """Draws points in the ball and keeps the first adversarial one, or else the one with the highest margin.

    Points uniform in the ball and points as far out as it allows take turns. Every round sends the whole batch, in row
    order, through the target once; a row that is solved sends the point that solved it. The search ends when all rows
    are solved.

    Each row draws one seed from the generator, in order, and all its points from that seed: they do not depend on what
    the other rows are, nor on how many come after it. More ``points`` go on where fewer stop.

    Source: the random attack of Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations"
    (2022), section 3.1, as an attack of its own.

    Example:
        >>> RandomSearch(points=40)
        RandomSearch(points=40, outer='corners', outer_share=0.5)
    """

    name = "RandomSearch"
    ranks = True
    traits = AttackTraits(batching="full", gradients=False, failure="best", seeds="generator")

    points: int = setting(
        default=400, help="Most points drawn for a row, at least 1.", minimum=1, trial=40, art="max_iter"
    )
    outer: str = setting(
        default="corners",
        help='Where every other point is drawn: ``"corners"`` (:meth:`ThreatModel.sample_corners`) or ``"surface"`` '
        "(:meth:`ThreatModel.sample_surface`).",
        choices=("corners", "surface"),
    )
    outer_share: float = setting(default=0.5, help="Share of these among the points, in [0, 1].", minimum=0, maximum=1)

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        return Cost(self.points)

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`."""
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        seeds = [draw_seed(batch.generator) for _ in range(len(inputs))]
        best = BestPoints(inputs, labels, loss="margin", goal=batch.goal)
        block: Tensor = inputs.new_empty(0)
        for number in range(self.points):
            if bool(best.solved.all()):
                break
            if number % _BLOCK == 0:
                block = self._draw(inputs, seeds, best.solved, batch.threat_model, start=number)
            drawn = torch.where(over_rows(best.solved, inputs), best.points, block[:, number % _BLOCK])
            margin = best.update(drawn, query(batch.target, drawn), closed=best.solved)
            batch.show(number, self.points, drawn, margin)
        return best.points

    def _draw(
        self, inputs: Tensor, seeds: list[int], solved: Tensor, threat_model: ThreatModel, *, start: int
    ) -> Tensor:
        """Points ``(N, _BLOCK, ...)`` of the rounds from ``start`` on, around unsolved rows; zeros elsewhere."""
        rows = (~solved).nonzero().squeeze(1)
        some, ids = inputs[rows], rows.tolist()
        inner_keys, outer_keys = ([derive_seed(seeds[row], kind) for row in ids] for kind in ("inner", self.outer))
        sample_outer = threat_model.sample_corners if self.outer == "corners" else threat_model.sample_surface
        block = inputs.new_zeros(len(inputs), _BLOCK, *inputs.shape[1:])
        block[rows] = evenly_mixed(
            self.outer_share,
            _BLOCK,
            start,
            lambda count, first: sample_outer(some, count, key=outer_keys, start=first),
            lambda count, first: threat_model.sample_inner(some, count, key=inner_keys, start=first),
        )
        return block
