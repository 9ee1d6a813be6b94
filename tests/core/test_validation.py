import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels, check_number

NAN, INF = math.nan, math.inf


def refused(message):
    return pytest.raises(InvalidArgumentError, match="^" + message)


@pytest.mark.parametrize("value", [0, 5, np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)])
def test_integers_come_back_plain(value):
    number = check_integer("count", value, minimum=0)
    assert (type(number), number) == (int, int(value))


@pytest.mark.parametrize(
    "value", [1.0, "1", None, True, np.True_, [1], np.array([1, 2]), torch.tensor(1.5), torch.ones(2), np.array(1.5)]
)
def test_what_is_no_integer_is_refused(value):
    with refused(r"count: got .*, expected an integer of at least 0 and at most 9$") as caught:
        check_integer("count", value, minimum=0, maximum=9)
    assert (caught.value.argument, caught.value.got is value) == ("count", True)


@example(5, 0, 4)
@example(-1, 0, 4)
@given(st.integers(-20, 20), st.integers(-10, 10), st.integers(-10, 10))
def test_integers_of_an_interval(value, minimum, maximum):
    if minimum <= value <= maximum:
        assert check_integer("n", value, minimum=minimum, maximum=maximum) == value
    else:
        with refused(rf"n: got {value}, expected an integer of at least {minimum} and at most {maximum}$"):
            check_integer("n", value, minimum=minimum, maximum=maximum)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.25), np.int64(1), torch.tensor(0.5), np.float64(0)])
def test_numbers_come_back_plain(value):
    number = check_number("share", value, minimum=0, maximum=1)
    assert (type(number), number) == (float, float(value))


@pytest.mark.parametrize(
    "value",
    [NAN, INF, -INF, "0.5", None, True, [0.5], torch.ones(2), np.ones(2), 10**400, 1j, np.complex128(1), b"1", {}],
)
def test_what_is_no_number_is_refused(value):
    with refused(r"share: got [\s\S]*, expected a finite number in \[-inf, inf\]$"):
        check_number("share", value)


@example(0.0, (True, False))
@example(1.0, (False, True))
@given(st.floats(-2, 2), st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
def test_numbers_of_an_interval(value, ends):
    within = (value > 0 or (value == 0 and not ends[0])) and (value < 1 or (value == 1 and not ends[1]))
    options = {"minimum": 0, "maximum": 1, "open_minimum": ends[0], "open_maximum": ends[1]}
    if within:
        assert check_number("share", value, **options) == value
    else:
        left, right = "(" if ends[0] else "[", ")" if ends[1] else "]"
        with pytest.raises(InvalidArgumentError) as caught:
            check_number("share", value, **options)
        assert str(caught.value) == f"share: got {value!r}, expected a finite number in {left}0, 1{right}"


def test_choices():
    assert check_choice("norm", "l2", ("l1", "l2")) == "l2"
    for value in ("L2", "", 2, None, ["l2"]):
        with pytest.raises(InvalidArgumentError) as caught:
            check_choice("norm", value, ("l1", "l2"))
        assert str(caught.value) == f"norm: got {value!r}, expected one of 'l1', 'l2'"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_become_contiguous_float32(dtype):
    given_inputs = torch.rand(4, 3, 5).to(dtype).transpose(1, 2).requires_grad_()
    inputs = check_inputs("inputs", given_inputs, bounds=(0, 1))
    assert inputs.is_contiguous()
    assert not inputs.requires_grad
    torch.testing.assert_close(inputs, given_inputs.detach().float(), rtol=0, atol=0)
    assert check_inputs("inputs", given_inputs[:0], bounds=(0, 1)).shape == (0, 5, 3)


ZEROS = torch.zeros(2, 3)
WRONG_INPUTS = [
    (np.array(["a"]), "numpy array of dtype <U1"),
    ([[0.0]], "list"),
    *((ZEROS.to(kind), f"dtype {kind}") for kind in (torch.uint8, torch.int64, torch.complex64)),
    (ZEROS.long().to_sparse(), "dtype torch.int64"),
    *((torch.zeros(shape), re.escape(f"shape {shape}")) for shape in ((3,), (), (2, 0))),
    *((torch.tensor([[0.0, value]]), "NaN or infinite") for value in (NAN, INF)),
    (torch.tensor([[0.0, 255.0]]), r"values in \[0, 255\], expected values in the threat .* \[0, 1\]"),
    *((torch.tensor([[value, 0.5]]), "values in") for value in (-0.1, 1.001)),
]


@pytest.mark.parametrize(("inputs", "message"), WRONG_INPUTS)
def test_wrong_inputs_are_refused(inputs, message):
    with refused(f"x: got .*{message}"):
        check_inputs("x", inputs, bounds=(0, 1))


@given(st.floats(-5, 0), st.floats(0.01, 5))
def test_inputs_clipped_to_any_bounds_are_in_them(low, high):
    """Bounds are float64 and inputs are float32, so a value at a bound may lie just outside it."""
    for dtype in (torch.float32, torch.float64):
        inputs = torch.tensor([[-9.0, 9.0]], dtype=dtype).clamp(low, high)
        assert check_inputs("x", inputs, bounds=(low, high)).shape == (1, 2)
    with refused("x: got values"):
        check_inputs("x", torch.tensor([[high + 1e-5 * max(-low, high)]]), bounds=(low, high))


@given(st.floats(-1, 1), st.floats(0.05, 300), st.sampled_from([1.0, 255.0]))
def test_standardised_inputs_are_in_standardised_bounds(mean, std, largest):
    """The bounds are standardised as float64, the inputs as float32: rounding puts some outside."""
    pixels = torch.tensor([[0.0, largest]])
    bounds = ((0.0 - mean) / std, (largest - mean) / std)
    assert check_inputs("x", (pixels - mean) / std, bounds=bounds).shape == (1, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_labels_become_int64(dtype):
    labels = check_labels("labels", torch.tensor([0, 2, 1]).to(dtype), samples=3, classes=3)
    assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 2, 1])
    assert check_labels("labels", torch.zeros(0, dtype=dtype), samples=0).shape == (0,)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_numpy_inputs_are_taken_like_tensors(dtype):
    given_inputs = np.random.default_rng(0).random((5, 4, 3)).astype(dtype).transpose(2, 0, 1)
    given_inputs.flags.writeable = False
    inputs = check_inputs("inputs", given_inputs, bounds=(0, 1))
    assert torch.equal(inputs, torch.tensor(given_inputs.astype("f4")))
    for width in ("u1", "i8"):
        with refused(r"x: got dtype torch.*, expected a floating point tensor \(float32\); divide pixels of 0..255"):
            check_inputs("x", given_inputs.astype(width), bounds=(0, 1))


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f4", "f8", "?"])
def test_numpy_labels_are_taken_as_indices_or_one_hot(dtype):
    one_hot = np.eye(4)[[0, 3, 2]].astype(dtype)
    for labels in (one_hot, torch.from_numpy(one_hot)):
        found = check_labels("labels", labels, samples=3, classes=4)
        assert (found.dtype, found.tolist()) == (torch.int64, [0, 3, 2])
    if np.dtype(dtype).kind in "iu":
        assert check_labels("labels", np.array([0, 3, 2], dtype=dtype), samples=3, classes=4).tolist() == [0, 3, 2]


WRONG_LABELS = [
    (np.array([0.0, 1.0]), "dtype torch.float64"),
    *((one, r"shape \(2, .\), expected class indices") for one in (np.array([[0.5, 0.5], [0, 1]]), np.ones((2, 3)))),
    (np.eye(3), r"shape \(3,\), expected shape \(2,\)"),
    ([0, 1], "list"),
    *((torch.zeros(2).to(kind), f"dtype {kind}") for kind in (torch.float32, torch.bool, torch.complex64)),
    (torch.tensor([0, 1, 1]), r"shape \(3,\)"),
    (torch.tensor([[0], [1]]), r"shape \(2, 1\)"),
    *((torch.tensor([low, high]), f"labels in {low}..{high}, expected .*, 3") for low, high in ((-1, 1), (0, 3))),
]


@pytest.mark.parametrize(("labels", "message"), WRONG_LABELS)
def test_wrong_labels_are_refused(labels, message):
    with refused(f"y: got .*{message}"):
        check_labels("y", labels, samples=2, classes=3)


def test_labels_without_a_number_of_classes():
    assert check_labels("y", torch.tensor([10**6]), samples=1).tolist() == [10**6]
    with refused(r"y: got labels in -1..-1, expected labels of at least 0$"):
        check_labels("y", torch.tensor([-1]), samples=1)
