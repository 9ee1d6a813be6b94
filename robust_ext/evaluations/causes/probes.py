"""Checks that a model can be attacked: mode, randomness, outputs and gradients, on a few rows.

Sources of what is looked at: Croce and Hein's AutoAttack (``checks.py``: randomness, probabilities, zero gradients);
Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section 3; Carlini et al.,
"On Evaluating Adversarial Robustness" (2019). The layer at fault is found as
:mod:`robust_ext.evaluations.causes.layers` has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import OutOfTimeError, warn
from robust_ext.core.guard import guarded
from robust_ext.core.random import seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.progress import paced
from robust_ext.evaluations.causes.finding import Finding, Remedy, ranked
from robust_ext.evaluations.causes.gradient_probe import Gradients, probe_gradients
from robust_ext.evaluations.causes.layers import LayerReport
from robust_ext.evaluations.causes.output_probe import Outputs, probe_outputs
from robust_ext.reports.wording import typed

# Inputs that go over a smaller share of the bounds are of another scale.
_FILLED, _ROUNDING = 0.02, 1e-3
# Samples by which pixels in other bounds are known, and by which classes are seen to be nearer than twice epsilon.
_PIXELS, _PAIRED, _NEAR, _ROWS = 4, 8, 0.75, 32
# Budgets of linf for inputs in [0, 1]: k/255 up to this k, and decimals that stand for such or are usual for MNIST.
_LEVELS, _DECIMALS = 16, (0.03, 0.031, 0.0314, 0.0157, 0.0078, 0.0039, 0.3, 0.2, 0.1, 0.01)
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
_UNITS = "Give bounds and epsilon in the units of the inputs, or scale the inputs."
_INSIDE = (
    "Put the normalisation into the model (robust_ext.models.Normalized(model, mean=..., std=...)), give inputs in "
    "[0, 1] and bounds (0, 1); then epsilon is in pixels."
)


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
    """Return whether the inputs lie in the bounds, and fill more than a corner of them."""
    low, high = bounds
    least, most = float(inputs.min()), float(inputs.max())
    if least < low - _ROUNDING * (high - low) or most > high + _ROUNDING * (high - low):
        cause = "Inputs lie outside the bounds of the threat model."
    elif most - least < _FILLED * (high - low):
        cause = "Inputs fill a tiny part of the bounds: either are of another scale."
    elif inputs.dim() == 4 and len(inputs) >= _PIXELS and least >= 0 and 0.5 < most <= 1 and low <= -0.4:
        cause = "Inputs are pixels in [0, 1], and the bounds are those of other units, with negative values."
    else:
        return None
    evidence = (f"The inputs go from {least:.4g} to {most:.4g}, the bounds are [{low:g}, {high:g}].",)
    return Finding(code="wrong_bounds", cause=cause, evidence=evidence, remedies=(Remedy(words=_UNITS),))


def _epsilon(inputs: Tensor, classes: Tensor | None, threat_model: ThreatModel) -> Finding | None:
    """Return whether epsilon is of another scale than the bounds."""
    epsilon, width, norm = threat_model.epsilon, threat_model.width, threat_model.norm
    values = inputs[0].numel()
    cause = remedy = ""
    whole = width * {"linf": 1.0, "l2": math.sqrt(values), "l1": float(values)}[norm]
    paired = None if classes is None else _paired(inputs, classes, threat_model)
    if epsilon >= whole:
        cause = "Epsilon is as large as the whole range of inputs: the threat model allows any input."
        evidence = (
            f"Epsilon is {typed(epsilon)} in {norm}, and no two inputs in the bounds are farther than {whole:.4g}."
        )
    elif paired is not None and paired >= _NEAR * len(inputs[:_ROWS]):
        cause = "Epsilon is so large that samples of different classes share points: no model can be robust on both."
        evidence = f"{paired} of {len(inputs[:_ROWS])} samples lie within twice epsilon of a sample of another class."
    elif norm == "linf":
        cause, evidence, remedy = _pixels(threat_model)
    elif values >= _LARGE and epsilon < _LEAST[norm] * width:
        cause = f"Epsilon is that of linf, and far too small in {norm}."
        each = 255 * epsilon / width / (math.sqrt(values) if norm == "l2" else values)
        evidence = f"Spread over the {values} values of a sample, it changes each by {each:.2g} of 255 levels."
    if not cause:
        return None
    remedies = (Remedy(words=remedy or _usual(threat_model, values)),)
    return Finding(code="threat_scale", cause=cause, evidence=(evidence,), remedies=remedies)


def _paired(inputs: Tensor, classes: Tensor, threat_model: ThreatModel) -> int | None:
    """Count samples whose balls share points with a sample of another class; None for too few."""
    if len(inputs) < _PAIRED or len({*classes.tolist()}) < 2:
        return None
    order = {"linf": math.inf, "l2": 2.0, "l1": 1.0}[threat_model.norm]
    inputs, classes = inputs[:_ROWS], classes[:_ROWS]
    flat = inputs.flatten(1)
    distances = torch.cdist(flat, flat, p=order, compute_mode="donot_use_mm_for_euclid_dist")
    near = (distances <= 2 * threat_model.epsilon) & (classes[:, None] != classes[None])
    return int(near.any(1).sum())


def _pixels(threat_model: ThreatModel) -> tuple[str, str, str]:
    """Cause, evidence and remedy where epsilon in linf is that of inputs in [0, 1] and the bounds are others."""
    epsilon, width, (low, high) = threat_model.epsilon, threat_model.width, threat_model.bounds
    levels = 255 * epsilon
    counted = abs(levels - round(levels)) < 1e-4 and 1 <= round(levels) <= _LEVELS
    pixel = counted or any(abs(epsilon - value) < 1e-9 for value in _DECIMALS)
    if width > 100:
        eighth = abs(8 * epsilon - round(8 * epsilon)) < 1e-6
        if epsilon * 255 / width >= 0.5 or (eighth and not pixel):
            return "", "", ""
        cause = "Epsilon is that of inputs in [0, 1], and the bounds are of others: it is less than a level of 255."
        evidence = (
            f"Epsilon is {typed(epsilon)} in bounds [{low:g}, {high:g}], {255 * epsilon / width:.2g} of 255 levels."
        )
        return cause, evidence, f"Give epsilon={epsilon * width:.4g}, or scale the inputs to [0, 1]."
    twice = 255 * 255 * epsilon / width
    if abs(twice - round(twice)) < 1e-3 and 1 <= round(twice) <= _LEVELS:
        evidence = f"Epsilon is {twice / 255:.2g} of 255 levels of the bounds [{low:g}, {high:g}]."
        return "Epsilon was divided by 255 twice.", evidence, f"Give epsilon={typed(255 * epsilon)}."
    known = next((name for name, ends in _STANDARDISED.items() if _alike(threat_model.bounds, ends)), None)
    usual = (0.3, 0.2, 0.1) if known == "MNIST" else ()
    standardised = low < -1.01 and high > 1.01 and abs(low + high) > 1e-3 * width
    if not (counted and (known or standardised)) and not (
        known and (epsilon in usual or any(abs(epsilon - value) < 1e-9 for value in _DECIMALS[:6]))
    ):
        return "", "", ""
    cause = "Epsilon is in pixels, and the bounds are those of standardised inputs."
    where = f", as of {known} images" if known else ""
    evidence = (
        f"The bounds [{low:g}, {high:g}] are those of standardised inputs{where}; {typed(epsilon)} is "
        f"{255 * epsilon / width:.3g} of 255 levels there."
    )
    return (
        cause,
        evidence,
        f"{_INSIDE} In these units epsilon would be about {typed(epsilon)} x {width:.3g} = "
        + (f"{epsilon * width:.3g}, which differs by channel."),
    )


def _alike(bounds: tuple[float, float], ends: tuple[float, float]) -> bool:
    return all(abs(one - other) <= _CLOSE for one, other in zip(bounds, ends, strict=True))


def _usual(threat_model: ThreatModel, values: int) -> str:
    """Return the usual epsilon of images, in the units of the bounds."""
    width, epsilon = threat_model.width, threat_model.epsilon
    if threat_model.norm == "linf":
        usual = f"8/255 of the range, here {typed(8 / 255 * width)} (for MNIST .3 of it, here {0.3 * width:.3g})"
    elif threat_model.norm == "l2":
        usual = f"0.5 of the range for 3 x 32 x 32 values, here {0.5 * width:.3g} (for MNIST 2, for ImageNet 3 of it)"
    else:
        usual = f"10 to 12 of the range for images of MNIST and CIFAR-10, here {10 * width:.3g} to {12 * width:.3g}"
    more = f" {typed(epsilon)}/255 of the range would be {epsilon / 255 * width:.4g}." if 1 <= epsilon <= 64 else ""
    return f"Give epsilon in the units of the inputs. Usual for images is {usual}.{more}"


# Rows of which predictions and gradients are looked at; the closer look is at a few of them.
_WIDE = 32


@dataclass(frozen=True, kw_only=True)
class ModelProbe:
    """The findings of a model's probes.

    Attributes:
        findings: What is wrong, the worst first.
        clean_accuracy: Share of the rows looked at that are classified right; None where there are no logits.
        layers: The modules that were called, in the order in which they returned.
        random: Whether the same rows give other logits, in the mode that the model is in.
        rows: How many rows accuracy and gradients are of.
        largest_logit: Largest absolute logit; None where there are no logits.
    """

    findings: tuple[Finding, ...] = ()
    clean_accuracy: float | None = None
    layers: tuple[LayerReport, ...] = ()
    random: bool = False
    rows: int = 0
    largest_logit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in ``result.json``."""
        findings = [finding.to_dict() for finding in self.findings]
        return {**vars(self), "findings": findings, "layers": [layer.to_dict() for layer in self.layers]}


def probe_model(
    module: nn.Module, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, rows: int = 4, seed: int = 0
) -> ModelProbe:
    """Look for what keeps attacks from a model, in the mode it is in; it is left as it was.

    A module that raises gives a finding.

    Args:
        module: From inputs to logits, on the device of ``inputs``.
        inputs: Floating point ``(N, ...)``, at least one row; the first 32 are used at most.
        labels: int64 ``(N,)``.
        threat_model: Its bounds are those of the data.
        rows: How many rows are looked at layer by layer.
        seed: Of random directions, and of the draws of a random model.

    Example:
        >>> from robust_ext.demo.network import digits_network
        >>> x, y = torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
        >>> linf = ThreatModel(norm="linf", epsilon=0.1)
        >>> probe_model(digits_network(), x, y, threat_model=linf).findings
        ()
        >>> (found,) = probe_model(nn.Sequential(digits_network(), nn.Softmax(1)), x, y, threat_model=linf).findings
        >>> found.code, found.layer
        ('probabilities', '1')
    """
    # Copies, which can have gradients where the given ones were made in inference mode.
    with torch.inference_mode(False):
        inputs, labels = inputs[:_WIDE].clone(), labels[:_WIDE].clone()
    findings = list(find_scale(inputs, labels, bounds=threat_model.bounds, budgets=[threat_model]))
    outputs, gradients = Outputs(findings=()), Gradients()
    try:
        with paced(module, "probes of the model"), _undisturbed(module, seed):
            outputs = probe_outputs(module, inputs, bounds=threat_model.bounds, rows=rows, seed=seed)
            if outputs.logits is not None:
                # Of a slow module fewer rows.
                inputs, labels = inputs[: len(outputs.logits)], labels[: len(outputs.logits)]
                gradients = probe_gradients(
                    module,
                    inputs,
                    labels.clamp(0, outputs.logits.shape[1] - 1),
                    rows=rows,
                    seed=seed,
                    random=outputs.random,
                    softmax=outputs.softmax,
                )
    except OutOfTimeError as error:
        warn(f"{error}. What they had not looked at by then is not among the findings.")
    findings += [*outputs.findings, *gradients.findings]
    if any(one.code == "non_finite_gradient" for one in gradients.findings) and outputs.only_minus_infinite:
        # A logarithm of zero: what attacks meet first is the gradient.
        findings = [one for one in findings if one.code != "non_finite_logits"]
    found = outputs.logits
    return ModelProbe(
        findings=tuple(ranked(findings)),
        clean_accuracy=None if found is None else float((found.argmax(1) == labels).double().mean()),
        layers=tuple(gradients.layers),
        random=outputs.random,
        rows=len(inputs),
        largest_logit=None if found is None else float(found.abs().nan_to_num(0, 0, 0).max()),
    )


@contextmanager
def _undisturbed(module: nn.Module, seed: int) -> Iterator[None]:
    """Weights, buffers, modes, hooks and random numbers are put back; gradients can be taken."""
    with guarded(module), seeded_globals(seed), _uncompiled(module), torch.inference_mode(False), torch.enable_grad():
        yield


def _uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Compiled modules run as they were written, where torch can do that: hooks would be compiled again and again."""
    stance = getattr(torch.compiler, "set_stance", None)
    compiled = any(hasattr(part, "_orig_mod") for part in module.modules())
    return stance("force_eager") if compiled and stance is not None else nullcontext()
