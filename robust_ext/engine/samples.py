"""A classifier and labelled samples, as evaluations are given them, checked and made ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_inputs, check_labels
from robust_ext.engine.identity import check_ids
from robust_ext.registry.model import as_module


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A classifier and what it says of clean samples.

    Args:
        module: The classifier.
        inputs: Clean samples ``(N, ...)``, float32, on its device.
        labels: Their classes, int64 ``(N,)``.
        logits: Of them, ``(N, K)``.
        ids: Of the samples.
    """

    module: nn.Module
    inputs: Tensor
    labels: Tensor
    logits: Tensor
    ids: list[int]


def check_samples(
    model: object,
    inputs: Tensor,
    labels: Tensor,
    *,
    bounds: tuple[float, float],
    sample_ids: Sequence[int] | None,
    batch_size: int,
    bounds_argument: str = "bounds",
) -> Samples:
    """Check a classifier and labelled samples.

    Args:
        model: A torch module in eval mode from inputs to logits; a model of an adapted library.
        inputs: float ``(N, ...)`` in bounds, at least one.
        labels: int64 ``(N,)``.
        bounds: Of inputs.
        sample_ids: One a sample; ``0 .. N-1`` when left out.
        batch_size: Samples sent forward at once.
        bounds_argument: What error messages call the bounds.

    Raises:
        InvalidArgumentError: An argument is not as described, or the model states other bounds.
        ModelError: The model is no classifier to logits.
    """
    adapted = as_module(model)
    if adapted.bounds is not None and adapted.bounds != tuple(bounds):
        raise InvalidArgumentError(
            bounds_argument, f"bounds {tuple(bounds)}", f"the bounds the model states, {adapted.bounds}"
        )
    device = module_device(adapted.module)
    inputs = check_inputs("inputs", inputs, bounds=bounds)
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    ids = check_ids(sample_ids, len(inputs))
    inputs = inputs.to(device)
    logits = torch.cat([check_classifier(adapted.module, batch) for batch in torch.split(inputs, batch_size)])
    labels = check_labels("labels", labels, samples=len(inputs), classes=logits.shape[1]).to(device)
    return Samples(module=adapted.module, inputs=inputs, labels=labels, logits=logits, ids=ids)
