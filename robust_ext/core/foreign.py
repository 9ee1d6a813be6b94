"""Code that is not this project's: what it raises becomes an error that names it, also where it ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from robust_ext.core.errors import DataError, RobustExtError


@contextmanager
def foreign_code(
    argument: str, what: str, *, hint: str = "check its arguments", kind: type[RobustExtError] = DataError
) -> Iterator[None]:
    """Explain what code of a user or a library raises inside, by an error of a ``kind``; those of this project pass.

    ``sys.exit`` counts as raising: nothing that is evaluated may end the evaluation as if it had gone well.
    """
    try:
        yield
    except (RobustExtError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{argument}: {what} {raised(error, hint=hint)}") from error


def raised(error: BaseException, *, hint: str) -> str:
    """``raised ...; HINT``, in words; another hint where code tried to end the process."""
    if isinstance(error, SystemExit):
        hint = "let it return instead, with what it runs as a program below `if __name__ == '__main__':`"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"raised {text}; {hint}"
