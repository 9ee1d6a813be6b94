"""Bad inputs end in an error of the project's own: a few of those that ``python -m tests.fuzz`` tries."""

import time

import pytest
import typer

from robust_ext.core.errors import InvalidArgumentError
from tests.fuzz import judging
from tests.fuzz.__main__ import run
from tests.fuzz.command_line import line
from tests.fuzz.judging import Case, judge

CATEGORIES = {"numbers", "texts", "budgets", "commands", "code", "files", "attacks", "data files", "arrays", "suites"}


def check(cases, seed, categories, *, processes=0):
    table, broken, accepted = run(cases, seed=seed, processes=processes)
    assert not broken, "\n".join(broken)
    assert set(table) >= categories
    assert sum(counts["refused"] for counts in table.values()) > 0.8 * cases
    assert all(text.split(": ", 1)[1] for text in accepted)


def test_some_bad_inputs():
    check(60, 11, CATEGORIES)


@pytest.mark.exhaustive
def test_a_thousand_bad_inputs():
    check(1_200, 0, {*CATEGORIES, "weights", "API mead"}, processes=6)


def refuses():
    raise InvalidArgumentError("epsilon", 3, "less")


def hangs():
    time.sleep(5)


@pytest.mark.parametrize(
    ("call", "meaning", "kind"),
    [
        (refuses, "", "refused"),
        (lambda: 1 / 0, "", "broken"),
        (lambda: None, "", "broken"),
        (lambda: None, "a reason", "accepted"),
        (lambda: exit(0), "", "broken"),
        (hangs, "", "broken"),
    ],
)
def test_what_the_fuzzer_makes_of_calls(call, meaning, kind, monkeypatch):
    monkeypatch.setattr(judging, "SECONDS", 1)
    assert judge(Case(category="calls", call=call, meaning=meaning)).kind == kind


@pytest.mark.parametrize(
    ("call", "meaning", "kind"),
    [
        (refuses, "", "refused"),
        (lambda: 1 / 0, "", "broken"),
        (lambda: typer.echo("a result"), "", "broken"),
        (lambda: typer.echo("a result"), "a reason", "accepted"),
        (lambda: typer.echo("\x1b[31ma result"), "a reason", "broken"),
        (lambda: typer.echo(""), "a reason", "broken"),
        (lambda: exit(0), "", "refused"),
        (hangs, "", "broken"),
    ],
)
def test_what_the_fuzzer_makes_of_commands(call, meaning, kind, monkeypatch):
    monkeypatch.setattr(judging, "SECONDS", 1)
    monkeypatch.setattr("robust_ext.cli.evaluations._labelled", lambda _: (call(), ("a", "b"))[1])
    monkeypatch.setattr("robust_ext.cli.evaluations.robust_accuracy", lambda *_, **__: "")
    case = line("robust-accuracy", category="commands", meaning=meaning)
    assert judge(case).kind == kind
