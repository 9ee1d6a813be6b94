"""Checks that a model can be attacked: mode, randomness, outputs and gradients, on a few rows.

Sources of the probes: Croce and Hein's AutoAttack (``checks.py``: randomness, probabilities, zero gradients);
Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section 3; Carlini et al.,
"On Evaluating Adversarial Robustness" (2019). The layer at fault is found as
:mod:`robust_ext.evaluations.causes.layers` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import OutOfTimeError, warn
from robust_ext.core.guard import guarded
from robust_ext.core.random import seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.progress import paced
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.gradient_probe import probe_gradients
from robust_ext.evaluations.causes.layers import LayerReport
from robust_ext.evaluations.causes.output_probe import Outputs, probe_outputs
from robust_ext.evaluations.causes.scale import find_scale
from robust_ext.models.black_box import black_box_in

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
    of_gradients = list[Finding]()
    outputs, layers = Outputs(findings=()), tuple[LayerReport, ...]()
    try:
        with paced(module, "probes of the model"), _undisturbed(module, seed):
            outputs = probe_outputs(module, inputs, bounds=threat_model.bounds, rows=rows, seed=seed)
            if outputs.logits is not None and black_box_in(module) is None:
                # Of a slow module fewer rows.
                inputs, labels = inputs[: len(outputs.logits)], labels[: len(outputs.logits)]
                of_gradients, layers = probe_gradients(
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
    findings += [*outputs.findings, *of_gradients]
    if any(one.code == "non_finite_gradient" for one in of_gradients) and outputs.only_minus_infinite:
        # A logarithm of zero: what attacks meet first is the gradient.
        findings = [one for one in findings if one.code != "non_finite_logits"]
    logits = outputs.logits
    return ModelProbe(
        findings=tuple(ranked(findings)),
        clean_accuracy=None if logits is None else float((logits.argmax(1) == labels).double().mean()),
        layers=layers,
        random=outputs.random,
        rows=len(inputs),
        largest_logit=None if logits is None else float(logits.abs().nan_to_num(0, 0, 0).max()),
    )


@contextmanager
def _undisturbed(module: nn.Module, seed: int) -> Iterator[None]:
    """Put back weights, buffers, modes, hooks and random numbers; let gradients be taken.

    Compiled modules run as they were written, where torch can do that: hooks would be compiled again and again.
    """
    stance = getattr(torch.compiler, "set_stance", None)
    compiled = any(hasattr(part, "_orig_mod") for part in module.modules())
    eager = stance("force_eager") if stance is not None and compiled else nullcontext()
    with guarded(module), seeded_globals(seed), eager, torch.inference_mode(False), torch.enable_grad():
        yield
