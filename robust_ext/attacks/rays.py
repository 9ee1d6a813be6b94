"""RayS: the nearest decision boundary along rays to the corners of a cube, from predicted labels alone.

Source: Chen and Gu, "RayS: A Ray Searching Method for Hard-label Adversarial Attack" (2020), algorithms 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import NativeAttack, Step, Watch
from robust_ext.attacks.rays_search import RaySearch
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer, check_labels, check_number


@dataclass(frozen=True, kw_only=True)
class RaysSettings:
    """Settings of RayS.

    Args:
        queries: Most points asked about for each row, the input among them, at least 1.
        tolerance: How near to the boundary a binary search ends, above 0: Euclidean length along the ray as in the
            paper, for bounds one apart. In linf it is ``tolerance`` divided by the square root of the number of values.
        stop: Whether a row is finished once a misclassified point within epsilon is found. If not, it is searched on
            for a nearer one until its queries are used up.
        keep_rows: Whether every query sends the whole batch in row order, finished rows as they are. If not, finished
            rows are left out, which is cheaper, but changes what defenses that look at the batch see.
    """

    queries: int = 10_000
    tolerance: float = 1e-3
    stop: bool = True
    keep_rows: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", check_integer("queries", self.queries, minimum=1))
        tolerance = check_number("tolerance", self.tolerance, minimum=0, open_minimum=True)
        object.__setattr__(self, "tolerance", tolerance)
        for name in ("stop", "keep_rows"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(name, getattr(self, name), "True or False")


@dataclass(frozen=True, kw_only=True)
class RaysResult:
    """What RayS found.

    Args:
        candidates: The misclassified point on the best ray of each row, on the boundary up to the tolerance, ``(N,
            ...)``; the input where none was found, or where it is misclassified itself.
        found: Whether the candidate was misclassified when it was asked about, bool ``(N,)``.
        distances: From input to candidate in linf, float64 ``(N,)``; inf where nothing was found.
        queries: Points asked about for each row, int64 ``(N,)``; what finished rows are sent again for does not count.
    """

    candidates: Tensor
    found: Tensor
    distances: Tensor
    queries: Tensor


def rays(
    target: Target,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    settings: RaysSettings | None = None,
    watch: Watch | None = None,
) -> RaysResult:
    """Search for each row on its own, all in one batch; every query asks each unfinished row one thing of its own.

    Of an answer the position of its largest logit is used, and nothing else; an answer that holds NaN counts for no
    label. The first query is the input. The paper starts by turning all signs of the ray to the upper corner; here
    that ray is asked about too. The points of a row depend on no other row.

    Args:
        target: What may be queried; asked without gradients.
        inputs: Floating point ``(N, ...)`` in the threat model's bounds, taken as float32; not changed.
        labels: int64 ``(N,)``: the true classes.
        threat_model: The bounds, and the epsilon within which rows may stop; its norm is taken for linf.
        settings: The defaults when left out.
        watch: Called after each query; the loss is minus the linf distance known by then, -inf where none is.

    Returns:
        Candidates and more, on the inputs' device; tensors of no rows for no inputs.

    Raises:
        InvalidArgumentError: Inputs or labels are not as described.
    """
    chosen = RaysSettings() if settings is None else settings
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
    state = RaySearch(inputs.flatten(1), bounds=threat_model.bounds, tolerance=chosen.tolerance)
    queries = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    for number in range(chosen.queries):
        if not bool(state.open.any()):
            break
        queries += state.open
        points = state.points().view(inputs.shape)
        state.update(_misclassified(target, points, labels, state.open, keep_rows=chosen.keep_rows))
        if chosen.stop:
            state.close(state.found & (state.radius <= threat_model.epsilon))
        if watch is not None:
            loss = -state.radius.where(state.found, torch.inf).to(inputs.dtype)
            watch(Step(number=number, total=chosen.queries, points=points, loss=loss))
    candidates = torch.where(state.found[:, None], state.best(), inputs.flatten(1)).view(inputs.shape)
    distances = (candidates.double() - inputs.double()).flatten(1).abs().amax(1) if len(inputs) else state.radius
    return RaysResult(
        candidates=candidates,
        found=state.found,
        distances=distances.where(state.found, torch.inf),
        queries=queries,
    )


class RayS(NativeAttack):
    """Looks for the nearest misclassified point in linf by signs alone, and sees nothing but predicted labels.

    A ray leaves the input in the direction of a vector of signs, clipped to the bounds. Blocks of signs are turned, the
    whole vector first, then halves, quarters and so on down to single values. A turn that is still misclassified at the
    best distance known is followed by a binary search for the boundary. The search of a row ends when its queries are
    used up, or when a pass over all single values has changed nothing. There is no randomness. See :func:`rays`, which
    says more about what it found, and :class:`RaysSettings`.

    The candidate lies on the boundary, wherever that is: epsilon decides no more than when a row may stop. On targets
    that answer at random it may be classified otherwise when asked again.

    Args:
        queries: Most points asked about for each row, the input among them, at least 1; the paper's is 10,000.
        tolerance: How near to the boundary a binary search ends, above 0.
        stop: Whether a row is finished once a misclassified point within epsilon is found.
        keep_rows: Whether every query sends the whole batch in row order.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> RayS(queries=500).description
        'RayS(queries=500, tolerance=0.001, stop=True, keep_rows=True)'
    """

    name = "RayS"

    def __init__(
        self, *, queries: int = 10_000, tolerance: float = 1e-3, stop: bool = True, keep_rows: bool = True
    ) -> None:
        self.settings = RaysSettings(queries=queries, tolerance=tolerance, stop=stop, keep_rows=keep_rows)
        self.traits = AttackTraits(
            batching="full" if keep_rows else "any",
            gradients=False,
            minimum_norm=True,
            norms=("linf",),
            leaves_ball=True,
            failure="input",
            seeds="none",
        )

    @property
    def description(self) -> str:
        """All settings."""
        names = ("queries", "tolerance", "stop", "keep_rows")
        return "RayS(" + ", ".join(f"{name}={getattr(self.settings, name)!r}" for name in names) + ")"

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
        """Return the candidates of :func:`rays`, see :meth:`NativeAttack.search`.

        Raises:
            AttackRefusedError: It is targeted.
            InvalidArgumentError: Inputs or labels are not as described.
        """
        if targeted:
            raise AttackRefusedError(
                f"{self.name}: looks for any other class and cannot aim at one; do not aim, or choose another attack"
            )
        found = rays(target, inputs, labels, threat_model=threat_model, settings=self.settings, watch=watch)
        return found.candidates


def _misclassified(target: Target, points: Tensor, labels: Tensor, rows: Tensor, *, keep_rows: bool) -> Tensor:
    """Whether the target gives ``rows`` another label, bool ``(N,)``; other rows may be asked about too."""
    asked = torch.ones_like(rows) if keep_rows else rows
    with torch.no_grad():
        # A copy, as a module may work on its input in place.
        logits = target.module(points[asked])
    wrong = (logits.argmax(1) != labels[asked]) & ~logits.isnan().any(1)
    return torch.zeros_like(rows).masked_scatter_(asked, wrong) & rows
