"""The page that lists every numbered item of the four papers is complete, and what it names exists."""

import ast
import re

import typer.main

from robust_ext.cli import app
from tests.test_readme import ROOT, text_of

PAGE = text_of("docs/theory/papers.md")
# How many equations, algorithms, tables, figures and numbered recommendations each paper has.
NUMBERED = {
    "Binarization test": {"equation": 3, "algorithm": 2, "figure": 4},
    "MEAD": {"equation": 10, "table": 15, "figure": 2},
    "Linear-region attack": {"equation": 19, "algorithm": 1, "table": 7, "figure": 6},
    "Adaptive test-time defenses": {"equation": 10, "table": 5, "figure": 1, "recommendation": 6},
}
COMMANDS = typer.main.get_command(app.app).commands


def rows(title):
    """Item and place of each row below a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in section.splitlines() if line.startswith("| ")]
    return [(item, where) for _, item, _, where, _ in cells[1:]]


def test_every_numbered_item_is_listed_with_a_place_or_a_reason():
    for title, kinds in NUMBERED.items():
        listed = set()
        for item, where in rows(title):
            assert "`" in where or re.search(r"\*\w[^*]+\*", where), (title, item)
            found = re.fullmatch(r"([a-z]+?)s? \(?(\d+)\)?(?: to (\d+))?", item)
            if found and found[1] in kinds:
                listed |= {(found[1], number) for number in range(int(found[2]), int(found[3] or found[2]) + 1)}
        assert listed == {(kind, number) for kind, last in kinds.items() for number in range(1, last + 1)}, title


def symbols(body, before=""):
    """The names that the body of a file or class defines, those of classes' members with dots."""
    found = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found |= {before + node.name, *symbols(node.body, f"{before}{node.name}.")}
    return found


def test_what_is_named_exists():
    for text in re.findall(r"`([^`]+)`", PAGE.split("\n## ", 1)[1]):
        if text.startswith("robust-ext "):
            name, *words = text.split()[1:]
            options = [{*one.opts, *one.secondary_opts} for one in COMMANDS[name].params]
            assert {word for word in words if word.startswith("--")} <= set().union(*options), text
        elif text.startswith("python "):
            script, *words = text.split()[1:]
            assert all(f'"{word}"' in text_of(script) for word in words if word.startswith("--")), text
        else:
            path, _, symbol = text.partition(":")
            file = next((one for one in (ROOT / "robust_ext" / path, ROOT / path) if one.is_file()), None)
            assert file is not None, text
            assert not symbol or symbol in symbols(ast.parse(file.read_text(encoding="utf-8")).body), text
