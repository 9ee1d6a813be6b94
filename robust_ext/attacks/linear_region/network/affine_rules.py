"""How affine functions become steps: in one way, by what they return for drawn inputs and automatic differentiation.

Only functions that are affine in some of their arguments are let in by name. Whether a call is, in all that depends on
the input together, and whether it treats rows alike, is then found with numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.affine import AffineMap
from robust_ext.attacks.linear_region.network.calls import Call, PerRow, snapshot, tensors_in
from robust_ext.attacks.linear_region.network.chosen_map import ChosenMap
from robust_ext.attacks.linear_region.network.tape import Tape

Function = Callable[..., Any]
_ROWS = "it mixes the rows of the batch or moves the batch dimension"
_PRODUCT = "it is not affine in what depends on the input, as where two such results are multiplied"


def affine_call(tape: Tape, call: Call) -> Any:
    """Record a call that is affine in the tensors that depend on the input, with choices and constants held."""
    dependent = list({id(t): t for t in tensors_in((call.args, call.kwargs)) if tape.depends(t)}.values())
    moving = [t for t in dependent if not tape.is_chosen(t)]
    chosen = [t for t in dependent if tape.is_chosen(t)]
    if len({one.shape[0] for one in dependent}) > 1:
        raise tape.refusal("it combines results with different batch dimensions")
    numbers = [tape.number(one) for one in (*moving, *chosen)]
    before = [snapshot(one) for one in (*moving, *chosen)]
    found = _as_functions(tape, call, (*moving, *chosen))
    given = call.run()
    results = _results(tape, given)
    function = _row_wise(tape, found, before, len(moving), results)
    for place, result in enumerate(results):
        part = function if isinstance(given, Tensor) else partial(_at, function, place)
        tape.bind(result, _emitted(tape, call, part, before, len(moving), numbers))
    return given


def _emitted(tape: Tape, call: Call, part: Function, before: list[Tensor], moving: int, numbers: list[int]) -> int:
    if not moving:
        return tape.emit(AffineMap(part), *numbers, chosen=True)
    if moving < len(before):
        return tape.emit(ChosenMap(part, before[:moving], before[moving:], tape.rows), *numbers)
    # A skip connection returns its gradient twice, which needs no graph.
    operands = (call.input, call.get(1, "other"))
    shapes = {one.shape if isinstance(one, Tensor) else None for one in operands}
    skip = call.name == "add" and moving == 2 and len(shapes) == 1 and call.get(2, "alpha") is None
    transpose = (lambda gradient: (gradient, gradient)) if skip else None
    return tape.emit(AffineMap(part, before, transpose), *numbers)


def _results(tape: Tape, given: Any) -> list[Tensor]:
    results = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(result, Tensor) for result in results):
        raise tape.refusal(f"its result is {type(given).__name__}, no tensor, so what follows from it cannot be seen")
    for result in results:
        tape.check_kind(result)
    return results


def _at(function: Function, place: int, *inputs: Tensor) -> Tensor:
    out: Tensor = function(*inputs)[place]
    return out


def _as_functions(tape: Tape, call: Call, dependent: Sequence[Tensor]) -> list[Function]:
    """The call as a function of what depends on the input: with constants as they are, and one row of each repeated.

    Which of the two it is depends on what a constant's first dimension means. The second has a fault in its place
    where the rows of a constant are not the same.
    """
    entries, differ = dependent[0].shape[0], False

    def one_row(constant: Tensor) -> Tensor | PerRow:
        nonlocal differ
        if constant.dim() == 0 or constant.shape[0] != entries:
            return snapshot(constant)
        differ |= not bool((constant == constant[:1]).all())
        return PerRow(constant.detach()[:1].clone())

    plain, repeated = call.function_of(dependent, snapshot), call.function_of(dependent, one_row)

    def faulty(*inputs: Tensor) -> Any:
        raise tape.refusal("a constant has a different value in each row of the batch")

    return [plain, faulty if differ else repeated]


def _row_wise(
    tape: Tape, functions: Sequence[Function], before: Sequence[Tensor], moving: int, results: Sequence[Tensor]
) -> Function:
    """The first of the functions that returns what the call returned and treats rows alike; affine in the first inputs.

    The drawn inputs have a number of rows that is no other size.
    """
    sizes = {*itertools.chain.from_iterable(one.shape for one in (*before, *results))}
    count = next(number for number in itertools.count(3) if number not in sizes)
    generator = torch.Generator().manual_seed(0)
    first, second = ([_drawn(one, count, place < moving, generator) for place, one in enumerate(before)] for _ in "ab")
    kinds = [one.dtype for one in (*before[:moving], *results) if one.is_floating_point()]
    # Convolutions on GPUs may round to ten bits.
    rounding = 1e-9 if {*kinds} <= {torch.float64} else 5e-3 if before[0].is_cuda else 1e-4
    close = partial(_close, rounding=rounding)
    between = [torch.lerp(a, b, -1.5) for a, b in zip(first[:moving], second, strict=False)]
    for function in functions:
        try:
            with torch.no_grad():
                recorded, out = _outputs(function, before), _outputs(function, first)
                alone = [_outputs(function, [one[row : row + 1] for one in first]) for row in (0, count - 1)]
                others = _outputs(function, [*second[:moving], *first[moving:]])
                mixed = _outputs(function, [*between, *first[moving:]])
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if [one.shape for one in out] != [(count, *one.shape[1:]) for one in results] or not (
            close(recorded, [one.detach() for one in results])
            and close([one[:1] for one in out], alone[0])
            and close([one[-1:] for one in out], alone[1])
        ):
            continue
        if moving and not close(mixed, [torch.lerp(a, b, -1.5) for a, b in zip(out, others, strict=True)]):
            raise tape.refusal(_PRODUCT)
        return function
    raise tape.refusal(_ROWS)


def _outputs(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    given = function(*inputs)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _drawn(example: Tensor, count: int, moving: bool, generator: torch.Generator) -> Tensor:
    """Random rows: numbers, or for what is chosen entries of what was recorded, which are valid wherever these are."""
    shape = (count, *example.shape[1:])
    if moving:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(example)
    if example.dtype == torch.bool or not example.numel():
        return (torch.rand(shape, generator=generator) < 0.5).to(example)
    places = torch.randint(example.numel(), shape, generator=generator).to(example.device)
    return example.flatten()[places]


def _close(first: Sequence[Tensor], second: Sequence[Tensor], *, rounding: float) -> bool:
    """Whether numbers are the same but for rounding, relative to the largest of each tensor; or both no numbers."""
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        if not one.numel():
            continue
        lost = ~(one.isfinite() | other.isfinite())
        one, other = one.masked_fill(lost, 0), other.masked_fill(lost, 0)
        if not float((one - other).abs().max()) <= rounding * (1 + float(one.abs().max())):
            return False
    return True


_SUMS = {"add", "sub", "subtract", "rsub", "neg", "negative", "positive", "lerp", "diff", "cumsum", "mean", "sum"}
_PRODUCTS = {
    *("mul", "multiply", "div", "divide", "true_divide", "addcmul", "addcdiv"),
    *("einsum", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "inner", "tensordot", "bilinear", "kron"),
}
_SPATIAL = {
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate", "upsample", "grid_sample", "unfold", "fold", "pad"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "channel_shuffle"),
    *("pixel_shuffle", "pixel_unshuffle", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("upsample_bilinear2d", "upsample_nearest2d"),
}
_MOVES = {
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "repeat", "tile"),
    *("flip", "fliplr", "flipud", "roll", "rot90", "diagonal", "tril", "triu", "repeat_interleave"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
}
_INDEXING = {
    *("narrow", "select", "slice", "index_select", "gather", "take_along_dim", "split", "chunk", "unbind"),
    *("tensor_split", "hsplit", "vsplit", "dsplit", "where", "masked_fill", "index_fill", "index_copy", "index_add"),
    *("scatter", "scatter_add", "select_scatter", "slice_scatter"),
}

RULES: dict[str, Callable[[Tape, Call], Any]] = {
    **dict.fromkeys((*_SUMS, *_PRODUCTS, *_SPATIAL, *_MOVES, *_INDEXING), affine_call),
}
