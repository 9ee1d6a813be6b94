"""Catalogues of a library's attacks: entries, names, listings, and checks of settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Generic, TypeVar

from robust_ext.attacks.base import BATCHING, FAILURES, SEEDS, AttackTraits
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.settings import LARGEST
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_integer, check_number
from robust_ext.registry.base import AttackListing

E = TypeVar("E", bound=AttackListing)
_TRAITS = {one.name for one in fields(AttackTraits)}
_CHOICES = {
    word: name for name, known in (("batching", BATCHING), ("failure", FAILURES), ("seeds", SEEDS)) for word in known
}


def make_entry(
    kind: type[E],
    words: str,
    trial: str | Mapping[str, Any] = "",
    *,
    classes: int = 2,
    packages: str = "",
    **others: Any,
) -> E:
    """Return the entry of an attack in a library.

    Args:
        kind: Class of the entry, a listing with what the library's adapter needs to know besides.
        words: Norms (all when left out), values of ``batching``, ``failure`` and ``seeds``, traits and fields
            of the entry that are True, and ``black-box`` for an attack without gradients.
        trial: Settings of the trial, as text that a call would have.
        classes: Fewest classes.
        packages: Names of modules it imports.
        **others: Other fields of the entry.
    """
    traits: dict[str, Any] = {"minimum_classes": classes, "packages": tuple(packages.split())}
    for word in words.split():
        if word in NORMS:
            traits["norms"] = (*traits.get("norms", ()), word)
        elif word in _CHOICES:
            traits[_CHOICES[word]] = word
        elif word == "black-box":
            traits["gradients"] = False
        else:
            (traits if word in _TRAITS else others)[word] = True
    settings = parse_call(f"trial:settings({trial})").arguments if isinstance(trial, str) else trial
    return kind(traits=AttackTraits(**traits), trial=settings, **others)


@dataclass(frozen=True, kw_only=True)
class Catalogue(Generic[E]):
    """All attacks of a library, which are classes or functions.

    Args:
        library: Prefix of attack strings, and the package that holds the attacks.
        place: The module in which people find them.
        members: What can be named, aliases included; None for one that is not imported because it cannot be used.
        entries: What is known of each that can be used, by name.
        unusable: Why others cannot be used and what to use instead, by name.
        others: The entry of classes that are not the library's own; it assumes nothing that could mix up samples.
        base: Class of all attacks.
    """

    library: str
    place: str
    members: Mapping[str, Any]
    entries: Mapping[str, E]
    unusable: Mapping[str, str]
    others: E
    base: type = FunctionType

    def find(self, name: str, *, argument: str = "attack") -> Any:
        """Return the class or function called ``name``, aliases included.

        InvalidArgumentError suggests names or explains the refusal; MissingDependencyError names the package.
        """
        if name in self.members:
            if self.members[name] is None:
                raise self.refusal(name, argument)
            return self.members[name]
        if name in self.entries:
            missing = " ".join(self.entries[name].traits.packages)
            raise MissingDependencyError(f"{self.library}:{name} needs {missing}; pip install {missing}")
        near = did_you_mean(name, [other for other in self.members if self._label(other) in self.entries])
        expected = f"the name of an attack in {self.place}{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"{self.library}:{name}", expected)

    def entry(self, attack_class: type, *, argument: str = "attack") -> E:
        """Return the data on a class; InvalidArgumentError explains why it is no attack, or cannot be used here."""
        label = attack_class.__name__
        if not issubclass(attack_class, self.base):
            raise InvalidArgumentError(argument, f"{self.library}'s {label}", f"one of the attacks in {self.place}")
        if not self.owns(attack_class):
            return self.others
        if label not in self.entries:
            raise self.refusal(label, argument)
        return self.entries[label]

    def owns(self, member: Any) -> bool:
        """Return whether a class or function is defined in the library."""
        return str(member.__module__).startswith(f"{self.library}.")

    def refusal(self, label: str, argument: str) -> InvalidArgumentError:
        """Return the error for an attack that cannot be used here."""
        reason = self.unusable.get(label, f"it is not known here; use one of the attacks in {self.place} that are")
        return InvalidArgumentError(argument, f"{self.library}:{label}", f"an attack that fits here: {reason}")

    def listings(self) -> list[AttackListing]:
        """List each attack once under its own name, unusable ones included."""
        found: list[AttackListing] = []
        for name, member in self.members.items():
            if self._label(name) == name and member is not self.base:
                aliases = tuple(other for other in self.members if other != name and self._label(other) == name)
                reason = self.unusable.get(name, "it is not known here; use another attack")
                entry = self.entries.get(name) or AttackListing(reason=reason)
                found.append(replace(entry, name=name, aliases=aliases))
        return found

    def _label(self, name: str) -> str:
        return str(getattr(self.members[name], "__name__", name))


def classes_in(module: Any, base: type) -> dict[str, Any]:
    """Return the subclasses of a base in a module by name, aliases included."""
    return {name: one for name, one in inspect.getmembers(module, inspect.isclass) if issubclass(one, base)}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# How often something is done: with 0 or less an attack does nothing.
_COUNTS = _names("""
    steps num_steps n_iter nb_iter nb_steps num_iter_set iter iterations max_iter max_iterations max_inner_iter
    first_steps check_steps proximal_steps search_iter binary_search_steps initial_gradient_eval_steps
    max_gradient_eval_steps conjugate_sinkhorn_max_iter projected_sinkhorn_max_iter random_steps eps_iter restarts
    n_restarts nb_restarts random_initializations repeats num_trial directions candidates population popsize
    n_queries max_eval init_eval query_limit num_boost_queries init_size sample_size batch_size max_batch_size
    batch_max inf_batch nb_parallel noise_batch_size eot_iter n_samples nb_sample num_xforms num_xforms_mask
    num_xforms_boost nb_grads num_rotations num_translations update_stats_every_k n_classes m N pixels kernel_size
    len_kernel stride freq_dim sub_dim num_targets levels group_size
""")
# The same, where none is a choice.
_COUNTS_OR_NONE = _names("""
    num_random_init nb_random_init df_steps lr_num_decay parallel_pool_size max_halving max_doubling seed
""")
# Sizes of steps, budgets and weights of a search, which lead nowhere at 0.
_POSITIVE = _names("""
    rel_stepsize abs_stepsize stepsize initial_stepsize max_stepsize min_stepsize step_size eps_step alpha
    absolute_step_size relative_step_size spherical_step source_step lr learning_rate lr_init primal_lr dual_lr eps
    max_epsilon max_eps ε init_epsilon initial_const largest_const const_factor xi
""")
# Numbers of norms, of which one is infinite, and numbers that are names of layers or classes.
_NORMS = ("norm", "grad_norm", "p")
_FREE = (*_NORMS, "layer", "max_mask_size")


def check_ranges(made_of: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Check the settings of a class or function of a library against what their names mean.

    Raises InvalidArgumentError with the setting, its value and the expected value.
    """
    parameters = inspect.signature(made_of).parameters
    checked = {*_COUNTS, *_COUNTS_OR_NONE, *_POSITIVE, *_NORMS}
    for name, value in settings.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        # An entry for each sample or such is an array, and objects are the library's.
        several = (isinstance(value, (list, tuple, dict)) and name in checked) or name in _NORMS
        if value is default or not (several or isinstance(value, (bool, int, float, str))):
            continue
        try:
            _check(name, value, default)
        except InvalidArgumentError as error:
            raise InvalidArgumentError("attack", f"{made_of.__name__}({name}={value!r})", error.expected) from None


def _check(name: str, value: object, default: object) -> None:
    if name in _FREE:
        norms = (1, 2, math.inf) if name == "p" else (0, 1, 2, math.inf)
        named = isinstance(value, str) and name != "p"
        if name in _NORMS and not named and (isinstance(value, bool) or value not in norms):
            raise InvalidArgumentError(name, value, f"one of {', '.join(map(str, norms))}")
        if isinstance(value, float) and math.isnan(value):
            raise InvalidArgumentError(name, value, "a number")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidArgumentError(name, value, "True or False")
    elif name in _COUNTS or name in _COUNTS_OR_NONE:
        check_integer(name, value, minimum=int(name in _COUNTS), maximum=2**32 - 1 if name == "seed" else LARGEST)
    elif name in _POSITIVE:
        check_number(name, value, minimum=0, open_minimum=True, maximum=LARGEST)
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise InvalidArgumentError(name, value, f"a text, as {default!r} is")
    elif isinstance(default, (int, float)) or not isinstance(value, (str, bool)):
        check_number(name, value, minimum=-LARGEST, maximum=LARGEST)
