"""Attack tests in pytest: options, the marker and fixture ``attack_test``, and the verdicts at the end of a session.

Every run of pytest imports it, with attack tests or without. So it lies outside the package and imports neither that
nor torch, which take two seconds; the fixture does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from robust_ext.evaluations.binarization import BinarizationResult

INCONCLUSIVE = ("fail", "skip", "pass")
_NAME = "attack_test"  # Of the marker, the fixture, and the property of a report
_MARKER = (
    f"{_NAME}(budget=SECONDS, samples=NUMBER, inconclusive='fail'|'skip'|'pass', **settings): "
    f"keywords of the fixture {_NAME}, as of robust_ext.testing.assert_attack_passes"
)


@dataclass(frozen=True)
class Defaults:
    """What holds for attack tests that do not state it."""

    inconclusive: str = "fail"
    budget: float | None = None


_DEFAULTS = pytest.StashKey[Defaults]()
_running: list[pytest.Item] = []  # The test that runs; several where a test runs pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, and the same names in an ini file."""
    group = parser.getgroup("robust_ext", "attack tests (robust_ext)")
    words = "what an inconclusive attack test comes to"
    group.addoption("--robust-ext-inconclusive", choices=INCONCLUSIVE, default=None, help=words)
    parser.addini("robust_ext_inconclusive", f"{words}: {', '.join(INCONCLUSIVE)}", default=INCONCLUSIVE[0])
    words = "seconds after which an attack test ends with what is decided by then"
    group.addoption("--robust-ext-budget", type=float, default=None, metavar="SECONDS", help=words)
    parser.addini("robust_ext_budget", words, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and read the defaults."""
    config.addinivalue_line("markers", _MARKER)
    inconclusive = config.getoption("--robust-ext-inconclusive") or config.getini("robust_ext_inconclusive")
    if inconclusive not in INCONCLUSIVE:
        listed = ", ".join(INCONCLUSIVE)
        raise pytest.UsageError(f"robust_ext_inconclusive: got {inconclusive!r}, expected one of {listed}")
    budget, option = config.getini("robust_ext_budget") or None, config.getoption("--robust-ext-budget")
    try:
        seconds = option if option is not None else budget and float(budget)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"robust_ext_budget: got {budget or option!r}, expected seconds above 0")
    config.stash[_DEFAULTS] = Defaults(inconclusive, seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep which test runs."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def defaults() -> Defaults:
    """Those of the session whose test runs; the declared ones outside of any."""
    return _running[-1].config.stash.get(_DEFAULTS, Defaults()) if _running else Defaults()


def note(words: str) -> None:
    """Keep a verdict, the first word, with the report of the test that runs."""
    if _running:
        _running[-1].user_properties.append((_NAME, words))


@pytest.fixture
def attack_test(request: pytest.FixtureRequest) -> Callable[..., BinarizationResult]:
    """``robust_ext.testing.assert_attack_passes`` with the keywords of the test's markers, the closest first."""
    from robust_ext.testing import assert_attack_passes

    settings: dict[str, object] = {}
    for mark in reversed(list(request.node.iter_markers(_NAME))):
        if mark.args:
            raise pytest.UsageError(f"{_NAME}: got {mark.args!r}, expected keywords, as in {_NAME}(budget=60)")
        settings |= mark.kwargs
    return partial(assert_attack_passes, **settings)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The verdicts of the session, those of other processes too: they come with the reports."""
    found = [
        (report.nodeid, str(words))
        for reports in terminalreporter.stats.values()
        for report in reports
        # The last report of a test has what all before it have.
        if getattr(report, "when", None) == "teardown"
        for name, words in report.user_properties
        if name == _NAME
    ]
    if not found:
        return
    terminalreporter.section("attack tests")
    if terminalreporter.verbosity >= 0:
        for nodeid, words in sorted(found):
            terminalreporter.line(f"{nodeid}: {words}")
    verdicts = [words.split(":")[0] for _, words in found]
    counts = (f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts, reverse=True)))
    terminalreporter.line(f"Verdicts: {', '.join(counts)}.")
