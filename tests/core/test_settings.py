"""What users give: settings, numbers, inputs, labels, texts that name an object; the files that code consists of."""

import dataclasses
import importlib
import math
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import robust_ext
from robust_ext import BPDA, BinarizationSettings, EoT, RobustExtError, ThreatModel
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError, WrongCallError
from robust_ext.core.modules import SettingsModule
from robust_ext.core.objects import resolve_object
from robust_ext.core.reached import SourceFiles
from robust_ext.core.settings import (
    Settings,
    check_setting,
    declared,
    default_of,
    setting,
    setting_types,
    settings_class,
)
from robust_ext.core.specification import parse_call
from robust_ext.core.validation import check_inputs, check_labels

for module in pkgutil.walk_packages(robust_ext.__path__, "robust_ext."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def even(value):
    if not isinstance(value, int) or value % 2:
        raise InvalidArgumentError("pairs", value, "an even integer")
    return value


@settings_class
class Search(Settings):
    """Looks for something."""

    steps: int = setting(default=10, help="Steps taken.", minimum=1, maximum=99, trial=3, art="max_iter", foolbox=None)
    rate: float = setting(default=0.5, help="Of change.", above=0, below=1)
    share: float | None = setting(default=None, help="Of rows.", minimum=0, maximum=1)
    loss: str = setting(default="ce", help="What is raised.", choices=("ce", "margin"))
    best: bool = setting(default=False, help="Whether to keep the best.")
    widths: tuple[float, ...] | None = setting(default=None, help="Of windows.", above=0)
    names: Sequence[str] = setting(default=("ce",), help="Of losses.", choices=("ce", "margin"))
    pairs: int = setting(default=2, help="Of points.", check=even)
    anything: object = setting(default=None, help="Left as it is.")


OUTSIDE = [
    ("steps", (0, 100, 1.5, True, "3", None, np.True_, [1]), "an integer of at least 1 and at most 99"),
    ("steps", (np.array([1, 2]), torch.tensor(1.5), torch.ones(2)), "an integer of at least 1 and at most 99"),
    ("rate", (0, 1, -1, math.nan, math.inf, -math.inf, "half", True, None), r"a finite number in \(0, 1\)"),
    ("rate", ([0.5], torch.ones(2), np.ones(2), 10**400, 1j, b"1", {}), r"a finite number in \(0, 1\)"),
    ("loss", ("dlr", 3, None, "CE", ["ce"]), "one of 'ce', 'margin'"),
    ("best", (1, "yes", None), "True or False"),
    ("widths", ((1.0, 0), (math.nan,)), "a finite number"),
    ("widths", (3, "abc"), "a tuple of numbers"),
    ("names", (("ce", "dlr"),), "one of 'ce', 'margin'"),
    ("names", ("ce",), "a tuple of some of ce, margin"),
    ("pairs", (3, "2"), "an even integer"),
]


def test_values_outside_what_is_declared_are_refused_and_those_inside_taken_as_their_type():
    for name, values, expected in OUTSIDE:
        for value in values:
            with pytest.raises(InvalidArgumentError, match=rf"^{name}: got [\s\S]*expected {expected}") as caught:
                Search(**{name: value})
            assert caught.value.got is value or name not in ("steps", "rate")
    chosen = Search(steps=torch.tensor(7), rate=torch.tensor(0.25), share=1, widths=[1, 2], names=["margin"], pairs=4)
    assert (chosen.steps, chosen.rate, chosen.share, chosen.pairs) == (7, 0.25, 1.0, 4)
    assert (type(chosen.steps), type(chosen.share)) == (int, float)
    for value in (np.int64(5), np.uint8(5), np.array(5)):
        assert repr(Search(steps=value).steps) == "5"
    for value in (np.float32(0.25), np.float64(0.25), torch.tensor(0.25)):
        assert repr(Search(rate=value).rate) == "0.25"
    assert (chosen.widths, chosen.names, chosen.best) == ((1.0, 2.0), ("margin",), False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.steps = 3
    with pytest.raises(InvalidArgumentError, match="steps: got 0"):
        dataclasses.replace(chosen, steps=0)


FLAT, SHOWN = nn.Flatten(), "Flatten(start_dim=1, end_dim=-1)"
MEANT = {
    "ThreatModel(norm='l2', epsilon=1.0, bounds=(0, 255))": lambda: ThreatModel("l2", eps=1.0, clip_values=(0, 255)),
    "APGD(steps=10, restarts=2)": lambda: APGD(n_iter=10, n_restarts=2),
    "BinarizationSettings(threat_model=": lambda: BinarizationSettings(ThreatModel(norm="linf", epsilon=0.1)),
    f"EoT(module={SHOWN}, draws=3, chunk=5)": lambda: EoT(FLAT, 5, n_samples=3),
    f"BPDA(forward={SHOWN}, layer='quantise')": lambda: BPDA(FLAT, layr="quantise"),
    f"BPDA(forward={SHOWN})": lambda: BPDA(FLAT, forward=FLAT),
}


def test_the_call_that_was_meant_is_named():
    for meant, call in MEANT.items():
        with pytest.raises(WrongCallError) as raised:
            call()
        assert meant in str(raised.value).partition(", expected ")[2]
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, RobustExtError)


def below(cls):
    return {cls, *(one for child in cls.__subclasses__() for one in below(child))}


def test_what_lies_outside_the_range_of_any_setting_of_the_project_is_refused():
    classes = [cls for cls in below(Settings) | below(SettingsModule) if cls.__module__.startswith("robust_ext.")]
    for cls, name, info in ((one, *item) for one in classes for item in declared(one).items()):
        default, kind = default_of(cls, name), str(setting_types(cls)[name])
        if default is not None and not hasattr(default, "__dataclass_fields__") and "MISSING" not in repr(default):
            check_setting(cls, name, info, default)
        ends = ((info.minimum, -1), (info.maximum, 1), (info.above, 0), (info.below, 0))
        wrong = [end + step for end, step in ends if end is not None] + ["no such choice"] * bool(info.choices)
        wrong += [math.nan, math.inf, 1e300] if "int" in kind or "float" in kind else []
        several = "tuple" in kind or "Sequence" in kind
        for value in wrong if info.check is None else [object()]:
            with pytest.raises(InvalidArgumentError, match=f"^{name}"):
                check_setting(cls, name, info, (value,) if several and info.check is None else value)


NAN, INF = math.nan, math.inf


def refused(message):
    return pytest.raises(InvalidArgumentError, match="^" + message)


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
    *(np.array(["a"]), [[0.0]], np.zeros((2, 3), "u1"), ZEROS.long().to_sparse(), torch.tensor([[0.0, 255.0]])),
    *(ZEROS.to(kind) for kind in (torch.uint8, torch.int64, torch.complex64)),
    *(torch.zeros(shape) for shape in ((3,), (), (2, 0))),
    *(torch.tensor([[0.5, value]]) for value in (NAN, INF, -0.1, 1.001)),
]
WRONG_LABELS = [
    *(np.array([0.0, 1.0]), np.array([[0.5, 0.5], [0, 1]]), np.ones((2, 3)), np.eye(3), [0, 1]),
    *(torch.zeros(2).to(kind) for kind in (torch.float32, torch.bool, torch.complex64)),
    *map(torch.tensor, ([0, 1, 1], [[0], [1]], [-1, 1], [0, 3])),
]


def test_wrong_inputs_and_labels_are_refused():
    for inputs in WRONG_INPUTS:
        with refused("x: got "):
            check_inputs("x", inputs, bounds=(0, 1))
    for labels in WRONG_LABELS:
        with refused("y: got "):
            check_labels("y", labels, samples=2, classes=3)
    with refused(r"y: got labels in -1..-1"):
        check_labels("y", torch.tensor([-1]), samples=1)


@given(st.floats(-5, 0), st.floats(0.01, 5))
def test_inputs_clipped_to_any_bounds_are_in_them(low, high):
    """Bounds are float64 and inputs are float32, so a value at a bound may lie just outside it."""
    for dtype in (torch.float32, torch.float64):
        inputs = torch.tensor([[-9.0, 9.0]], dtype=dtype).clamp(low, high)
        assert check_inputs("x", inputs, bounds=(low, high)).shape == (1, 2)
    with refused("x: got values"):
        check_inputs("x", torch.tensor([[high + 1e-5 * max(-low, high)]]), bounds=(low, high))


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
    for text, meant in (("pathlib:Paht", "Path"), ("pathlib:Path.hmoe", "home")):
        with refused(rf"--model: got [\s\S]*did you mean {meant}"):
            resolve_object(text, argument="--model")


# Files by name, the first of which is run, and those that do not belong to it.
CASES = {
    "of a circle": ({"a.py": "import b", "b.py": "import c", "c.py": "import a, b", "d.py": "import a"}, {"d.py"}),
    "in a branch": ({"a.py": "try:\n    import nothing\nexcept ImportError:\n    import b", "b.py": ""}, set()),
    "by name": ({"a.py": "import importlib\nimportlib.import_module('b')", "b.py": ""}, set()),
    "of a package": (
        {"a.py": "import p.m", "p/__init__.py": "from . import n", "p/m.py": "", "p/n.py": "", "p/o.py": ""},
        {"p/o.py"},
    ),
    "with a star": ({"a.py": "from p import *", "p/__init__.py": "__all__ = ['m']", "p/m.py": ""}, set()),
    "relative": (
        {"a.py": "import p.q.m", "p/__init__.py": "", "p/n.py": "", "p/r/__init__.py": "", "p/r/s.py": "t = 1"}
        | {"p/q/__init__.py": "", "p/q/m.py": "from .. import n\nfrom .o import x"}
        | {"p/q/o.py": "from ..r.s import t as x"},
        set(),
    ),
    "of a namespace": ({"a.py": "import n.m", "n/m.py": "from . import o", "n/o.py": "", "n/p.py": ""}, {"n/p.py"}),
    "of a module before a folder": ({"a.py": "import b", "b.py": "", "b/c.txt": ""}, {"b/c.txt"}),
    "of a package before a module": ({"a.py": "import b", "b.py": "", "b/__init__.py": ""}, {"b.py"}),
    "of libraries": ({"a.py": "import os.path, torch.nn, robust_ext.core.errors\nfrom json import loads"}, set()),
    "broken": ({"a.py": "try:\n    import b\nexcept SyntaxError:\n    pass", "b.py": "print 1"}, set()),
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def digests(file):
    found = SourceFiles()
    found.add_file(file)
    return found.digests


@pytest.mark.parametrize("name", CASES)
def test_the_files_that_a_file_imports(tmp_path, name):
    files, others = CASES[name]
    write(tmp_path, files)
    expected = set(files) - others
    found = digests(tmp_path / "a.py")
    assert set(found) == expected
    for name in files:
        (tmp_path / name).touch()
    assert digests(tmp_path / "a.py") == found
    for name in files:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n# changed\n")
        changed = digests(tmp_path / "a.py")
        assert {one for one in found if changed[one] != found[one]} == {name} & expected
        (tmp_path / name).write_text(text)


def test_a_helper_that_is_gone_or_new_counts_and_nothing_is_run(tmp_path):
    code = {"a.py": "import b", "b.py": f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit"}
    write(tmp_path, code)
    found = digests(tmp_path / "a.py")
    assert set(found) == {"a.py", "b.py"}
    (tmp_path / "b.py").unlink()
    assert set(digests(tmp_path / "a.py")) == {"a.py"}
    write(tmp_path, code)
    assert digests(tmp_path / "a.py") == found
    assert not (tmp_path / "ran").exists()
