"""What is shown of work that goes on, by a clock of the test's own."""

import io
import re
from types import SimpleNamespace

import pytest

from robust_ext.core.cost import Cost, Rates
from robust_ext.core.target import PassCounter
from robust_ext.engine import forecast as forecast_module
from robust_ext.engine import progress as progress_module
from robust_ext.engine.forecast import Forecast
from robust_ext.engine.progress import phase, showing, watching


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (progress_module, forecast_module):
        monkeypatch.setattr(module, "time", made)
    return made


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture(params=[False, True], ids=["log", "terminal"])
def stream(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made = Stream(request.param)
    monkeypatch.setattr(progress_module, "sys", SimpleNamespace(stderr=made))
    return made


def forecast(samples=64, **unknown):
    return Forecast({"": Cost(100, 10, **unknown)}, {"": samples}, Rates(0.01, 0.02))


def work(clock, bar, seconds, words, *, rows=10, counter=None):
    """A phase in which rows go forward once a tenth of a second."""
    counter = PassCounter() if counter is None else counter
    phase(words)
    with watching(counter):
        for _ in range(int(seconds * 10)):
            clock.now += 0.1
            counter.count_forward(rows)


def test_a_line_a_minute_where_there_is_no_terminal_and_one_that_is_rewritten_on_one(clock, stream):
    with showing("binarization", shown=True, total=64, unit="sample", forecast=forecast()) as bar:
        bar.forecast.begin("", 32)
        work(clock, bar, 130, "planting", rows=3)
        bar.forecast.end("", 32)
        bar.advance(32)
    written = stream.getvalue()
    assert written.splitlines()[-1].rstrip() == "binarization: 32 of 64 samples in 2 min 10 s"
    if stream.isatty():
        assert "\r" in written
        assert written.count("\n") == 1
        assert 130 < written.count("\r") < 130 / 0.25 + 5
    else:
        assert "\r" not in written
        # After five seconds, after a minute more and another one, and the end.
        assert written.count("\n") == 4
        assert re.match(r"binarization: 0 of 64 samples \[5 s, about .* left\] planting, 150 rows forward\n", written)


def test_the_time_that_is_left_is_known_from_the_first_seconds_and_becomes_exact(clock):
    known = forecast()
    known.begin("", 32)
    # 64 samples of 100 x .01 + 10 x .02 seconds; half of the rows of the first block are counted in its time.
    assert known.left() == (pytest.approx(64 * 1.2), True)
    known.count(1600, 160)
    clock.now += 19.2
    assert known.left() == (pytest.approx(16 * 1.2 + 32 * 1.2), True)
    # Half as fast as it was measured: so is the rest.
    clock.now += 19.2
    known.end("", 32)
    assert known.left() == (pytest.approx(38.4), True)
    known.begin("", 32)
    clock.now += 30
    assert known.left() == (pytest.approx(8.4), True)


def test_what_states_no_cost_is_named_and_learned_from_its_first_block(clock):
    known = forecast(unknown=("mine",))
    assert known.left() == (pytest.approx(64 * 1.2), False)
    assert str(known) == (
        "at most 6,400 rows forward and 640 back, about 1 min 17 s; and what mine takes, which its first block will "
        "show"
    )
    known.begin("", 32)
    clock.now += 100
    known.end("", 32)
    assert known.left() == (pytest.approx(100), True)


def test_blocks_that_were_there_before_cost_nothing(clock):
    known = forecast()
    known.end("", 32)
    assert known.left() == (pytest.approx(32 * 1.2), True)
    known.drop("")
    assert known.left() == (0, True)


def test_processes_that_share_the_work_take_less_time():
    shared = forecast()
    shared.workers = 4
    assert shared.left()[0] == pytest.approx(64 * 1.2 / 4)
    shared.took("", 16, 32.0)
    assert shared.left()[0] == pytest.approx(48 * 2.0 / 4)


def test_work_inside_other_work_is_a_part_of_its_line(clock, stream):
    with showing("case studies", shown=True, total=4) as outer:
        outer.phase("k-winners: weak recipe")
        with showing("binarization", shown=False, total=8, unit="sample", forecast=forecast(8)) as bar:
            assert bar is not None
            bar.forecast.begin("", 8)
            work(clock, bar, 6, "random attack")
    shown = r"case studies: 0 of 4 steps \[5 s\] k-winners: weak recipe \| binarization: 0 of 8 samples \[5 s, about"
    assert re.search(shown, stream.getvalue())


def test_nothing_is_shown_or_watched_where_it_is_not_wanted(stream):
    with showing("anything", shown=False) as bar:
        assert bar is None
        phase("planting")
        counter = PassCounter()
        with watching(counter, "attack"):
            assert counter.watch is None
    assert not stream.getvalue()


def test_an_error_leaves_its_line_and_another_work_is_none_of_its_parts(clock, stream):
    def breaks():
        with showing("one", shown=True):
            clock.now += 6
            phase("planting\x1b[31m")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        breaks()
    assert stream.getvalue().rstrip("\n").endswith("one: [6 s] planting\\x1b[31m")
    assert stream.getvalue().endswith("\n")
    with showing("two", shown=False) as bar:
        assert bar is None
