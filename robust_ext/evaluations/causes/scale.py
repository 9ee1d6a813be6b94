"""Checks that bounds and epsilon are of the inputs' scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import typed
from robust_ext.evaluations.causes.finding import Finding, Remedy

# Inputs that go over a smaller share of the bounds are of another scale.
_FILLED, _ROUNDING = 0.02, 1e-3
# Samples by which pixels in other bounds are known, and by which classes are seen to be nearer than twice epsilon.
_PIXELS, _PAIRED, _NEAR, _ROWS = 4, 8, 0.75, 32
# Budgets of linf for inputs in [0, 1]: k/255 up to this k, and decimals that stand for such or are usual for MNIST.
_LEVELS, _SMALL, _LARGER = 16, (0.03, 0.031, 0.0314, 0.0157, 0.0078, 0.0039), (0.3, 0.2, 0.1, 0.01)
# Values of a sample from which on budgets of l2 and l1 are known to be larger, and the least of them, of the range.
_LARGE, _LEAST = 196, {"l2": 0.05, "l1": 0.5}
# Bounds of images that were standardised, by the constants that are used most; how far bounds may lie from them.
_STANDARDISED = {
    "ImageNet": (-2.118, 2.640),
    "CIFAR-10": (-1.989, 2.126),
    "CIFAR-10 (another deviation)": (-2.429, 2.754),
    "MNIST": (-0.4242, 2.8215),
}
_CLOSE = 0.03


def find_scale(
    inputs: Tensor, classes: Tensor | None, *, bounds: tuple[float, float], budgets: Iterable[ThreatModel]
) -> Iterator[Finding]:
    """Find faults of bounds or budgets, at most one.

    Args:
        inputs: Clean samples ``(N, ...)`` in the bounds.
        classes: Labels, or what the model predicts, ``(N,)``; None where budgets may be as large as their distances.
        bounds: Of inputs.
        budgets: What attacks are given.
    """
    found = _bounds(inputs, bounds)
    for budget in budgets:
        found = found or _epsilon(inputs, classes, budget)
    if found is not None:
        yield found


def _bounds(inputs: Tensor, bounds: tuple[float, float]) -> Finding | None:
    """Find inputs that lie out of the bounds, or fill a corner of them only."""
    low, high = bounds
    least, most = float(inputs.min()), float(inputs.max())
    if least < low - _ROUNDING * (high - low) or most > high + _ROUNDING * (high - low):
        cause = "Inputs lie outside the bounds of the threat model."
    elif most - least < _FILLED * (high - low):
        cause = "Inputs fill a tiny part of the bounds: one of the two has another scale."
    elif inputs.dim() == 4 and len(inputs) >= _PIXELS and least >= 0 and 0.5 < most <= 1 and low <= -0.4:
        cause = "Inputs are pixels in [0, 1], but the bounds are in other units, with negative values."
    else:
        return None
    evidence = (f"The inputs go from {least:.4g} to {most:.4g}, the bounds are [{low:g}, {high:g}].",)
    remedy = Remedy(words="Give bounds and epsilon in the units of the inputs, or scale the inputs.")
    return Finding(code="wrong_bounds", cause=cause, evidence=evidence, remedies=(remedy,))


def _epsilon(inputs: Tensor, classes: Tensor | None, threat_model: ThreatModel) -> Finding | None:
    """Find an epsilon of another scale than the bounds."""
    if threat_model.restricted:
        return None  # Its largest epsilon and outermost bounds are those of no entry
    epsilon, width, norm, values = threat_model.epsilon, threat_model.width, threat_model.norm, inputs[0].numel()
    few, remedy = inputs[:_ROWS], _usual(threat_model)
    whole = width * {"linf": 1.0, "l2": math.sqrt(values), "l1": float(values)}[norm]
    paired = 0 if classes is None else _paired(few, classes[:_ROWS], threat_model)
    if epsilon >= whole:
        cause = "Epsilon is as large as the whole range of inputs: the threat model allows any input."
        evidence = (
            f"Epsilon is {typed(epsilon)} in {norm}, and no two inputs in the bounds are farther than {whole:.4g}."
        )
    elif paired and paired >= _NEAR * len(few):
        cause = "Epsilon is so large that samples of different classes share points: no model can be robust on both."
        evidence = f"{paired} of {len(few)} samples lie within twice epsilon of a sample of another class."
    elif norm == "linf":
        if (found := _pixels(threat_model)) is None:
            return None
        cause, evidence, remedy = found
    elif values >= _LARGE and epsilon < _LEAST[norm] * width:
        cause = f"Epsilon looks like one for linf, and is far too small in {norm}."
        each = 255 * epsilon / width / (math.sqrt(values) if norm == "l2" else values)
        evidence = f"Spread over the {values} values of a sample, it changes each by {each:.2g} of 255 levels."
    else:
        return None
    return Finding(code="threat_scale", cause=cause, evidence=(evidence,), remedies=(Remedy(words=remedy),))


def _paired(inputs: Tensor, classes: Tensor, threat_model: ThreatModel) -> int:
    """Count samples whose balls share points with a sample of another class; 0 for too few."""
    if len(inputs) < _PAIRED:
        return 0
    order = {"linf": math.inf, "l2": 2.0, "l1": 1.0}[threat_model.norm]
    flat = inputs.flatten(1)
    distances = torch.cdist(flat, flat, p=order, compute_mode="donot_use_mm_for_euclid_dist")
    near = (distances <= 2 * threat_model.epsilon) & (classes[:, None] != classes[None])
    return int(near.any(1).sum())


def _pixels(threat_model: ThreatModel) -> tuple[str, str, str] | None:
    """Cause, evidence and remedy where epsilon in linf is that of inputs in [0, 1] and the bounds are others."""
    epsilon, width, (low, high) = threat_model.epsilon, threat_model.width, threat_model.bounds
    small = any(abs(epsilon - value) < 1e-9 for value in _SMALL)
    counted = abs(255 * epsilon - round(255 * epsilon)) < 1e-4 and 1 <= round(255 * epsilon) <= _LEVELS
    if width > 100:
        pixel = counted or small or any(abs(epsilon - value) < 1e-9 for value in _LARGER)
        eighth = abs(8 * epsilon - round(8 * epsilon)) < 1e-6
        if epsilon * 255 / width >= 0.5 or (eighth and not pixel):
            return None
        return (
            "Epsilon is meant for inputs in [0, 1], but the bounds are not: it is less than one level of 255.",
            f"Epsilon is {typed(epsilon)} in bounds [{low:g}, {high:g}], {255 * epsilon / width:.2g} of 255 levels.",
            f"Give epsilon={epsilon * width:.4g}, or scale the inputs to [0, 1].",
        )
    twice = 255 * 255 * epsilon / width
    if abs(twice - round(twice)) < 1e-3 and 1 <= round(twice) <= _LEVELS:
        evidence = f"Epsilon is {twice / 255:.2g} of 255 levels of the bounds [{low:g}, {high:g}]."
        return "Epsilon was divided by 255 twice.", evidence, f"Give epsilon={typed(255 * epsilon)}."
    known = next(
        (name for name, (least, most) in _STANDARDISED.items() if max(abs(low - least), abs(high - most)) <= _CLOSE), ""
    )
    standardised = low < -1.01 and high > 1.01 and abs(low + high) > 1e-3 * width
    usual = counted or small or (known == "MNIST" and epsilon in (0.3, 0.2, 0.1))
    if not (usual and known) and not (counted and standardised):
        return None
    where = f", as of {known} images" if known else ""
    return (
        "Epsilon is in pixels, but the bounds are those of standardised inputs.",
        f"The bounds [{low:g}, {high:g}] are those of standardised inputs{where}; {typed(epsilon)} is "
        f"{255 * epsilon / width:.3g} of 255 levels there.",
        "Put the normalisation into the model (robust_ext.models.Normalized(model, mean=..., std=...)), give inputs in "
        "[0, 1] and bounds (0, 1); then epsilon is in pixels. In these units epsilon would be about "
        f"{typed(epsilon)} x {width:.3g} = {epsilon * width:.3g}, which differs by channel.",
    )


def _usual(threat_model: ThreatModel) -> str:
    """Return the usual epsilon of images, in the units of the bounds."""
    width, epsilon = threat_model.width, threat_model.epsilon
    usual = {
        "linf": f"8/255 of the range, here {typed(8 / 255 * width)} (for MNIST .3 of it, here {0.3 * width:.3g})",
        "l2": f"0.5 of the range for 3 x 32 x 32 values, here {0.5 * width:.3g} (for MNIST 2, for ImageNet 3 of it)",
        "l1": f"10 to 12 of the range for images of MNIST and CIFAR-10, here {10 * width:.3g} to {12 * width:.3g}",
    }[threat_model.norm]
    more = f" {typed(epsilon)}/255 of the range would be {epsilon / 255 * width:.4g}." if 1 <= epsilon <= 64 else ""
    return f"Give epsilon in the units of the inputs. Usual for images is {usual}.{more}"
