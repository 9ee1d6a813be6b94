import re
import sys
from pathlib import Path

import pytest

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import check_keywords, parse_call


def test_parse_reads_scope_name_and_literals():
    text = "foolbox:LinfPGD(steps=40, rel_stepsize=-.1, a=8/255, b=None, c=True, d='x:y(1)', "
    text += "e=(1, [2]), f={'k': -3}, g=+2)"
    spec = parse_call(text)
    assert (spec.scope, spec.name, spec.text) == ("foolbox", "LinfPGD", text)
    assert spec.arguments == {
        **{"steps": 40, "rel_stepsize": -0.1, "a": 8 / 255, "b": None, "c": True, "d": "x:y(1)"},
        **{"e": (1, [2]), "f": {"k": -3}, "g": 2},
    }


@pytest.mark.parametrize(
    ("text", "scope", "name"),
    [
        ("foolbox:FGSM", "foolbox", "FGSM"),
        ("foolbox:FGSM()", "foolbox", "FGSM"),
        (" foolbox : FGSM ( ) ", "foolbox", "FGSM"),
        ("C:\\files\\mine.py:make(depth=3)", "C:\\files\\mine.py", "make"),
        ("a (1)/mine.py:Group.make(depth=3)", "a (1)/mine.py", "Group.make"),
        ("a.b:make(x='c:d(1)')", "a.b", "make"),
    ],
)
def test_parentheses_may_be_left_out_and_stand_elsewhere(text, scope, name):
    spec = parse_call(text)
    assert (spec.scope, spec.name) == (scope, name)
    assert "=" in text or not spec.arguments


def test_names_of_models_may_be_any_text_without_parentheses():
    spec = parse_call(" hf : a folder/vit-base.v2 (num_labels=10, name='a:b(1)')", any_name=True)
    assert (spec.scope, spec.name) == ("hf", "a folder/vit-base.v2")
    assert spec.arguments == {"num_labels": 10, "name": "a:b(1)"}
    assert parse_call("hf:C:\\nets\\vit", any_name=True).name == "C:\\nets\\vit"
    for text in ("hf", "hf:", "hf: ", ":vit", "hf:vit(a=1)(b=2)", "hf:vit)", "hf:vit(1)"):
        with pytest.raises(InvalidArgumentError, match="--model: got "):
            parse_call(text, argument="--model", any_name=True)


NO_LITERALS = [
    *("__import__('os').system('true')", "__import__('os')", "lambda: 0", "inf", "steps", "[x for x in (1, 2)]"),
    *("f'{1}'", "b'x'", "...", "1j", "9**9**9", "2*3", "'a'/2", "True/2", "-True", "-'a'", "1/0", "~1", "{**{}}"),
    *("{[]: 1}", "{1, 2}", "(1).real", "1 if 1 else 2", "not 1", "(y := 1)", "*[1]", "1\x00"),
    *("-" * 100_000 + "1", "(" * 500 + ")" * 500),
]


@pytest.mark.parametrize("value", NO_LITERALS)
def test_anything_but_literals_is_refused(value):
    with pytest.raises(InvalidArgumentError, match=r"^--attack: got "):
        parse_call(f"foolbox:FGSM(a={value})", argument="--attack")


def test_load_from_a_module_or_a_file_and_call_it(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("BASE = 10\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from neighbour_of_mine import BASE\n\n"
        "class Group:\n    @staticmethod\n    def make(depth=1):\n        return BASE + depth\n"
    )
    before = list(sys.path)
    assert resolve_object("pathlib:Path.home") == Path.home
    assert resolve_object(f"{file}:Group.make(depth=3)") == 13
    assert resolve_object(f"{file}:Group.make") is resolve_object(f"{file}:Group.make")
    assert sys.path == before


def test_edited_files_and_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    file = tmp_path / "module_beside_me.py"
    for source, value in (("VALUE = 1\n", 1), ("VALUE = 'longer'\n", "longer")):
        file.write_text(source)
        assert resolve_object(f"{file}:VALUE") == value
    monkeypatch.chdir(tmp_path)
    assert resolve_object("module_beside_me:VALUE") == "longer"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no_such_file.py:make", "there is none at"),
        ("no_such_package.module:make", "there is no no_such_package"),
        ("pathlib:Paht", "did you mean Path"),
        ("pathlib:Path.hmoe", "did you mean home"),
        ("some/folder:make", "path/to/file.py:name"),
    ],
)
def test_what_cannot_be_loaded_is_explained(text, expected):
    with pytest.raises(InvalidArgumentError, match=f"(?s)^--model: got .*{re.escape(expected)}"):
        resolve_object(text, argument="--model")


def test_hidden_parameters_are_neither_needed_nor_accepted():
    def make(estimator, depth=1): ...

    check_keywords(make, {"depth": 2}, argument="attack", label="make", hidden=("estimator",))
    with pytest.raises(InvalidArgumentError, match="one of: depth"):
        check_keywords(make, {"estimator": 2}, argument="attack", label="make", hidden=("estimator",))
