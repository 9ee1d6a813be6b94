"""Witnesses of non-finite logits: points that an attack queried in the ball, whatever it made of what came back.

Comparisons with NaN are false, so attacks step over the points at which a model breaks down, and return others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

_POWERS = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}


class Witness:
    """Keeps for each input ``(N, ...)`` the nearest queried point in bounds and ball whose logits are not finite."""

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        self._inputs, self._threat_model = inputs, threat_model
        self._points: Tensor | None = None
        self._distances = torch.full((len(inputs),), torch.inf, dtype=torch.float64, device=inputs.device)

    @property
    def points(self) -> Tensor | None:
        """The points ``(N, ...)``, NaN in rows without one; None where no row has one."""
        return self._points

    def note(self, points: object, logits: object) -> None:
        """Look at the logits ``(M, K)`` of queried points ``(M, ...)``, which costs next to nothing while finite."""
        if not isinstance(logits, Tensor) or not isinstance(points, Tensor):
            return
        # A mode or subclass that records what is computed must not record this.
        with torch._C.DisableTorchFunction():
            logits = logits.detach()
            try:
                # One number, that is not finite wherever one of them is not: less to compute than a mask.
                if isfinite(float(logits.sum())):
                    return
            except RuntimeError:
                # Inside vmap no value can be looked at.
                return
            broken = ~torch.isfinite(logits.flatten(1)).all(1)
            if bool(broken.any()):
                self._keep(points.detach(), broken)

    def _keep(self, points: Tensor, broken: Tensor) -> None:
        inputs, model = self._inputs, self._threat_model
        if points.shape[1:] != inputs.shape[1:] or len(broken) != len(points):
            return
        points = points.to(inputs)
        low, high = model.bounds
        valid = broken & ((points >= low) & (points <= high)).flatten(1).all(1)
        if not bool(valid.any()):
            return
        if len(points) == len(inputs):
            # A full batch comes in the order of the inputs.
            nearest, distances = points, model.distance(points, inputs).where(valid, torch.inf)
        else:
            points = points[valid]
            here, there, exact = points.flatten(1).double(), inputs.flatten(1).double(), "donot_use_mm_for_euclid_dist"
            distances, which = torch.cdist(here, there, p=_POWERS[model.norm], compute_mode=exact).min(0)
            nearest = points[which]
        limit = model.epsilon + model.tolerance(inputs[0].numel())
        closer = (distances <= limit) & (distances < self._distances)
        kept = torch.full_like(inputs, torch.nan) if self._points is None else self._points
        if bool(closer.any()):
            self._points = torch.where(closer.view(-1, *[1] * (inputs.dim() - 1)), nearest, kept)
            self._distances = torch.where(closer, distances, self._distances)


@contextmanager
def witness_queries(target: Target, inputs: Tensor, threat_model: ThreatModel) -> Iterator[Witness]:
    """Note what the target returns for the points that are queried meanwhile, by whatever attack.

    Where one raises after it has met such points, its AttackError mentions them.
    """
    witness = Witness(inputs, threat_model)
    modules = [target.module] if target.defended is None else [target.module, target.defended.classifier]
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.enter_context(module.register_forward_hook(_noting(witness)))
        try:
            yield witness
        except AttackError as error:
            if witness.points is None or type(error) is not AttackError:
                raise
            met = (
                "before that, the model returned NaN or infinite logits at points that it queried: fix the model first"
            )
            raise AttackError(f"{error}; {met}") from error


def _noting(witness: Witness) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def note(_module: nn.Module, args: tuple[object, ...], out: object) -> None:
        witness.note(args[0] if args else None, out)

    return note
