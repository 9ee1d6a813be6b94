"""Any attack within limits of single entries: on a view of the model that has one budget and one pair of bounds.

Whatever the attack knows of (one norm, epsilon and bounds) holds in the view exactly, so that none of them, of any
library, has to know of masks, budgets or bounds of entries. In linf, the box around an input that its entries may reach
is stretched to a cube around 0, where attacks begin. Otherwise, and for attacks that look for the smallest
perturbation, distances are those of the threat model: entries are divided by their relative budgets, fixed ones put
back, and others clipped to their bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.valid_values import repair
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import AttackRefusedError, ModelError, warn
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.binarized import cell_radii
from robust_ext.models.wrapping import Wrapped

Search = Callable[[Target, Tensor, Tensor, ThreatModel], Tensor]


class View(Wrapped):
    """A module on points of another space, for the rows ``inputs`` ``(N, ...)`` in order.

    Args:
        module: Of inputs.
        inputs: The rows.
        threat_model: With limits of entries.
        boxes: Whether the box around each row is stretched to a cube, see the module's text.
        nearest: Whether a row is recognised by the input that it is nearest to, in batches of another size.
    """

    def __init__(
        self, module: nn.Module, inputs: Tensor, threat_model: ThreatModel, *, boxes: bool, nearest: bool = False
    ) -> None:
        super().__init__(module)
        self._boxes, self._nearest = boxes, nearest
        exact, epsilon = inputs.double(), threat_model.epsilon
        low, high = threat_model.box(exact, ball=boxes)
        scale = threat_model.scale(exact)
        free = torch.ones_like(scale) if threat_model.mask is None else threat_model.mask.spread(exact).double()
        self._own = boxes or threat_model.mask is not None
        if boxes:
            # Of an entry without any room, the centre is its value.
            self._centre, self._slope = (low + high) / 2, (high - low) / (2 * epsilon)
            self._ends = low, high
            # As wide as the inputs' bounds, of which some attacks take steps.
            half = max(threat_model.width / 2, epsilon)
            self.threat_model = ThreatModel(norm="linf", epsilon=epsilon, bounds=(-half, half))
        else:
            self._centre, self._slope = exact * (1 - free), scale * free
            self._ends = low, high
            ends = replace(threat_model, mask=None, kinds=None, levels=None).box(exact[:1])
            least, most = (float(pick(end / scale)) for pick, end in zip((torch.min, torch.max), ends, strict=True))
            self.threat_model = ThreatModel(norm=threat_model.norm, epsilon=epsilon, bounds=(least, most))
        self._scale, self._inputs = scale, exact
        self._clips = not boxes and (threat_model.limits is not None or threat_model.weights is not None)
        # An attack begins at the middle of a box, around which the cube is a ball.
        self.points = torch.zeros_like(inputs) if boxes else self.enter(inputs)
        # Kept in the type that is computed with; what leaves is exact.
        self._parts = {
            name: part.to(inputs.dtype)
            for name, part in {"centre": self._centre, "slope": self._slope, "low": low, "high": high}.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """The module's output at the inputs that points ``(M, ...)`` stand for."""
        rows = self._rows(x)
        parts = self._parts if rows is None else {name: _pick(part, rows) for name, part in self._parts.items()}
        moved = parts["centre"] + parts["slope"] * x
        if self._clips:
            moved = torch.minimum(torch.maximum(moved, parts["low"]), parts["high"])
        out: Tensor = self.module(moved)
        return out

    def _rows(self, x: Tensor) -> Tensor | None:
        count = len(self._inputs)
        if len(x) == count or count == 1 or not self._own:
            return None
        if self._nearest:
            order = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[self.threat_model.norm]
            return torch.cdist(x.detach().flatten(1), self.points.flatten(1), p=order).argmin(1)
        raise ModelError(
            f"limits of entries: got a batch of {len(x)} rows where {count} are attacked; an attack that queries other "
            "batches states so in its traits (batching)"
        )

    def enter(self, points: Tensor) -> Tensor:
        """Inputs ``(N, ...)``, or several of each row ``(N, S, ...)``, as points of the view."""
        several = points.dim() > self._inputs.dim()
        centre, slope, scale = (part[:, None] if several else part for part in (self._centre, self._slope, self._scale))
        exact = points.double()
        if self._boxes:
            found = torch.where(slope > 0, (exact - centre) / slope.where(slope > 0, 1.0), 0.0)
        else:
            found = exact / scale
        return found.to(points.dtype).clamp_(*self.threat_model.bounds)

    def leave(self, points: Tensor) -> Tensor:
        """Points of the view as inputs ``(N, ...)``, in the limits; fixed entries are exactly those of the inputs."""
        moved = self._centre + self._slope * points.double()
        moved = torch.minimum(torch.maximum(moved, self._ends[0]), self._ends[1])
        same = self._slope == 0
        if not self._boxes:
            same = same | (points == self.points.to(points))
        return torch.where(same, self._inputs, moved).to(self._inputs.dtype).to(points.dtype)


def _pick(part: Tensor, rows: Tensor) -> Tensor:
    return part if len(part) == 1 else part[rows]


def search_limited(
    search: Search,
    attack: Attack,
    target: Target,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    targeted: bool = False,
) -> Tensor:
    """Run an attack within limits of entries; candidates ``(N, ...)`` are valid inputs in the ball.

    Args:
        search: Runs it on a target and rows, for a threat model without such limits.
        attack: Whose traits decide which rows go together: in order where it queries whole batches, and otherwise one
            by one, unless a row is recognised by where it lies.
        target: See :meth:`Attack.search`; as ``inputs`` and ``labels``.
        inputs: See there.
        labels: See there.
        threat_model: With limits of entries.
        targeted: Whether labels are aims.

    Raises:
        AttackRefusedError: The target has a detector that the attack queries by itself.
    """
    if threat_model.restricted:
        if target.defended is not None and attack.traits.detector:
            raise AttackRefusedError(
                f"{attack.name}: attacks a detector together with the classifier, for which limits of single entries "
                "are not made; use an attack on the classifier, or one epsilon and one pair of bounds without a mask"
            )
        found = _in_view(search, attack, target, inputs, labels, threat_model)
    else:
        found = search(target, inputs, labels, threat_model.scalar)
    if threat_model.discrete and found.shape == inputs.shape:
        found = repair(target, found.to(inputs), inputs, labels, threat_model=threat_model, targeted=targeted)
    return found


def _in_view(
    search: Search, attack: Attack, target: Target, inputs: Tensor, labels: Tensor, threat_model: ThreatModel
) -> Tensor:
    """Return candidates ``(N, ...)``, with entries that are continuous still."""
    traits, count = attack.traits, len(inputs)
    boxes = threat_model.norm == "linf" and not traits.minimum_norm and not _masked_alone(threat_model)
    own = boxes or threat_model.mask is not None
    nearest = own and not boxes and traits.batching == "any" and not traits.leaves_ball and count > 1
    if nearest:
        reach = 1.001 * threat_model.epsilon + threat_model.tolerance(inputs[:1].numel())
        scaled = inputs / threat_model.scale(inputs).to(inputs)
        nearest = bool((cell_radii(scaled.flatten(1), threat_model.norm) > reach).all())
    together = traits.batching != "single" and (not own or traits.batching == "full" or nearest)
    size = max(count, 1) if together else 1
    parts = [inputs[:0]]
    for rows in torch.split(torch.arange(count), size):
        view = View(target.module, inputs[rows], threat_model, boxes=boxes, nearest=nearest)
        points = {
            name: None if one is None else view.enter(one[rows.to(one.device)])
            for name, one in (("starting_points", target.starting_points), ("references", target.references))
        }
        shown = replace(target, module=view, bounds=view.threat_model.bounds, defended=None, **points)  # type: ignore[arg-type]
        found = search(shown, view.points.clone(), labels[rows.to(labels.device)], view.threat_model)
        if not isinstance(found, Tensor) or found.shape != view.points.shape:
            return found  # The judge reports its fault.
        parts.append(view.leave(found.detach().to(inputs.device)))
    return torch.cat(parts)


def _masked_alone(threat_model: ThreatModel) -> bool:
    """Return whether all entries that may change have the same limits."""
    return threat_model.weights is None and threat_model.limits is None


def search_within(attack: Attack, threat_model: ThreatModel) -> Callable[..., Tensor]:
    """Return the attack's ``search`` as it runs for a threat model: on a view where single entries have limits.

    Arguments and result are those of :meth:`Attack.search`.
    """
    if threat_model.plain or attack.limits_entries:
        return attack.search
    return partial(_search_view, attack)


def _search_view(
    attack: Attack, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, **more: Any
) -> Tensor:
    warn(
        f"{attack.name}: knows one epsilon and one pair of bounds, so it ran "
        + ("on a model that maps these to the limits of each entry" * threat_model.restricted)
        + (" and " * (threat_model.restricted and threat_model.discrete))
        + ("without the grid of values, to which its candidates were rounded" * threat_model.discrete)
        + "; every candidate is verified"
    )

    def search(target: Target, inputs: Tensor, labels: Tensor, scalar: ThreatModel) -> Tensor:
        return attack.search(target, inputs, labels, threat_model=scalar, **more)

    return search_limited(search, attack, target, inputs, labels, threat_model=threat_model)
