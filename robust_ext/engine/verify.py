"""Verification: what an attack returned is checked here, and nothing it reports of itself is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import AttackError
from robust_ext.core.threat import ThreatModel

OUTCOMES = ("found", "rejected", "not_adversarial", "beyond_epsilon", "out_of_bounds", "not_finite")


@dataclass(frozen=True)
class Verification:
    """What became of each candidate."""

    outcomes: tuple[str, ...]  # One of OUTCOMES a candidate
    distances: Tensor  # To the clean input in the threat model's norm, float64 (N,); NaN where not finite
    # The candidates as judged: float32, clipped to the bounds where only rounding had left them, the clean input where
    # not finite or out of bounds
    candidates: Tensor
    logits: Tensor  # Of the target at each of them, (N, K)


def verify(
    candidates: object,
    inputs: Tensor,
    labels: Tensor,
    *,
    module: nn.Module,
    threat_model: ThreatModel,
    attack: str,
    rejects: Callable[[Tensor], Tensor] | None = None,
) -> Verification:
    """Check candidates: finite, in bounds, in the ball (float64, :meth:`ThreatModel.tolerance`), predicted wrongly.

    ``module`` is the full target in eval mode, run once on all N rows; ``rejects`` gives for the judged candidates
    which a detector rejects, bool ``(N,)``. AttackError where they are no float tensor
    of the inputs' shape.
    """
    if not isinstance(candidates, Tensor):
        raise AttackError(f"{attack}: returned {type(candidates).__name__}, expected a tensor of candidates")
    if candidates.shape != inputs.shape:
        raise AttackError(
            f"{attack}: returned shape {tuple(candidates.shape)} for inputs of shape {tuple(inputs.shape)}, expected "
            "one candidate an input"
        )
    if not candidates.is_floating_point():
        raise AttackError(f"{attack}: returned dtype {candidates.dtype}, expected floating point candidates")
    candidates = candidates.detach().to(inputs.device)
    low, high = threat_model.bounds
    slack = 1e-6 * max(abs(low), abs(high))
    flat = candidates.flatten(1)
    finite = torch.isfinite(flat).all(1)
    inside = ((flat >= low - slack) & (flat <= high + slack)).all(1)
    distances = threat_model.distance(candidates, inputs).where(finite, torch.nan)
    near = threat_model.contains(candidates, inputs)
    usable = (finite & inside).view(-1, *[1] * (inputs.dim() - 1))
    judged = torch.where(usable, candidates.to(torch.float32), inputs).clamp(low, high)
    with torch.no_grad():
        logits = module(judged)
    # A NaN prediction has decided nothing.
    wrong = (logits.argmax(1) != labels) & torch.isfinite(logits).all(1)
    # The first test that a candidate fails names its outcome.
    tests = [("not_finite", finite), ("out_of_bounds", inside), ("beyond_epsilon", near), ("not_adversarial", wrong)]
    if rejects is not None:
        tests.append(("rejected", ~rejects(judged)))
    outcomes = ["found"] * len(judged)
    for outcome, good in reversed(tests):
        outcomes = [now if ok else outcome for now, ok in zip(outcomes, good.tolist(), strict=True)]
    return Verification(tuple(outcomes), distances, judged, logits)
