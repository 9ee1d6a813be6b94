"""What settings of the attacks of other libraries may be: the libraries themselves accept ``steps=-5`` and run nothing.

Values are checked by what their names mean in all four libraries, or else by the type of the library's default. The
library's own default always passes, and so does an object (a loss, an optimizer), which is left to the library.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import LARGEST
from robust_ext.core.validation import check_integer, check_number

# How often something is done: with 0 or less an attack does nothing.
_COUNTS = """
    steps num_steps n_iter nb_iter nb_steps num_iter_set iter iterations max_iter max_iterations max_inner_iter
    first_steps check_steps proximal_steps search_iter binary_search_steps initial_gradient_eval_steps
    max_gradient_eval_steps conjugate_sinkhorn_max_iter projected_sinkhorn_max_iter random_steps eps_iter restarts
    n_restarts nb_restarts random_initializations repeats num_trial directions candidates population popsize
    n_queries max_eval init_eval query_limit num_boost_queries init_size sample_size batch_size max_batch_size
    batch_max inf_batch nb_parallel noise_batch_size eot_iter n_samples nb_sample num_xforms num_xforms_mask
    num_xforms_boost nb_grads num_rotations num_translations update_stats_every_k n_classes m N pixels kernel_size
    len_kernel stride freq_dim sub_dim num_targets levels group_size
"""
# The same, where none is a choice.
_COUNTS_OR_NONE = """
    num_random_init nb_random_init df_steps lr_num_decay parallel_pool_size max_halving max_doubling seed
"""
# Sizes of steps, budgets and weights of a search, which lead nowhere at 0.
_POSITIVE = """
    rel_stepsize abs_stepsize stepsize initial_stepsize max_stepsize min_stepsize step_size eps_step alpha
    absolute_step_size relative_step_size spherical_step source_step lr learning_rate lr_init primal_lr dual_lr eps
    max_epsilon max_eps ε init_epsilon initial_const largest_const const_factor xi
"""
# Numbers of norms, of which one is infinite, and numbers that are names of layers or classes.
_NORMS = ("norm", "grad_norm", "p")
_FREE = "norm grad_norm p layer max_mask_size"
# What a setting is by its name, in all four libraries.
_MEANINGS = {
    name: meaning
    for meaning, names in (
        ("count", _COUNTS),
        ("count or none", _COUNTS_OR_NONE),
        ("positive", _POSITIVE),
        ("free", _FREE),
    )
    for name in names.split()
}


def check_ranges(made_of: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Check the settings of a class or function of a library against what their names mean.

    Raises InvalidArgumentError with the setting, its value and what was expected.
    """
    parameters = inspect.signature(made_of).parameters
    for name, value in settings.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        # An entry for each sample or such is an array, and objects are the library's.
        several = (isinstance(value, (list, tuple, dict)) and _MEANINGS.get(name, "free") != "free") or name in _NORMS
        if value is default or not (several or isinstance(value, (bool, int, float, str))):
            continue
        try:
            _check(name, value, default)
        except InvalidArgumentError as error:
            raise InvalidArgumentError("attack", f"{made_of.__name__}({name}={value!r})", error.expected) from None


def _check(name: str, value: object, default: object) -> None:
    meaning = _MEANINGS.get(name, "")
    if meaning == "free":
        norms = (1, 2, math.inf) if name == "p" else (0, 1, 2, math.inf)
        named = isinstance(value, str) and name != "p"
        if name in _NORMS and not named and (isinstance(value, bool) or value not in norms):
            raise InvalidArgumentError(name, value, f"one of {', '.join(map(str, norms))}")
        if isinstance(value, float) and math.isnan(value):
            raise InvalidArgumentError(name, value, "a number")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidArgumentError(name, value, "True or False")
    elif meaning.startswith("count"):
        check_integer(name, value, minimum=int(meaning == "count"), maximum=2**32 - 1 if name == "seed" else LARGEST)
    elif meaning == "positive":
        check_number(name, value, minimum=0, open_minimum=True, maximum=LARGEST)
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise InvalidArgumentError(name, value, f"a text, as {default!r} is")
    elif isinstance(default, (int, float)) or not isinstance(value, (str, bool)):
        check_number(name, value, minimum=-LARGEST, maximum=LARGEST)
