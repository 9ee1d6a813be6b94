"""MEAD's objectives as the loss of ART's own attacks."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.model import PyTorchClassifier, adapt_model
from robust_ext.attacks._common.objectives import find_divergence
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.validation import check_choice, check_inputs


class ObjectiveLoss(nn.Module):
    """An objective of MEAD as ``PyTorchClassifier(loss=...)``, for attacks that raise the loss; not for training.

    ``"kl"`` and ``"fisher-rao"`` compare each row with the logits of its natural input, and ART hands a loss no more
    than logits and labels. So they are bound to one batch: the loss has to be queried for all of its rows at once, in
    their order, which attacks do that send full batches (FGM, BIM, MIM, PGD) if their ``batch_size`` is at least as
    large. Let them start at random (``num_random_init=1``): at the natural input itself the gradient of both is
    rounding noise, and its sign would decide the first step. Only ``"ace"`` makes sense with ``targeted=True``.

    Args:
        objective: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.
        natural: For ``"kl"`` and ``"fisher-rao"``: logits of the natural inputs, floating point ``(N, K)``, finite.
        reduction: ``"sum"``, with which each row's gradient is its own in any batch, ``"mean"`` or ``"none"``.
            ART sets it where it needs the losses of single rows.

    Raises:
        InvalidArgumentError: There is no such objective or reduction, or there are no natural logits to compare with.

    Example:
        >>> loss = ObjectiveLoss(objective="kl", natural=torch.tensor([[0.0, 1.0986]]))
        >>> loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(0.1308)
    """

    natural: Tensor | None

    def __init__(self, *, objective: str, natural: Tensor | None = None, reduction: str = "sum") -> None:
        super().__init__()
        self._divergence = find_divergence(objective)
        self.objective = objective
        self.reduction = check_choice("reduction", reduction, ("sum", "mean", "none"))
        self.register_buffer("natural", _check_natural(natural, objective) if self._divergence.compares else None)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the objective of logits ``(N, K)``, a scalar, or ``(N,)`` without a reduction.

        Labels are one-hot ``(N, K)`` or indices ``(N,)`` or ``(N, 1)``, of any type; only ``"ace"`` looks at them.

        Raises:
            InvalidArgumentError: The rows are not those of the natural logits.
        """
        natural = logits.new_empty(0) if self.natural is None else self.natural.to(logits)
        if self.natural is not None and natural.shape != logits.shape:
            expected = (
                f"shape {tuple(natural.shape)}, as the natural ones have: {self.objective!r} is bound to one batch, so "
                "attack the whole of it at once (batch_size), or bind a loss to each part"
            )
            raise InvalidArgumentError("logits", f"shape {tuple(logits.shape)}", expected)
        # ART reduces labels for its own losses, and for no other.
        hot = labels.dim() == 2 and labels.shape[1] > 1
        indices = labels.argmax(1) if hot else labels.reshape(-1).long()
        values = self._divergence.value(logits, natural, indices)
        return values if self.reduction == "none" else getattr(values, self.reduction)()


def objective_estimator(estimator: Any, objective: str, x: Any = None) -> Any:
    """Make an estimator with another's network and an objective of MEAD as its loss, for ART's own attacks.

    For ``"kl"`` and ``"fisher-rao"`` it is bound to the batch ``x``: attack that batch, all of it at once, from a
    random start, see :class:`ObjectiveLoss`. The network is queried once for it, in eval mode, and left as it was.
    ART's attacks leave networks in eval mode, and gradients of zero or more in their weights, as with any other loss.

    Args:
        estimator: A ``PyTorchClassifier`` whose preprocessing, if it has any, runs in PyTorch.
        objective: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.
        x: Natural inputs ``(N, ...)``; only ``"kl"`` and ``"fisher-rao"`` look at them.

    Returns:
        A ``PyTorchClassifier`` with the same network, preprocessing and clip values.

    Raises:
        InvalidArgumentError: There is no such objective, it is no ``PyTorchClassifier``, or inputs are missing or
            outside the clip values.
        ModelError: It has preprocessing outside PyTorch, or postprocessing.
    """
    compares = find_divergence(objective).compares
    if compares and x is None:
        raise InvalidArgumentError("x", None, f"the natural inputs, which {objective!r} compares with")
    if not isinstance(estimator, PyTorchClassifier):
        raise InvalidArgumentError("estimator", f"a {type(estimator).__name__}", "an ART PyTorchClassifier")
    natural = None
    with frozen(estimator.model), torch.no_grad():
        estimator.model.eval()
        adapted = adapt_model(estimator)
        if compares:
            inputs = torch.from_numpy(np.array(x, dtype=np.float32))
            checked = check_inputs("x", inputs, bounds=adapted.bounds or (-math.inf, math.inf))
            natural = adapted.module(checked.to(estimator.device))
    on_gpu = estimator.device.type == "cuda"
    # ART takes the current GPU, whichever the network is on.
    with torch.cuda.device(estimator.device) if on_gpu else nullcontext():
        return PyTorchClassifier(
            model=estimator.model,
            loss=ObjectiveLoss(objective=objective, natural=natural),
            optimizer=estimator.optimizer,
            input_shape=estimator.input_shape,
            nb_classes=estimator.nb_classes,
            channels_first=estimator.channels_first,
            clip_values=estimator.clip_values,
            preprocessing_defences=estimator.preprocessing_defences,
            preprocessing=estimator.preprocessing,
            device_type="gpu" if on_gpu else "cpu",
        )


def _check_natural(natural: object, objective: str) -> Tensor:
    expected = f"the logits (N, K) of the natural inputs, which {objective!r} compares with; see objective_estimator"
    if not isinstance(natural, Tensor):
        raise InvalidArgumentError("natural", None if natural is None else type(natural).__name__, expected)
    if natural.dim() != 2 or not natural.is_floating_point():
        raise InvalidArgumentError("natural", f"{natural.dtype} of shape {tuple(natural.shape)}", expected)
    if not bool(torch.isfinite(natural).all()):
        raise InvalidArgumentError("natural", "NaN or infinite values", expected)
    return natural.detach()
