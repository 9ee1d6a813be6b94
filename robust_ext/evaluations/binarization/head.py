"""The part of a classifier that the test replaces, from features to logits: whether its gradients are of use.

A readout takes the place of the head, so an attack on planted problems never meets the head's own gradients. They are
measured on a few clean samples: against those of the operations that were recorded, and against differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals, stream
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.model_remedies import around
from robust_ext.evaluations.causes.secants import secants
from robust_ext.models.features import Observed

# Rows that are looked at, and the share of them that may have no gradient, as a unit may be dead.
_ROWS, _SHARE = 4, 0.1
# How far gradients of the model and of its recorded operations may differ: rounding, which depth makes larger.
_APART = 0.02
# Logits that follow features vary about as much as these: for linear ones the ratio is at least 1.
_SATURATED = 1e-3

_WORDS = {
    "cut_gradient": "no gradient comes back through it",
    "zero_gradient": "its gradient is zero, while its logits change with the features",
    "non_finite_gradient": "its gradient is not finite",
    "wrong_gradient": "its gradient does not predict how its logits change",
    "saturated_layer": "it is saturated, so that its gradient is far too small for what it returns",
}


OF_HEAD = tuple(_WORDS)
"""Codes of findings about gradients that are lost or wrong on their way."""


@dataclass(frozen=True)
class Head:
    """The part behind the features; ``fault`` is a code of a finding, or empty."""

    linear: bool = True
    fault: str = ""
    evidence: str = ""
    layer: str = ""

    @property
    def words(self) -> str:
        """The fault, as a clause."""
        return _WORDS[self.fault]

    def finding(self) -> Finding:
        """The finding about its fault."""
        return Finding(
            code=self.fault,
            cause=f"The head, which the test replaces, masks gradients: {self.words}.",
            evidence=(self.evidence,),
            layer=self.layer or None,
            remedies=around(None),
        )


def whole(features: nn.Module, readout: nn.Module) -> nn.Module:
    """The classifier that was split, from inputs to logits."""
    return features.model if isinstance(features, Observed) else nn.Sequential(features, readout).eval()


def probe_head(features: nn.Module, readout: nn.Module, inputs: Tensor) -> Head:
    """Measure the gradients of a classifier's head on the first of some inputs ``(n, ...)``.

    Args:
        features: The model's, from inputs.
        readout: From features to logits.
        inputs: On the model's device.
    """
    linear, some = isinstance(readout, (nn.Linear, nn.Identity)), inputs[:_ROWS]
    layer = str(getattr(features, "layer", ""))
    try:
        # Nothing that draws disturbs the caller's random numbers.
        with torch.inference_mode(False), torch.enable_grad():
            fault, evidence = "", ""
            if isinstance(features, Observed):
                fault, evidence = _against_recorded(features.model, nn.Sequential(features, readout), some.clone())
            if not fault and not linear:
                with torch.no_grad(), seeded_globals(0):
                    found = features(some.clone())
                fault, evidence = _alone(readout, found.detach().clone())
    except Exception:
        # Foreign code that runs in one way need not run in another.
        return Head(linear)
    return Head(linear, fault, evidence, layer)


def _against_recorded(network: nn.Module, parts: nn.Module, inputs: Tensor) -> tuple[str, str]:
    """Gradients at the inputs by the network's own head next to those by the operations that stand for it."""
    expected = _pulled(parts, inputs)
    if expected is None or not bool(expected.any()):
        # Nothing comes back through the features, as the test itself shows.
        return "", ""
    with torch.no_grad():
        own, recorded = _seeded(network, inputs), _seeded(parts, inputs)
    if not torch.allclose(own, recorded, rtol=_APART, atol=_APART * float(own.abs().max())):
        # A head that draws: the operations that stand for it drew other numbers.
        return "", ""
    got = _pulled(network, inputs)
    if got is None:
        return "cut_gradient", "The logits have no graph that leads to the features."
    rows = expected.isfinite().all(1) & expected.any(1)
    for code, bad in (("non_finite_gradient", ~got.isfinite().all(1)), ("zero_gradient", ~got.any(1))):
        if int((bad & rows).sum()) > _SHARE * len(rows):
            return code, f"{int((bad & rows).sum())} of {len(rows)} rows have such a gradient."
    away = (got - expected).norm(dim=1) / expected.norm(dim=1)
    apart = rows & (away > _APART)
    if int(apart.sum()) > _SHARE * len(rows):
        seen = f"The model's gradient and that of its operations are {float(away[apart].median()):.0%} apart."
        return "wrong_gradient", seen
    return "", ""


def _pulled(module: nn.Module, inputs: Tensor) -> Tensor | None:
    """Gradient of a sum of all logits with signs, float64 ``(n, D)``; None without one."""
    x = inputs.clone().requires_grad_()
    logits = _seeded(module, x.clone())
    if not logits.requires_grad:
        return None
    signs = torch.randint(0, 2, logits.shape[1:], generator=stream(0, "head")).mul(2).sub(1).to(logits)
    (gradient,) = torch.autograd.grad((logits * signs).sum(), x, allow_unused=True)
    return None if gradient is None else gradient.flatten(1).double()


def _seeded(module: nn.Module, points: Tensor) -> Tensor:
    """Return a module's output, with the same draws at every call."""
    with seeded_globals(0):
        returned: Tensor = module(points)
    return returned


def _alone(readout: nn.Module, features: Tensor) -> tuple[str, str]:
    """Find the fault of a head alone, at features ``(n, *F)``."""
    leaf = features.clone().requires_grad_()
    logits = _seeded(readout, leaf)
    one = secants(lambda points: [_seeded(readout, points[0])], [features], generator=stream(0, "head"))
    if not logits.requires_grad:
        return "cut_gradient", "The logits have no graph that leads to the features."
    if one.fault:
        seen = f"Gradient and differences are {one.small:.0%} apart over small steps, {one.large:.0%} over large ones."
        return one.fault, seen
    first, second = logits.topk(2, 1).values.unbind(1)
    lead = (first - second).sum()
    (gradient,) = torch.autograd.grad(lead, leaf, allow_unused=True, materialize_grads=True)
    rows = gradient.flatten(1).double()
    if bool((~rows.isfinite()).any()):
        return "non_finite_gradient", "The difference of the two largest logits has a gradient that is not finite."
    size = rows.norm(dim=1) * features.flatten(1).double().norm(dim=1)
    spread = (logits.amax(1) - logits.amin(1)).detach().double()
    flat = size <= _SATURATED * spread
    if int(flat.sum()) * 2 > len(flat):
        seen = f"In {int(flat.sum())} of {len(flat)} rows the gradient of the largest logits is (nearly) zero."
        return "saturated_layer", seen
    return "", ""
