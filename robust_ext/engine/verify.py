"""Verification: outcomes of candidates, checked here without any report of the attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.errors import AttackError
from robust_ext.core.foreign import plain_tensor, without_values
from robust_ext.core.machine import RowLimit
from robust_ext.core.threat import ThreatModel

OUTCOMES = {
    "found": (
        "Found",
        "The candidate is finite, within the bounds and epsilon, and changes the prediction: the problem is solved. "
        "Only these count towards the test score.",
    ),
    "rejected": (
        "Rejected",
        "A valid input within epsilon that changes the prediction, and that the detector rejects (in the inverted "
        "test: lets pass). An example that fools both existed, and the attack missed it.",
    ),
    "not_adversarial": (
        "Not adversarial",
        "A valid input within epsilon, but the prediction did not change. An adversarial example existed, and the "
        "attack missed it.",
    ),
    "undone_by_rounding": (
        "Undone by rounding",
        "Within epsilon it changes the prediction, and rounded to the values that entries can have it does not: it is "
        "no valid input. Without the grid of values the sample would count as broken.",
    ),
    "non_finite_logits": (
        "Non-finite logits",
        "A valid input within epsilon at which the model returns NaN or infinite logits. That is a fault of the model, "
        "which is not robust there; it is not what was planted.",
    ),
    "beyond_epsilon": (
        "Beyond epsilon",
        "Farther from the clean input than the threat model allows. Check the epsilon and the norm that the attack "
        "was given.",
    ),
    "out_of_bounds": (
        "Out of bounds",
        "Some values lie outside the range of valid inputs. Check the bounds and the preprocessing.",
    ),
    "not_finite": ("Not finite", "The candidate holds NaN or infinity: the attack broke down numerically."),
    "ended": ("Ended", "The attack's process ended before it returned anything: the sample was not attacked."),
    "timed_out": (
        "Timed out",
        "The attack returned nothing within its time limit and was stopped: the sample was not attacked.",
    ),
}
"""Label and meaning of each outcome, in the order of tables."""

BROKEN = ("found", "non_finite_logits")
"""Outcomes after which a sample is not robust."""

UNDONE = "undone_by_rounding"
"""The outcome after which a sample is robust only because entries have to take values of a grid."""

LOST = ("ended", "timed_out")
"""Outcomes of rows for which nothing came back: such samples were not attacked."""


@dataclass(frozen=True)
class Verification:
    """The verdicts on candidates."""

    outcomes: tuple[str, ...]  # One of robust_ext.engine.verify.OUTCOMES a candidate
    distances: Tensor  # To the clean input in the threat model's norm, float64 (N,); NaN where not finite
    # The candidates as judged: float32, rounded to valid values, clipped to the bounds where only rounding had left
    # them, the clean input where not finite or out of bounds
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
    criterion: Criterion = MISCLASSIFICATION,
) -> Verification:
    """Check candidates: finite, in bounds, in the ball (float64, :meth:`ThreatModel.tolerance`), adversarial.

    Where entries are discrete, candidates are rounded to valid values in the ball first.

    Logits that are not all finite are an outcome of their own, regardless of the label: a class that is masked by an
    infinite logit counts too, as a classifier's logits at clean inputs have to be finite already.
    ``module`` is the full target in eval mode, run once on all N rows (in parts where these do not fit into memory);
    ``rejects`` gives for the judged candidates which a detector rejects, bool ``(N,)``. AttackError where they are no
    float tensor of the inputs' shape.
    """
    candidates = check_candidates(candidates, inputs, attack=attack).to(inputs.device)
    finite, inside, exact = _valid(candidates, inputs, threat_model)
    usable = (finite & inside).view(-1, *[1] * (inputs.dim() - 1))
    if threat_model.discrete:
        candidates = torch.where(usable, threat_model.snap(exact, inputs), candidates)
    distances = threat_model.distance(candidates, inputs).where(finite, torch.nan)
    limit = threat_model.epsilon + threat_model.tolerance(inputs[:1].numel())
    judged = torch.where(usable, candidates.to(torch.float32), inputs) if threat_model.discrete else exact
    with torch.no_grad():
        logits = RowLimit(len(judged)).run(module, judged.clone())
    # The first test that a candidate fails names its outcome.
    tests = [
        ("not_finite", finite),
        ("out_of_bounds", inside),
        ("beyond_epsilon", distances <= limit),
        ("non_finite_logits", torch.isfinite(logits).all(1)),
        ("not_adversarial", criterion.adversarial(logits, labels)),
    ]
    if threat_model.discrete:
        far = threat_model.distance(exact, inputs)
        with torch.no_grad():
            broken = criterion.adversarial(RowLimit(len(exact)).run(module, exact.clone()), labels)
        undone = usable.flatten() & ~tests[-1][1] & (far <= limit) & broken
        distances = torch.where(undone, far, distances)
        tests.insert(-1, (UNDONE, ~undone))
    if rejects is not None:
        tests.append(("rejected", ~rejects(judged)))
    names = [*(name for name, _ in tests), "found"]
    passed = torch.stack([*(good for _, good in tests), torch.zeros_like(finite)], 1)
    outcomes = tuple(names[first] for first in passed.int().argmin(1).tolist())
    return Verification(outcomes, distances, judged, logits)


def _valid(candidates: Tensor, inputs: Tensor, threat_model: ThreatModel) -> tuple[Tensor, Tensor, Tensor]:
    """Check which candidates are finite, and in bounds, bool ``(N,)``; all as float32 in bounds, inputs for others."""
    # NaN is both the least and the most of a row.
    least, most = candidates.flatten(1).amin(1), candidates.flatten(1).amax(1)
    finite = torch.isfinite(least) & torch.isfinite(most)
    low: Any
    high: Any
    if threat_model.restricted:
        low, high = threat_model.box(inputs)
        slack = 1e-6 * torch.maximum(low.abs(), high.abs())
        inside = ((candidates >= low - slack) & (candidates <= high + slack)).flatten(1).all(1)
    else:
        low, high = threat_model.bounds
        rounding = 1e-6 * max(abs(low), abs(high))
        inside = (least >= low - rounding) & (most <= high + rounding)
    usable = (finite & inside).view(-1, *[1] * (inputs.dim() - 1))
    return finite, inside, torch.where(usable, candidates.to(torch.float32), inputs).clamp(low, high)


def take_witnesses(
    found: Verification,
    witnesses: Tensor,
    inputs: Tensor,
    labels: Tensor,
    *,
    module: nn.Module,
    threat_model: ThreatModel,
    attack: str,
    criterion: Criterion = MISCLASSIFICATION,
) -> Verification:
    """Put witnesses of non-finite logits, see :class:`~robust_ext.engine.trace.Witnesses`, where nothing was found.

    ``witnesses`` ``(N, ...)`` are NaN in rows without one. They are verified as candidates are; one takes the place of
    a row's candidate only where the logits of ``module`` at it are indeed not finite.
    """
    open_rows = torch.tensor([outcome not in BROKEN for outcome in found.outcomes], device=inputs.device)
    witnesses = check_candidates(witnesses, inputs, attack=attack).to(inputs.device)
    open_rows &= torch.isfinite(witnesses.flatten(1)).all(1)
    if not bool(open_rows.any()):
        return found

    def over(rows: Tensor) -> Tensor:
        return rows.view(-1, *[1] * (inputs.dim() - 1))

    tried = torch.where(over(open_rows), witnesses, found.candidates)
    judge: dict[str, Any] = {"module": module, "threat_model": threat_model, "criterion": criterion}
    seen = verify(tried, inputs, labels, attack=attack, **judge)
    confirmed = open_rows & torch.tensor([one == "non_finite_logits" for one in seen.outcomes], device=inputs.device)
    rows = confirmed.tolist()
    return Verification(
        tuple(new if row else old for row, new, old in zip(rows, seen.outcomes, found.outcomes, strict=True)),
        torch.where(confirmed, seen.distances, found.distances),
        torch.where(over(confirmed), seen.candidates, found.candidates),
        torch.where(confirmed[:, None], seen.logits, found.logits),
    )


def check_candidates(candidates: object, inputs: Tensor, *, attack: str) -> Tensor:
    """Return the values of candidates of any tensor class as a separate plain tensor.

    AttackError where they are no dense float tensor of the inputs' shape; no memory is taken before that is known.
    """
    # Not isinstance, which trusts the class that an object declares.
    if not issubclass(type(candidates), Tensor):
        raise AttackError(f"{attack}: returned {type(candidates).__name__}, expected a tensor of candidates")
    if (odd := without_values(candidates)) is not None:
        raise AttackError(f"{attack}: returned a tensor {odd}, expected a plain, dense tensor of candidates in float32")
    plain = plain_tensor(candidates)
    if plain.shape != inputs.shape:
        raise AttackError(
            f"{attack}: returned shape {tuple(plain.shape)} for inputs of shape {tuple(inputs.shape)}, expected "
            "one candidate an input"
        )
    if not plain.is_floating_point():
        raise AttackError(f"{attack}: returned dtype {plain.dtype}, expected floating point candidates")
    return plain.clone()


def unverified(outcome: str, inputs: Tensor, *, module: nn.Module) -> Verification:
    """Return stand-ins for missing candidates of inputs ``(N, ...)``: the inputs themselves."""
    with torch.no_grad():
        logits = module(inputs)
    distances = torch.full((len(inputs),), torch.nan, dtype=torch.float64, device=inputs.device)
    return Verification((outcome,) * len(inputs), distances, inputs, logits)
