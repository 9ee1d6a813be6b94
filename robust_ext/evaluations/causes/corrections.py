"""Corrections of labels, inputs and outputs: what would make a model right on samples that it gets wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Pixels / 255 / 255 are below; other inputs up to _UNIT are meant to be in [0, 1].
_TINY, _UNIT = 1 / 200, 1.5
# Clean samples come this near to both ends of their range, as a part of it, and their second differences along an
# axis are at most this part of those of white noise.
_ROOM, _SMOOTH = 0.07, 2 / 3
# Rows on which corrections of inputs are tried first, and how many more have to be right to go on.
_FIRST, _MORE = 16, 4
# Constants by which images are standardised most often, of ImageNet, CIFAR-10 and MNIST: mean and deviation.
_CONSTANTS = {
    3: (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
    1: (((0.1307,), (0.3081,)),),
}

_TORCH = "import torch"
_AS_TENSOR = f"{_TORCH}\ninputs = torch.as_tensor(inputs)"
_NEGATED = """import torch

class Negated(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return -self.model(x)

model = Negated({module}).eval()"""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A change of the setup under which more samples are classified right.

    Args:
        code: The finding it belongs to, of :data:`robust_ext.evaluations.causes.finding.CODES`.
        words: What is given to the model or compared with, as in ``"labels - 1"``.
        paste: Lines that make the change, as of :class:`robust_ext.evaluations.causes.finding.Remedy`.
        within: Whether inputs are to be changed, and not what the model makes of them.
        enlarges: Whether inputs are larger then.
    """

    code: str
    words: str
    paste: str = ""
    within: bool = True
    enlarges: bool = False


Judged = tuple[Correction, Tensor]
"""A correction, and which samples are right with it, bool ``(N,)``."""


def label_corrections(logits: Tensor, labels: Tensor) -> Iterator[Judged]:
    """Correct labels, judged by the logits ``(N, K)`` that are known already, the simplest first."""
    found, classes = logits.argmax(1), logits.shape[1]
    if len({*found.tolist()}) < 2 or len({*labels.tolist()}) < 2:
        # Any labels would do.
        return
    best, wrapped = _most_common(found - labels), _most_common((found - labels) % classes)
    offset = f"labels {'+' if best > 0 else '-'} {abs(best)}"
    for number, words, other in (
        (best, offset, labels + best),
        (wrapped, f"(labels + {wrapped}) % {classes}", (labels + wrapped) % classes),
    ):
        if number:
            yield Correction(code="label_offset", words=words, paste=f"labels = {words}"), found == other
    for rows, words, call in (
        (labels.roll(1), "the label of the sample before", "roll(1)"),
        (labels.roll(-1), "the label of the sample after", "roll(-1)"),
        (labels.flip(0), "the labels in reversed order", "flip(0)"),
    ):
        paste = f"{_TORCH}\nlabels = torch.as_tensor(labels).{call}"
        yield Correction(code="label_order", words=words, paste=paste), found == rows
    renumbered, numbering = _renumbered(found.tolist(), labels.tolist())
    moved = [f"{label} is class {one}" for label, one in numbering.items() if label != one]
    words = f"classes numbered otherwise ({', '.join(moved[:4])}{', ...' if len(moved) > 4 else ''})"
    paste = f"{_TORCH}\nnumbering = {numbering}\nlabels = torch.tensor([numbering[int(one)] for one in labels])"
    right = torch.tensor(renumbered, device=labels.device)
    yield Correction(code="label_order", words=words, paste=paste), right
    words = "the smallest output in place of the largest"
    yield Correction(code="reversed_logits", words=words, paste=_NEGATED), logits.argmin(1) == labels


def _most_common(offsets: Tensor) -> int:
    """The number that is there most often; of several, the nearest to 0."""
    counts = Counter[int](offsets.tolist())
    return min(counts, key=lambda value: (-counts[value], abs(value), value))


def _renumbered(found: Sequence[int], labels: Sequence[int]) -> tuple[list[bool], dict[int, int]]:
    """Return a mask of right samples under the label map of the other samples, and that map.

    A class stands for one label, and each sample is judged without its own.
    """
    counts = defaultdict[int, Counter[int]](Counter)
    for one, label in zip(found, labels, strict=True):
        counts[one][label] += 1
    # The class that is predicted for each label most often.
    owners = {label: max(counts, key=lambda one: (counts[one][label], -one)) for label in sorted(set(labels))}
    right = []
    for one, label in zip(found, labels, strict=True):
        others = counts[one] - Counter([label])
        meant = max(others, key=lambda other: (others[other], -other), default=None)
        right.append(meant == label and owners[label] == one)
    return right, owners


def input_corrections(
    module: nn.Module, inputs: Tensor, labels: Tensor, right: Tensor, bounds: tuple[float, float]
) -> Iterator[Judged]:
    """Other inputs, judged by forward passes; those that do no better on a few rows are dropped.

    Args:
        module: From inputs to logits; it may draw random numbers and is left to the caller to guard.
        inputs: ``(N, ...)``.
        labels: Their classes.
        right: Which of them are classified right.
        bounds: Of inputs.
    """
    # Those that are wrong first: a correction that fixes few of them is dropped.
    order = right.int().argsort(stable=True)
    first, rest = order[:_FIRST], order[_FIRST:]
    for correction, change in _changes(inputs, bounds):
        now = torch.zeros_like(right)
        now[first] = _judge(module, change(inputs[first]), labels[first])
        if int(now.sum()) >= int(right[first].sum()) + _MORE:
            if len(rest):
                now[rest] = _judge(module, change(inputs[rest]), labels[rest])
            yield correction, now
    # Statistics of other data do better on data that is hard, too; those that a layer begins with are no data's.
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if any(map(_initial, norms)) and len(inputs) >= _FIRST:
        for part in norms:
            part.training = True
        now = _judge(module, inputs, labels)
        yield Correction(code="batch_statistics", words="the statistics of the batch itself"), now


def _initial(part: nn.modules.batchnorm._BatchNorm) -> bool:
    """Return whether the running statistics are those that a layer begins with."""
    mean, variance = part.running_mean, part.running_var
    return mean is not None and variance is not None and not bool(mean.any()) and bool((variance == 1).all())


def _judge(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return a mask of right rows, bool ``(n,)``; of none where the module raises or returns something else."""
    try:
        logits = module(inputs)
        return logits.argmax(1) == labels if logits.dim() == 2 else torch.zeros_like(labels, dtype=torch.bool)
    except Exception:
        return torch.zeros_like(labels, dtype=torch.bool)


def _changes(inputs: Tensor, bounds: tuple[float, float]) -> Iterator[tuple[Correction, Callable[[Tensor], Tensor]]]:
    """Corrections of inputs that their range allows, each with what makes it."""
    seen = set[str]()
    for words, slope, shift in _affine(inputs, bounds):
        if (numbers := _shown([*slope.flatten().tolist(), *shift.flatten().tolist()])) in seen:
            continue
        seen.add(numbers)
        corrected = slope * inputs + shift
        room = 1e-4 * (bounds[1] - bounds[0])
        # Inputs that fill the bounds are what bounds and epsilon are about: then the model's units are others.
        within = bool(corrected.min() >= bounds[0] - room) and bool(corrected.max() <= bounds[1] + room)
        within = within and 2 * float(inputs.max() - inputs.min()) < bounds[1] - bounds[0]
        line = f"{_AS_TENSOR}\ninputs = {words}"
        if not within:
            mean, std = (-shift / slope).flatten().tolist(), (1 / slope).expand_as(shift).flatten().tolist()
            line = (
                "import robust_ext\nfrom robust_ext.models import Normalized\n"
                f"model = Normalized({{module}}, mean={_shown(mean)}, std={_shown(std)})"
            )
        larger = bool((slope > 1).any())
        correction = Correction(code="input_scale", words=words, paste=line, within=within, enlarges=larger)
        yield correction, lambda x, slope=slope, shift=shift: slope * x + shift  # type: ignore[misc]
    for words, change in _layouts(inputs, bounds):
        yield Correction(code="input_layout", words=words, paste=f"{_AS_TENSOR}\ninputs = {words}"), change


def _affine(inputs: Tensor, bounds: tuple[float, float]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, slopes and shifts, each of a shape that goes with the inputs' channels."""
    least, most = float(inputs.min()), float(inputs.max())
    shape = (1, -1, *(1,) * (inputs.dim() - 2))

    def numbers(value: float | Sequence[float]) -> Tensor:
        values = torch.as_tensor(value, dtype=inputs.dtype, device=inputs.device)
        return values.reshape(shape if values.dim() else [1] * inputs.dim())

    # Other units are plain to see. Accuracy alone does not show the rest: contrast helps on noise, haze or glare.
    if most <= _TINY:
        yield "inputs * 255", numbers(255.0), numbers(0.0)
    if most > 20:
        yield "inputs / 255", numbers(1 / 255), numbers(0.0)
    if not _clear(inputs, bounds):
        return
    for words, possible, slope, shift in (
        ("2 * inputs - 1", least >= 0 and most <= 1, 2.0, -1.0),
        ("(inputs + 1) / 2", -1 <= least < 0 and most <= 1, 0.5, 0.5),
        ("inputs / 127.5 - 1", least >= 0 and most > 20, 1 / 127.5, -1.0),
        ("(inputs + 1) * 127.5", -1 <= least < 0 and most <= 1, 127.5, 127.5),
        ("inputs + 0.5", -0.5 <= least < 0 and most <= 0.5, 1.0, 0.5),
    ):
        if possible:
            yield words, numbers(slope), numbers(shift)
    # Hard data may be of little contrast, and do better with more: then nothing here is tried.
    if least < 0 or most > 2:
        yield (
            f"(inputs {'+' if least < 0 else '-'} {abs(least):.4g}) / {most - least:.4g}",
            numbers(1 / (most - least)),
            numbers(-least / (most - least)),
        )
    channels = inputs.shape[1] if inputs.dim() == 4 else 1
    axes = (0, 2, 3) if inputs.dim() == 4 else tuple(range(inputs.dim()))
    own = (inputs.mean(axes).reshape(-1).tolist(), inputs.std(axes).clamp_min(1e-12).reshape(-1).tolist())
    whole = least >= 0 and (0.9 < most <= 1 or most > 200)
    for mean, std in (*_CONSTANTS.get(channels, ()), *([own] if whole else [])):
        means, stds = numbers(list(mean)), numbers(list(std))
        first, second = _shown(mean, inputs.dim()), _shown(std, inputs.dim())
        if whole:
            yield f"(inputs - {first}) / {second}", 1 / stds, -means / stds
        if whole or least < 0:
            yield f"inputs * {second} + {first}", stds, means
    # Inputs in [0, 1] were divided by 255 on purpose: the last thing to suggest.
    if _TINY < most <= _UNIT:
        yield "inputs * 255", numbers(255.0), numbers(0.0)


def _clear(inputs: Tensor, bounds: tuple[float, float]) -> bool:
    """Return whether samples fill their range and vary less between neighbours than noise: no corruption."""
    least, most = float(inputs.min()), float(inputs.max())
    low, high = min(least, 0.0), 1.0 if least >= 0 and _TINY < most <= _UNIT else most
    if least < 0 and abs(min(least - bounds[0], bounds[1] - most)) <= _ROOM * (bounds[1] - bounds[0]):
        # Inputs inside the bounds that reach one of them are about the bounds.
        low, high = bounds
    flat, room = inputs.reshape(len(inputs), -1), _ROOM * (high - low)
    if most <= least or float(flat.amin(1).median()) > low + room or float(flat.amax(1).median()) < high - room:
        return False
    rough, limit = inputs.double(), float(inputs.double().std())
    for axis in range(max(1, inputs.dim() - 2), inputs.dim()):
        if inputs.shape[axis] > 2:
            rough, limit = rough.diff(n=2, dim=axis) / 6**0.5, limit * _SMOOTH
    return float(rough.std()) <= limit


def _shown(values: Sequence[float], axes: int = 0) -> str:
    """Numbers as they are typed, one where all are the same; with ``axes`` as a tensor that goes with inputs."""
    words = [f"{value + 0.0:.4g}" for value in values]
    if len({*words}) == 1:
        return words[0]
    several = ", ".join(words)
    return f"torch.tensor([{several}]).view(-1{', 1' * (axes - 2)})" if axes else f"({several})"


def _layouts(inputs: Tensor, bounds: tuple[float, float]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Values in other places, or turned over."""
    low, high = bounds
    yield f"{low + high:g} - inputs", lambda x: low + high - x
    if inputs.dim() != 4:
        return
    _, channels, height, width = inputs.shape
    if height == width > 1:
        yield "inputs.mT", lambda x: x.mT
    if height > 1:
        yield "inputs.flip(2)", lambda x: x.flip(2)
    if channels > 1:
        if channels == 3:
            yield "inputs.flip(1)", lambda x: x.flip(1)
        moved = f"inputs.reshape(-1, {height}, {width}, {channels}).permute(0, 3, 1, 2)"
        yield moved, lambda x: x.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
        yield "inputs.permute(0, 2, 3, 1).reshape(inputs.shape)", lambda x: x.permute(0, 2, 3, 1).reshape(x.shape)
