"""Foolbox, imported in one place, without the warning that its import gives."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_ext.adapters.catalogue import Catalogue
from robust_ext.adapters.foolbox.entries import ENTRIES, Entry
from robust_ext.attacks.base import AttackTraits

with warnings.catch_warnings():
    # Foolbox 3.3.4 still imports gaussian_filter from where SciPy used to keep it.
    warnings.filterwarnings("ignore", message="Please import `gaussian_filter`", category=DeprecationWarning)
    foolbox: Any = importlib.import_module("foolbox")


_BASE = foolbox.attacks.base
UNUSABLE: Mapping[str, str] = {
    "Attack": "it is the base class; name an attack",
    "DatasetAttack": "it replaces a sample by other samples that it was fed, instead of perturbing it; use "
    "LinearSearchBlendedUniformNoiseAttack",
}
# A change of k values is at most k times the width of the bounds in l1.
_NORM_OF_P = {math.inf: "linf", 2: "l2", 1: "l1", 0: "l1"}


@dataclass(frozen=True, kw_only=True)
class _FoolboxCatalogue(Catalogue[Entry]):
    def entry(self, attack_class: type, *, argument: str = "attack") -> Entry:
        """An unlisted class has the entry of the Foolbox class it extends, and is attacked one sample at a time."""
        label = attack_class.__name__
        listed = self.owns(attack_class) and (label in self.entries or label in self.unusable)
        if listed or not issubclass(attack_class, self.base):
            return super().entry(attack_class, argument=argument)
        bases = [base.__name__ for base in attack_class.__mro__ if self.owns(base) and base.__name__ in self.entries]
        entry = self.entries[bases[0]] if bases else self.others
        minimum_norm = entry.traits.minimum_norm or issubclass(attack_class, _BASE.MinimizationAttack)
        return replace(entry, traits=replace(entry.traits, batching="single", minimum_norm=minimum_norm))


CATALOGUE = _FoolboxCatalogue(
    library="foolbox",
    place="foolbox.attacks",
    members={
        name: member
        for name, member in inspect.getmembers(foolbox.attacks, inspect.isclass)
        if issubclass(member, _BASE.Attack)
    },
    base=_BASE.Attack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)


def norms_of(distance: object) -> tuple[str, ...]:
    """The norm that candidates of a Foolbox distance are judged in, l1 for l0; none for a distance of another kind."""
    norm = _NORM_OF_P.get(getattr(distance, "p", math.nan))
    return () if norm is None else (norm,)


# Texts of torch's errors for a network that lets no gradient through.
_NO_GRADIENT = ("does not require grad", "not have been used in the graph", "returned NULL")
_RANDOM = (
    "; a point that was adversarial is no longer so when queried again, so the target's predictions are random or "
    "depend on the batch: choose an attack that does not rely on single predictions, or average them"
)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that Foolbox's attacks give where nothing is wrong with what the user did.

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
    """An error raised inside Foolbox, with what it means and what to do, where that is known."""
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
