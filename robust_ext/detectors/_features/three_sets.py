"""Clean, noisy and adversarial training inputs, and references beside them, for detectors that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.validation import check_inputs, check_integer, check_number
from robust_ext.detectors.training import ANY, check_kinds

_ROWS = 1000


@dataclass(frozen=True)
class ThreeSets:
    """What a detector is trained on: inputs ``(R, ...)``, ``(N, ...)``, ``(N, ...)`` and ``(M, ...)``.

    No reference is in ``clean``. ``apart`` holds the rows of the given clean inputs that became references (empty where
    references were given), ``noise`` the standard deviation of the noise before clipping.
    """

    references: Tensor
    clean: Tensor
    noisy: Tensor
    adversarial: Tensor
    apart: Tensor
    noise: float


def three_sets(
    clean: Tensor,
    adversarial: Tensor,
    *,
    references: Tensor | None,
    apart: int,
    noise: float | None,
    bounds: Sequence[float] | None,
    folds: int,
    seed: int,
) -> ThreeSets:
    """Check the inputs of a fit, set references apart and add noise; see ``ReferenceDetector.fit``.

    Without references ``apart`` rows of ``clean`` are drawn; of each kind ``folds`` inputs are needed at least.
    """
    check_integer("folds", folds, minimum=2)
    check_integer("seed", seed, minimum=0)
    clip = None if bounds is None else check_bounds(bounds)
    clean, adversarial = check_kinds(clean, adversarial, fewest=0)
    if clean.shape != adversarial.shape and (references is None or noise is None):
        raise InvalidArgumentError(
            "adversarial",
            f"shape {tuple(adversarial.shape)} beside clean inputs {tuple(clean.shape)}",
            "one for each clean input, in order; or references and noise as well",
        )
    chosen = torch.empty(0, dtype=torch.int64)
    if references is not None:
        references = check_inputs("references", references, bounds=ANY)
        if not len(references):
            raise InvalidArgumentError("references", "no references", "a tensor of at least one clean input")
    else:
        chosen, rest = _set_apart(len(clean), apart, folds, seed)
        references, clean, adversarial = clean[chosen], clean[rest], adversarial[rest]
    clean, adversarial = check_kinds(clean, adversarial, fewest=folds, reason="folds = ")
    draw = torch.randn(clean.shape, generator=stream(seed, "noise")).to(clean.device)
    if noise is None:
        noise = _matched(clean, adversarial, draw, clip)
    check_number("noise", noise, minimum=0)
    noisy = _noisy(clean, draw, noise, clip)
    return ThreeSets(references, clean, noisy, adversarial, chosen, noise)


def _set_apart(count: int, apart: int, folds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that become references and rows that are trained on, of ``count`` clean ones."""
    order = torch.randperm(count, generator=stream(seed, "references"))
    chosen, rest = order[:apart].sort().values, order[apart:].sort().values
    if len(rest) < folds or not len(chosen):
        raise InvalidArgumentError(
            "clean",
            f"{count} inputs",
            f"at least {max(apart, 1) + folds}, of which {max(apart, 1)} become references; or give references",
        )
    return chosen, rest


def _noisy(clean: Tensor, draw: Tensor, noise: float, bounds: tuple[float, float] | None) -> Tensor:
    moved = clean + noise * draw
    return moved if bounds is None else moved.clamp(*bounds)


def _matched(clean: Tensor, adversarial: Tensor, draw: Tensor, bounds: tuple[float, float] | None) -> float:
    """The standard deviation at which clipped noise is as large as the perturbations."""
    clean, draw = clean[:_ROWS], draw[:_ROWS]
    wanted = float((adversarial[:_ROWS] - clean).double().square().mean().sqrt())
    if bounds is None or not wanted:
        return wanted

    def size(noise: float) -> float:
        return float((_noisy(clean, draw, noise, bounds) - clean).double().square().mean().sqrt())

    low, high = 0.0, wanted
    # Beyond the width of the bounds more noise hardly adds anything.
    while size(high) < wanted and high < bounds[1] - bounds[0]:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) < wanted else (low, middle)
    return high
