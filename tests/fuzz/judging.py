"""One bad input, and what became of it."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from robust_ext.cli import app as cli
from robust_ext.core.errors import RobustExtError

SECONDS = 30


def words(text):
    """Words without spaces, of any number of lines."""
    return tuple(text.split())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line (``arguments``, in a ``process`` of its own or in this one) or a call.

    ``meaning`` is why it may be accepted, empty where it must not be.
    """

    category: str
    arguments: tuple[str, ...] = ()
    call: Callable[[], object] | None = None
    words: str = ""
    meaning: str = ""
    process: bool = False

    def __str__(self):
        return f"{self.category}: {self.words or ' '.join(map(ascii, self.arguments))}"[:600]


@dataclass(frozen=True)
class Outcome:
    """``"refused"``, ``"accepted"`` (with a meaning) or ``"broken"``, and the words for it."""

    kind: str
    text: str


class HangError(KeyboardInterrupt):
    """It took longer than any bad input may."""


def judge(case):
    """Run a case, in this process or one of its own."""
    if case.call is not None:
        return _judge_call(case)
    status, out, err = (_process if case.process else _main)(case.arguments)
    return _judge_status(case, status, out, err)


def _judge_status(case, status, out, err):
    shown = [char for char in out + err if not char.isprintable() and char not in "\n\t\r"]
    if shown:
        return Outcome("broken", f"control characters {shown[:5]} in {err[-300:]!r}")
    if "Traceback" in err or "Traceback" in out or "error: unexpected" in err:
        return Outcome("broken", err[-600:])
    if status == 0 and out.strip():
        return Outcome("accepted" if case.meaning else "broken", case.meaning or f"accepted: {out[-200:]}")
    if status == 2 and err.strip():
        return Outcome("refused", err.strip().splitlines()[-1])
    return Outcome("broken", f"status {status}, stdout {out[-200:]!r}, stderr {err[-400:]!r}")


def _judge_call(case):
    try:
        with _limited(), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call()
    except RobustExtError as error:
        if "HangError" in str(error):  # Raised while an attack ran
            return Outcome("broken", "hangs")
        return Outcome("refused" if str(error).strip() else "broken", str(error))
    except HangError:
        return Outcome("broken", "hangs")
    except BaseException as error:
        return Outcome("broken", f"{type(error).__name__}: {error}"[:600])
    return Outcome("accepted" if case.meaning else "broken", case.meaning or "accepted")


class _Terminal(io.StringIO):
    """What is written to a terminal; colours would be stripped from what goes elsewhere."""

    def isatty(self):
        return True


def _main(arguments):
    out, err, before = _Terminal(), _Terminal(), (sys.argv, sys.stdin)
    sys.argv, sys.stdin = ["robust-ext", *arguments], io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with _limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _plain():
            cli.main()
        return 0, out.getvalue(), err.getvalue()
    except SystemExit as ended:
        return ended.code or 0, out.getvalue(), err.getvalue()
    except HangError:
        return "hang", out.getvalue(), err.getvalue()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", out.getvalue(), err.getvalue()
    finally:
        sys.argv, sys.stdin = before
        root.handlers[:], root.level = handlers, level


def _process(arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "robust_ext", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=4 * SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hang", "", ""
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


@contextlib.contextmanager
def _plain():
    """No colours of rich, and no warnings."""
    before = {name: os.environ.get(name) for name in ("TERM", "NO_COLOR")}
    os.environ.update(TERM="dumb", NO_COLOR="1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def _limited():
    def raise_hang(*_):
        raise HangError

    before = signal.signal(signal.SIGALRM, raise_hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
