"""Try bad inputs and state what became of them."""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz import calls, command_line, data, named
from tests.fuzz.judging import judge
from tests.fuzz.workspace import prepare

# Shares of all cases.
SHARES = {
    "numbers": 16,
    "texts": 10,
    "budgets": 8,
    "commands": 8,
    "code": 12,
    "files": 5,
    "labels": 1,
    "attacks": 14,
    "damaged": 6,
    "arrays": 3,
    "suites": 5,
    "calls": 12,
}
_LINES = sum(SHARES[kind] for kind in ("numbers", "texts", "budgets", "commands", "code", "files"))


def generated(kind, count, seed, folder):
    """So many cases of a kind."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "calls":
        return _drawn(count, seed)
    if kind in ("damaged", "arrays", "suites"):
        made = getattr(data, kind)(rng, folder)
    else:
        names = {"commands": "shapes_of_commands"}
        made = getattr(
            command_line if kind in ("numbers", "texts", "budgets", "commands") else named, names.get(kind, kind)
        )(rng)
    return itertools.islice(made, count)


def _drawn(count, seed):
    found = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls.cases())
    def collect(case):
        found.append(case)

    collect()
    return found


def run(count, *, seed=0, processes=0, report=None):
    """Outcomes by category, those that are broken, and the accepted ones by their meaning.

    So many of the command lines (``processes``) are run in processes of their own, their attacks at arm's length.
    """
    table, broken, accepted = collections.defaultdict(collections.Counter), [], collections.Counter()
    with tempfile.TemporaryDirectory() as place, _inside(place):
        folder = Path(place)
        prepare(folder)
        for kind, share in SHARES.items():
            for number, case in enumerate(generated(kind, max(1, count * share // 100), seed, folder)):
                # No word of a real command line can hold a null.
                if case.arguments and number < processes * share // _LINES and "\0" not in "".join(case.arguments):
                    kept = tuple(word for word in case.arguments if word != "--in-process")
                    case = dataclasses.replace(case, arguments=kept, process=True)
                outcome = judge(case)
                table[case.category][outcome.kind] += 1
                if outcome.kind == "accepted":
                    accepted[f"{case.category}: {outcome.text}"] += 1
                if outcome.kind == "broken":
                    broken.append(f"{case}\n      {outcome.text}")
                if report is not None:
                    report(kind, number, case, outcome)
    return table, broken, accepted


@contextlib.contextmanager
def _inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main():
    """Print the counts; status 1 where anything is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=100, help="command lines run in a process of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SHARES), help="this kind alone")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    if given.only:
        SHARES.clear()
        SHARES[given.only] = 100
    begun = time.perf_counter()

    def report(kind, number, case, outcome):
        if given.verbose or outcome.kind == "broken":
            print(f"{outcome.kind} {case}\n      {outcome.text[:500]}", file=sys.stderr, flush=True)

    table, broken, accepted = run(given.cases, seed=given.seed, processes=given.processes, report=report)
    rows = {name: dict(counts) for name, counts in sorted(table.items())}
    total = sum(sum(counts.values()) for counts in table.values())
    print(json.dumps({"cases": total, "broken": len(broken), "by category": rows, "accepted": accepted}, indent=2))
    print(f"{time.perf_counter() - begun:.0f} s")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
