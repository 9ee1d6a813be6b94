"""Change one operator or constant at a time and count the changes that the tests notice.

    python .ci/mutants.py [verify planting ...]

Each mutant runs the tests of its target, quick and exhaustive, in a copy of the tree; survivors are listed. The
libraries are imported once and each mutant is a fork, so that a mutant costs its tests alone.
"""

import ast
import importlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile

TARGETS = {
    "verify": "engine/verify.py engine/test_verify core/test_threat evaluations/test_entries",
    "planting": "evaluations/binarization/problems.py evaluations/binarization/test_construction",
    "verdict": "evaluations/binarization/rules.py evaluations/binarization/test_verdict evaluations/binarization/test_depth",
    "metric": "evaluations/mead/metric.py evaluations/mead/test_metric",
    "solver": "attacks/linear_region/solver.py attacks/linear_region/test_solver",
    "apgd": "attacks/_common/apgd_steps.py attacks/test_apgd",
}
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, FloorDiv Mult, Mult Div, And Or, BitAnd BitOr"
SWAPS = {getattr(ast, a): getattr(ast, b) for x in PAIRS.split(", ") for a, b in (x.split()[::-1], x.split())}


def sites(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that can change; annotations hold none."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        fields = [
            value for name, value in ast.iter_fields(node) if name not in ("annotation", "returns", "decorator_list")
        ]
        waiting += [
            x for field in fields for x in (field if isinstance(field, list) else [field]) if isinstance(x, ast.AST)
        ]
        number = isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)
        if number or type(getattr(node, "op", None) or getattr(node, "ops", [None])[0]) in SWAPS:
            found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def mutate(source: str, place: int) -> tuple[str, str]:
    """Return the source with its `place`-th node changed, and what was changed."""
    node = sites(tree := ast.parse(source))[place]
    before = ast.unparse(node)
    match node:
        case ast.Constant(value):
            node.value = not value if isinstance(value, bool) else value * 2 + 1
        case ast.Compare():
            node.ops[0] = SWAPS[type(node.ops[0])]()
        case _:
            node.op = SWAPS[type(node.op)]()
    return ast.unparse(tree), f"line {node.lineno}: {before} -> {ast.unparse(node)}"


def survives(copy: pathlib.Path, tests: list[str]) -> bool:
    """Return whether the tests pass in the copy; a mutant that runs for over five minutes counts as noticed."""
    child = os.fork()
    if not child:
        signal.alarm(300)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(importlib.import_module("pytest").main(["-qx", "-p", "no:cacheprovider", "-n0", "-m", "", *tests]))
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Run the mutants and print a line a target and one a survivor."""
    for name in ("torch", "foolbox", "art.attacks.evasion", "art.estimators.classification", "sklearn"):
        importlib.import_module(name)
    root, noticed, tried = pathlib.Path(__file__).resolve().parents[1], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "*cache*"))
        for name in sys.argv[1:] or TARGETS:
            path, *tests = (f"robust_ext/{x}" if x.endswith(".py") else f"tests/{x}.py" for x in TARGETS[name].split())
            source = (root / path).read_text()
            assert survives(copy, tests), f"the tests of {name} fail without a mutant"
            places = range(len(sites(ast.parse(source))))
            survivors, chosen = [], random.Random(0).sample(places, min(16, len(places)))
            for place in sorted(chosen):
                changed, what = mutate(source, place)
                (copy / path).write_text(changed)
                survivors += [what] if survives(copy, tests) else []
            (copy / path).write_text(source)
            noticed, tried = noticed + len(chosen) - len(survivors), tried + len(chosen)
            print(f"{name}: {len(chosen) - len(survivors)} of {len(chosen)}", *survivors, sep="\n  ", flush=True)
    print(f"noticed: {noticed} of {tried} ({noticed / tried:.0%})")


if __name__ == "__main__":
    main()
