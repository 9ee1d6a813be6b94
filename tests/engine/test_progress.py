"""What is shown of work that goes on, by a clock of the test's own."""

import io
import re
from types import SimpleNamespace

import pytest

from robust_ext.core.target import PassCounter
from robust_ext.engine import progress
from robust_ext.engine.progress import phase, showing, watching


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(progress, "time", made)
    return made


@pytest.fixture(params=[False, True], ids=["log", "terminal"])
def stream(request, monkeypatch):
    made = io.StringIO()
    made.isatty = lambda: request.param
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    return made


def test_a_line_a_minute_where_there_is_no_terminal_and_a_bar_on_one(clock, stream):
    def work(seconds, words):
        """A phase in which three rows go forward once a tenth of a second."""
        phase(words)
        with watching(counter := PassCounter()):
            for _ in range(seconds * 10):
                clock.now += 0.1
                counter.count_forward(3)

    with showing("binarization", shown=True, total=64, unit="sample") as bar:
        work(130, "planting")
        bar.advance(32)
        work(65, "attack")
    written = stream.getvalue()
    assert "32 of 64 samples in 3 min 15 s\n" in written
    # Half of the samples took 130 seconds.
    assert re.search(r"32 of 64 samples \[\d min \d+ s, about \d min \d+ s left\] attack, [\d,]+ rows forward", written)
    if stream.isatty():
        assert "━" in written
        assert 100 < written.count("planting, ") < 130 / 0.25 + 5
    else:
        # After five seconds, after a minute each, and the end.
        assert written.count("\n") == 5
        assert re.match(r"binarization: 0 of 64 samples \[5 s\] planting, 150 rows forward\n", written)


def test_an_error_leaves_its_line_without_control_codes_and_nothing_is_shown_where_it_is_not_wanted(clock, stream):
    def breaks():
        with showing("one", shown=True):
            clock.now += 6
            phase("planting\x1b[31m")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        breaks()
    written = stream.getvalue()
    assert "[6 s] planting\\x1b[31m" in written
    with showing("two", shown=False) as bar, watching(counter := PassCounter(), "attack"):
        assert (bar, counter.watch) == (None, None)
    assert stream.getvalue() == written
