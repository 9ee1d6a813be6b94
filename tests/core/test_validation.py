"""What users give: numbers, choices, inputs, labels, and texts that name an object and its arguments."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import parse_call
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels, check_number

NAN, INF = math.nan, math.inf


def refused(message):
    return pytest.raises(InvalidArgumentError, match="^" + message)


def test_numbers_come_back_plain_and_what_is_none_is_refused():
    for value in (0, 5, np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)):
        number = check_integer("count", value, minimum=0)
        assert (type(number), number) == (int, int(value))
    for value in (1.0, "1", None, True, np.True_, [1], np.array([1, 2]), torch.tensor(1.5), torch.ones(2)):
        with refused(r"count: got .*, expected an integer of at least 0 and at most 9$") as caught:
            check_integer("count", value, minimum=0, maximum=9)
        assert (caught.value.argument, caught.value.got is value) == ("count", True)
    for value in (1, 0.5, np.float32(0.25), np.int64(1), torch.tensor(0.5), np.float64(0)):
        number = check_number("share", value, minimum=0, maximum=1)
        assert (type(number), number) == (float, float(value))
    for value in (NAN, INF, -INF, "0.5", None, True, [0.5], torch.ones(2), np.ones(2), 10**400, 1j, b"1", {}):
        with refused(r"share: got [\s\S]*, expected a finite number in \[-inf, inf\]$"):
            check_number("share", value)
    assert check_choice("norm", "l2", ("l1", "l2")) == "l2"
    for value in ("L2", "", 2, None, ["l2"]):
        with refused(re.escape(f"norm: got {value!r}, expected one of 'l1', 'l2'")):
            check_choice("norm", value, ("l1", "l2"))


@example(5, 0, 4)
@example(-1, 0, 4)
@given(st.integers(-20, 20), st.integers(-10, 10), st.integers(-10, 10))
def test_integers_of_an_interval(value, minimum, maximum):
    if minimum <= value <= maximum:
        assert check_integer("n", value, minimum=minimum, maximum=maximum) == value
    else:
        with refused(rf"n: got {value}, expected an integer of at least {minimum} and at most {maximum}$"):
            check_integer("n", value, minimum=minimum, maximum=maximum)


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
        with refused(re.escape(f"share: got {value!r}, expected a finite number in {left}0, 1{right}") + "$"):
            check_number("share", value, **options)


def test_inputs_become_contiguous_float32():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given_inputs = torch.rand(4, 3, 5).to(dtype).transpose(1, 2).requires_grad_()
        inputs = check_inputs("inputs", given_inputs, bounds=(0, 1))
        assert inputs.is_contiguous()
        assert not inputs.requires_grad
        torch.testing.assert_close(inputs, given_inputs.detach().float(), rtol=0, atol=0)
        assert check_inputs("inputs", given_inputs[:0], bounds=(0, 1)).shape == (0, 5, 3)
    for dtype in ("f2", "f8", ">f4"):
        given_inputs = np.random.default_rng(0).random((5, 4, 3)).astype(dtype).transpose(2, 0, 1)
        given_inputs.flags.writeable = False
        inputs = check_inputs("inputs", given_inputs, bounds=(0, 1))
        assert torch.equal(inputs, torch.tensor(given_inputs.astype("f4")))


ZEROS = torch.zeros(2, 3)
WRONG_INPUTS = [
    (np.array(["a"]), "numpy array of dtype <U1"),
    ([[0.0]], "list"),
    (
        np.zeros((2, 3), "u1"),
        r"dtype torch.uint8, expected a floating point tensor \(float32\); divide pixels of 0..255",
    ),
    *((ZEROS.to(kind), f"dtype {kind}") for kind in (torch.uint8, torch.int64, torch.complex64)),
    (ZEROS.long().to_sparse(), "dtype torch.int64"),
    *((torch.zeros(shape), re.escape(f"shape {shape}")) for shape in ((3,), (), (2, 0))),
    *((torch.tensor([[0.0, value]]), "NaN or infinite") for value in (NAN, INF)),
    (torch.tensor([[0.0, 255.0]]), r"values in \[0, 255\], expected values in the threat .* \[0, 1\]"),
    *((torch.tensor([[value, 0.5]]), "values in") for value in (-0.1, 1.001)),
]
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


def test_wrong_inputs_and_labels_are_refused():
    for inputs, message in WRONG_INPUTS:
        with refused(f"x: got .*{message}"):
            check_inputs("x", inputs, bounds=(0, 1))
    for labels, message in WRONG_LABELS:
        with refused(f"y: got .*{message}"):
            check_labels("y", labels, samples=2, classes=3)
    with refused(r"y: got labels in -1..-1, expected labels of at least 0$"):
        check_labels("y", torch.tensor([-1]), samples=1)


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


def test_labels_are_taken_as_indices_of_any_type_or_one_hot():
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        labels = torch.tensor([0, 2, 1]).to(dtype)
        for given_labels in (labels, labels.numpy()):
            found = check_labels("labels", given_labels, samples=3, classes=3)
            assert (found.dtype, found.tolist()) == (torch.int64, [0, 2, 1])
        assert check_labels("labels", torch.zeros(0, dtype=dtype), samples=0).shape == (0,)
    for dtype in ("u1", "i8", "f4", "f8", "?"):
        one_hot = np.eye(4)[[0, 3, 2]].astype(dtype)
        for labels in (one_hot, torch.from_numpy(one_hot)):
            assert check_labels("labels", labels, samples=3, classes=4).tolist() == [0, 3, 2]
    assert check_labels("y", torch.tensor([10**6]), samples=1).tolist() == [10**6]


def test_a_text_is_read_as_scope_name_and_literals():
    text = "foolbox:LinfPGD(steps=40, rel_stepsize=-.1, a=8/255, b=None, c=True, d='x:y(1)', "
    text += "e=(1, [2]), f={'k': -3}, g=+2)"
    spec = parse_call(text)
    assert (spec.scope, spec.name, spec.text) == ("foolbox", "LinfPGD", text)
    assert spec.arguments == {
        **{"steps": 40, "rel_stepsize": -0.1, "a": 8 / 255, "b": None, "c": True, "d": "x:y(1)"},
        **{"e": (1, [2]), "f": {"k": -3}, "g": 2},
    }
    for text, scope, name in (
        ("foolbox:FGSM", "foolbox", "FGSM"),
        (" foolbox : FGSM ( ) ", "foolbox", "FGSM"),
        ("C:\\files\\mine.py:make(depth=3)", "C:\\files\\mine.py", "make"),
        ("a (1)/mine.py:Group.make(depth=3)", "a (1)/mine.py", "Group.make"),
        ("a.b:make(x='c:d(1)')", "a.b", "make"),
    ):
        spec = parse_call(text)
        assert (spec.scope, spec.name) == (scope, name)
    # Names of models may be any text without parentheses.
    spec = parse_call(" hf : a folder/vit-base.v2 (num_labels=10, name='a:b(1)')", any_name=True)
    assert (spec.scope, spec.name) == ("hf", "a folder/vit-base.v2")
    assert spec.arguments == {"num_labels": 10, "name": "a:b(1)"}
    assert parse_call("hf:C:\\nets\\vit", any_name=True).name == "C:\\nets\\vit"
    for text in ("hf", "hf:", "hf: ", ":vit", "hf:vit(a=1)(b=2)", "hf:vit)", "hf:vit(1)"):
        with refused("--model: got "):
            parse_call(text, argument="--model", any_name=True)


NO_LITERALS = [
    *("__import__('os').system('true')", "__import__('os')", "lambda: 0", "inf", "steps", "[x for x in (1, 2)]"),
    *("f'{1}'", "b'x'", "...", "1j", "9**9**9", "2*3", "'a'/2", "True/2", "-True", "-'a'", "1/0", "~1", "{**{}}"),
    *("{[]: 1}", "{1, 2}", "(1).real", "1 if 1 else 2", "not 1", "(y := 1)", "*[1]", "1\x00"),
    *("-" * 100_000 + "1", "(" * 500 + ")" * 500),
]


def test_anything_but_literals_is_refused():
    for value in NO_LITERALS:
        with refused("--attack: got "):
            parse_call(f"foolbox:FGSM(a={value})", argument="--attack")


GROUP = """
from neighbour_of_mine import BASE

class Group:
    @staticmethod
    def make(depth=1):
        return BASE + depth
"""
NOT_THERE = {
    "no_such_file.py:make": "there is none at",
    "no_such_package.module:make": "there is no no_such_package",
    "pathlib:Paht": "did you mean Path",
    "pathlib:Path.hmoe": "did you mean home",
    "some/folder:make": "path/to/file.py:name",
}


def test_objects_are_loaded_from_modules_and_files_as_they_are_now(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_mine.py").write_text("BASE = 10\n")
    file = tmp_path / "mine.py"
    file.write_text(GROUP)
    before = list(sys.path)
    assert resolve_object("pathlib:Path.home") == Path.home
    assert resolve_object(f"{file}:Group.make(depth=3)") == 13
    assert resolve_object(f"{file}:Group.make") is resolve_object(f"{file}:Group.make")
    assert sys.path == before
    file = tmp_path / "module_beside_me.py"
    for source, value in (("VALUE = 1\n", 1), ("VALUE = 'longer'\n", "longer")):
        file.write_text(source)
        assert resolve_object(f"{file}:VALUE") == value
    monkeypatch.chdir(tmp_path)
    assert resolve_object("module_beside_me:VALUE") == "longer"
    for text, expected in NOT_THERE.items():
        with refused(rf"--model: got [\s\S]*{re.escape(expected)}"):
            resolve_object(text, argument="--model")
