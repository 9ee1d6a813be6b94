"""Foolbox, imported and run without warnings where nothing is wrong, and its errors explained."""

from __future__ import annotations

import importlib
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # Foolbox 3.3.4 still imports gaussian_filter from where SciPy used to keep it.
    warnings.filterwarnings("ignore", message="Please import `gaussian_filter`", category=DeprecationWarning)
    foolbox: Any = importlib.import_module("foolbox")

# Texts of torch's errors for a network without gradients.
_NO_GRADIENT = ("does not require grad", "not have been used in the graph", "returned NULL")
_RANDOM = (
    "; a point that was adversarial is no longer so when queried again, so the target's predictions are random or "
    "depend on the batch: choose an attack that does not rely on single predictions, or average them"
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that Foolbox's attacks give without a mistake of the user.

    Foolbox also writes to the root logger by functions that configure logging where nobody has: a handler keeps them
    from it.
    """
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            expected = (
                "At the first initiali[sz]ation the optimizer needs to be compiled",
                # The adapter warns with numbers, where samples come back as their inputs.
                ".*failed to draw sufficient random inputs",
                "torch.meshgrid: in an upcoming release",
                "The given NumPy array is not writable",
            )
            for message in expected:
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            yield
    finally:
        logging.getLogger().removeHandler(handler)


def describe(title: str, error: Exception) -> str:
    """Describe an error raised inside Foolbox, with its meaning and remedy where they are known."""
    kind = f"{title} raised {type(error).__name__}"
    if str(error):
        meaning = ""
        if any(text in str(error) for text in _NO_GRADIENT):
            meaning = "; no gradient of the target reaches its input: choose an attack without gradients"
        elif isinstance(error, TypeError) and "argument: 'epsilon'" in str(error):
            # Foolbox runs an init_attack without a budget.
            meaning = "; as init_attack choose a minimum-norm attack, such as LinearSearchBlendedUniformNoiseAttack"
        elif "init_attack failed" in str(error):
            # Samples without a start are excused, so these had one a moment ago.
            meaning = _RANDOM
        return f"{kind}: {error}{meaning}"
    if not isinstance(error, AssertionError):
        return f"{kind} without a message"
    # Foolbox checks what users pass by bare assertions, which have no text; the line that failed shows more.
    failed = traceback.extract_tb(error.__traceback__)[-1]
    if failed.name == "verify_input_bounds":
        meaning = "; the inputs must lie in the target's bounds"
    elif "is_adv" in (failed.line or ""):
        meaning = _RANDOM
    else:
        meaning = ""
    return f"{kind}: {failed.line} ({Path(failed.filename).name}, line {failed.lineno}){meaning}"
