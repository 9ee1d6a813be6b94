"""Checks that labels, inputs, outputs and threat model fit together, before an attack is blamed.

Accuracy on clean samples is looked at by predictions that are known already. Where it is low, corrections are tried:
other labels by the same predictions, other inputs by forward passes of a few rows. Only these are suggested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.finding_texts import SETUP
from robust_ext.core.guard import guarded
from robust_ext.core.random import seeded_globals
from robust_ext.core.statistics import paired_difference, upper_bound
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.evaluations.causes.corrections import Judged, input_corrections, label_corrections
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.scale import find_scale
from robust_ext.models.adaptive import AdaptiveDefense

ACCURACY = tuple(code for code in SETUP if code != "threat_scale")
"""Findings of a setup in which no attack says anything."""

# Rows that go forward again, and rows by which the threat model is judged.
_ROWS = 64
# Fewer samples say nothing about accuracy; above this accuracy nothing is tried.
_FEWEST, _GOOD = 8, 0.8
# The gain in accuracy of a correction that is believed, its p-value, and the accuracy that it has to reach.
_GAIN, _P_VALUE, _REACHED = 0.12, 0.01, 0.5
# Corrections whose accuracies differ by less are alike; the simplest counts, and some others are named.
_ALIKE, _OTHERS = 0.05, 3
# One-sided quantile of the normal distribution: how far above chance something is seen.
_SEEN = 1.645
# An honest weak classifier: its part of the way from chance to a perfect one, by ranks and by accuracy.
_WEAK_RANKS, _WEAK_ACCURACY, _ERROR = 0.35, 0.25, 0.05
# Outputs are constant where they vary less than this, as a part of their size and of the margin of the first.
_ROUNDING, _STILL = 1e-6, 0.02
# A model is sure of its predictions, or of nothing, where its highest probability is above this; below this x 1 / K.
# A network as it was initialised is right less often than the last.
_SURE, _FLAT, _UNTRAINED = 0.99, 1.5, 0.35
# Samples of other classes that a constant prediction has to miss.
_MISSED = 7


def find_setup(given: EvaluationInputs, *, seed: int, budgets: Sequence[ThreatModel] | None = None) -> list[Finding]:
    """Find faults of samples, labels, model and threat model, the worst first; see :func:`judge_setup`.

    ``budgets`` are those that attacks have of their own, in place of the threat model's.
    """
    return judge_setup(
        given.module,
        given.inputs,
        given.labels,
        given.logits,
        bounds=given.bounds,
        budgets=[given.threat_model] if budgets is None else budgets,
        compared=budgets is None,
        seed=seed,
    )


def judge_setup(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor | None,
    logits: Tensor,
    *,
    bounds: tuple[float, float],
    budgets: Sequence[ThreatModel],
    compared: bool = True,
    seed: int = 0,
) -> list[Finding]:
    """Find faults of a setup, the worst first; none where accuracy, inputs and budgets fit together.

    Args:
        module: From inputs to logits; run on 64 rows at most, and only where accuracy is low. It is left as it was.
        inputs: Clean samples ``(N, ...)``.
        labels: Their classes ``(N,)``; None without any.
        logits: What the module returned for them, ``(N, K)``.
        bounds: Of inputs.
        budgets: What attacks are given.
        compared: Whether budgets are compared with the distances between classes.
        seed: Of the draws of a random module.

    Example:
        >>> from robust_ext.demo.network import digits_network
        >>> x = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> logits = digits_network()(x)
        >>> y = logits.argmax(1) + 1
        >>> linf = ThreatModel(norm="linf", epsilon=0.1)
        >>> [one.code for one in judge_setup(digits_network(), x, y, logits, bounds=(0, 1), budgets=[linf])]
        ['label_offset']
    """
    logits = logits.detach()
    classes = logits.argmax(1) if labels is None else labels
    near = classes[:_ROWS] if compared else None
    scale = list(find_scale(inputs[:_ROWS], near, bounds=bounds, budgets=budgets))
    if labels is None:
        constant = _constant(logits, None)
        return [*([] if constant is None else [constant]), *scale]
    found = _accuracy_finding(module, inputs, labels, logits, bounds=bounds, seed=seed)
    return [*([] if found is None else [found]), *scale]


def _accuracy_finding(
    module: nn.Module, inputs: Tensor, labels: Tensor, logits: Tensor, *, bounds: tuple[float, float], seed: int
) -> Finding | None:
    right = logits.argmax(1) == labels
    if len(labels) < _FEWEST or _accuracy(right) > _GOOD:
        return None
    # Another reason for the same predictions: what comes out is the same for all inputs.
    constant = _constant(logits, labels)
    inside = any(isinstance(part, AdaptiveDefense) for part in module.modules())
    few = inputs[:_ROWS].clone(), labels[:_ROWS].clone()
    with guarded(module), seeded_globals(seed), torch.inference_mode(False), torch.no_grad():
        tried = [] if inside else list(input_corrections(module, *few, right[:_ROWS], bounds))
    alike = _believed(right, (*label_corrections(logits, labels), *tried))
    if constant is not None and alike and alike[0][0].enlarges and _confidence(logits) > _SURE:
        # Near the inputs' zero a model would not be sure: one class is added to, and larger inputs outdo that.
        return constant
    if alike:
        return _corrected(alike, right, inputs, constant)
    if constant is not None:
        return constant
    return _chance(right, labels, logits, inputs, tried=not inside)


def _believed(right: Tensor, judged: Iterable[Judged]) -> list[Judged]:
    """Corrections that are about as good as the best, of those that gain more than chance does, the simplest first."""
    gaining = []
    for correction, now in judged:
        before = right[: len(now)]
        gained, lost = int((now & ~before).sum()), int((before & ~now).sum())
        change, _, p_value = paired_difference(gained, lost, len(now))
        if change >= _GAIN and p_value < _P_VALUE and _accuracy(now) >= _REACHED:
            gaining.append((correction, now))
    best = max((_accuracy(now) for _, now in gaining), default=0.0)
    alike = [one for one in gaining if _accuracy(one[1]) >= best - _ALIKE]
    # Statistics that a layer begins with are a sign of their own.
    return sorted(alike, key=lambda one: one[0].code != "batch_statistics")


# Cause and remedy of each correction.
_CORRECTED = {
    "label_offset": ("The labels start at another number than the model's classes.", "Give {}."),
    "label_order": (
        "The labels are in another order than the model's classes or samples.",
        "Number labels as the model does, and keep them in the order of the samples.",
    ),
    "reversed_logits": (
        "The model's outputs are smallest for the right class: distances, energies or losses.",
        "Return scores that are largest for the predicted class, such as the negative of these outputs.",
    ),
    "input_scale": ("The inputs are of another scale than the model was trained on.", "Give the model {}."),
    "input_layout": ("The inputs' values are in another order than the model expects.", "Give {}."),
    "batch_statistics": (
        "The running statistics of BatchNorm are not those of the data.",
        "Load weights with their buffers, or set running_mean and running_var on training data.",
    ),
}


def _corrected(alike: Sequence[Judged], right: Tensor, inputs: Tensor, constant: Finding | None) -> Finding:
    """The finding of corrections that were tried and are alike, of which the first is suggested."""
    (correction, now), code = alike[0], alike[0][0].code
    cause, words = _CORRECTED[code]
    verb = "With" if code.startswith(("label", "input")) else "By"
    instead = f"{_share(now)} are classified right instead of {_share(right[: len(now)])}"
    evidence = [f"{verb} {correction.words}, {instead}."]
    if code.startswith("input"):
        same = [(one.words, 100 * _accuracy(rows)) for one, rows in alike[1:] if one.code == code][:_OTHERS]
        if same:
            evidence.append(f"About as good: {'; '.join(f'{one} gives {gained:.1f}%' for one, gained in same)}.")
        evidence.append(described(inputs))
    if constant is not None:
        evidence.append(constant.cause)
    inside = ": inside the model, so that bounds and epsilon stay in the units of inputs"
    inside = "" if correction.within or code != "input_scale" else inside
    if code == "input_scale" and _accuracy(now) < _GOOD:
        # A network that was trained too little may be better on other inputs too.
        cause = "The inputs are of another scale than the model was trained on, or it was trained too little."
    remedy = Remedy(words=words.format(f"{correction.words}{inside}"), paste=correction.paste)
    return Finding(code=code, cause=cause, evidence=tuple(evidence), remedies=(remedy,))


def _constant(logits: Tensor, labels: Tensor | None) -> Finding | None:
    """The finding of a model that predicts one class for every input."""
    found = logits.argmax(1)
    if len(found) < _FEWEST or int(found.min()) != int(found.max()):
        return None
    spread = float((logits - logits.mean(0)).abs().max())
    first = logits.topk(2, 1).values
    margin = float((first[:, 0] - first[:, 1]).mean())
    still = spread <= max(_ROUNDING * float(logits.abs().max()), _STILL * margin)
    missed = 0 if labels is None else int((labels != found).sum())
    if not still and (missed < _MISSED or 2 * missed < len(found)):
        return None
    if missed == 0 and labels is not None:
        return None
    evidence = [f"The prediction is class {int(found[0])} for all {len(found)} samples; logits vary by {spread:.3g}."]
    if labels is not None:
        evidence.append(f"Their labels are of {len({*labels.tolist()})} classes, {missed} of them another one.")
    return _broken("constant_output", f"The model predicts class {int(found[0])} for every input.", evidence)


def _chance(right: Tensor, labels: Tensor, logits: Tensor, inputs: Tensor, *, tried: bool) -> Finding | None:
    """The finding of predictions that say nothing about the labels, and of a model better than chance that would."""
    hits, count, classes = int(right.sum()), len(right), logits.shape[1]
    predicted = torch.nn.functional.one_hot(logits.argmax(1), classes).double()
    ranks = logits.argsort(1).argsort(1).double() / (classes - 1)
    by_hits, by_ranks = _above_chance(predicted, labels), _above_chance(ranks, labels)
    guessing = float(predicted.mean(0)[labels].mean())
    weak = guessing + _WEAK_ACCURACY * (1 - guessing)
    few = upper_bound(hits, count, error_rate=_ERROR) < weak
    if by_ranks is None or by_hits is None:
        # All labels, or all predictions, are the same.
        sure = hits == 0 and (1 - _WEAK_ACCURACY) ** count < _ERROR / 5
    else:
        (seen, perfect), seen_hits = by_ranks, by_hits[0]
        unseen = seen < min(_SEEN, _WEAK_RANKS * perfect - _SEEN)
        sure = seen < -2 * _SEEN or (seen_hits < _SEEN and seen < _SEEN and (unseen or few))
    confidence, predictions = _confidence(logits), int((predicted.sum(0) > 0).sum())
    flat = confidence < _FLAT / classes and 2 * predictions <= len({*labels.tolist()}) and hits < _UNTRAINED * count
    if not sure and not flat:
        return None
    guessed = f"predictions like these are right for {100 * guessing:.1f}% of labels like these by chance"
    overlap = float(torch.minimum(predicted.mean(0), _shares(labels, classes)).sum())
    evidence = [f"{_share(right)} are classified right; {guessed}.", described(inputs)]
    evidence.append(
        f"The model is sure of itself ({100 * confidence:.0f}% on average) and predicts the classes about as "
        "often as the labels have them, as where labels are shuffled."
        if overlap > 0.6 and confidence > 2 / classes and confidence > 0.5
        else f"Its highest probability is {100 * confidence:.0f}% on average, and its predictions are of "
        f"{predictions} classes."
    )
    if tried:
        evidence.append("No offset or order of labels, scale or layout of inputs that was tried does better.")
    return _broken("chance_accuracy", "The model's predictions are unrelated to the labels.", evidence)


def _broken(code: str, cause: str, evidence: Sequence[str]) -> Finding:
    words = {
        "constant_output": "Check that trained weights were loaded and that inputs reach the model in the scale it was "
        "trained on.",
        "chance_accuracy": "Check that labels and samples are in the same order, and that trained weights for these "
        "classes were loaded.",
    }[code]
    return Finding(code=code, cause=cause, evidence=tuple(evidence), remedies=(Remedy(words=words),))


def _above_chance(scores: Tensor, labels: Tensor) -> tuple[float, float] | None:
    """Return how far labels score above the same labels of other samples in ``(N, K)``, in deviations.

    The second number is that of labels that all have the score 1. None where all orders of labels are the same. The
    mean and the deviation over all orders are exact (Hoeffding, "A combinatorial central limit theorem", 1951).
    """
    count, weights = len(labels), _shares(labels, scores.shape[1])
    total = float(scores.gather(1, labels[:, None]).sum())
    of_class, of_row = scores.mean(0), scores @ weights
    mean = float(of_class @ weights)
    squares = ((scores - of_row[:, None] - of_class + mean).square() @ weights).sum()
    deviation = math.sqrt(float(squares) * count / max(count - 1, 1))
    if deviation < 1e-9:
        return None
    return (total - count * mean) / deviation, count * (1 - mean) / deviation


def _confidence(logits: Tensor) -> float:
    """The highest probability, on the mean."""
    return float(logits.double().softmax(1).amax(1).mean())


def _shares(labels: Tensor, classes: int) -> Tensor:
    """The share of each class, float64 ``(K,)``."""
    return labels.bincount(minlength=classes).double() / len(labels)


def _share(right: Tensor) -> str:
    return f"{int(right.sum())} of {len(right)} samples ({100 * _accuracy(right):.1f}%)"


def _accuracy(right: Tensor) -> float:
    return float(right.double().mean())


def described(inputs: Tensor) -> str:
    """Range, mean and deviation of inputs, and what they look like."""
    least, most, mean, std = (float(one) for one in (inputs.min(), inputs.max(), inputs.mean(), inputs.std()))
    looks = ""
    if least >= 0 and most <= 1 / 200:
        looks = ", as pixels that were divided by 255 twice"
    elif least >= 0 and 0.5 < most <= 1:
        looks = ", as pixels that were divided by 255"
    elif least >= 0 and 100 < most <= 255:
        looks = ", as pixels in [0, 255]"
    elif least < 0 and abs(mean) < 0.5 and 0.5 < std < 1.5 and most > 1:
        looks = ", as inputs that were standardised"
    return f"The inputs go from {least:.4g} to {most:.4g}, mean {mean:.3g}, standard deviation {std:.3g}{looks}."
