"""A unit test for an attack: it must find the points planted in a model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import Unpack

import _robust_ext_pytestplugin as plugin
from robust_ext.core.errors import OutOfTimeError, RobustExtError, RobustExtWarning
from robust_ext.core.settings import make_settings
from robust_ext.core.target import module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_choice, check_inputs, check_integer, check_number
from robust_ext.engine.context import current_context, run_context
from robust_ext.engine.inputs import bounded_module
from robust_ext.evaluations.binarization import BinarizationResult, BinarizationSettings, binarization_test
from robust_ext.evaluations.binarization.options import BinarizationOptions
from robust_ext.evaluations.causes.finding import WEIGHTS
from robust_ext.evaluations.diagnosis import diagnose
from robust_ext.reports.findings import numbered

# Samples for the comparison of a weak attack with others, and findings to show.
_COMPARED, _SHOWN = 16, 3


def assert_attack_passes(
    model: object,
    attack: object,
    inputs: Array,
    threat_model: ThreatModel,
    *,
    labels: Array | None = None,
    device: str | torch.device | None = None,
    samples: int = 64,
    budget: float | None = None,
    inconclusive: str | None = None,
    **settings: Unpack[BinarizationOptions],
) -> BinarizationResult:
    """Raise AssertionError unless an attack passes the binarization test on a model, with the diagnosis as its text.

    The sequential rule decides (:class:`robust_ext.BinarizationSettings`): 32 samples pass a perfect attack, and the
    first eight fail a hopeless one. The seed is fixed, so the same call has the same verdict.

    Args:
        model: As in :func:`robust_ext.binarization_test`.
        attack: Anything :func:`robust_ext.as_attack` takes.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds; 32 or more.
        threat_model: The norm, epsilon and bounds.
        labels: Classes of the samples ``(N,)``, for the diagnosis; the model's predictions when left out.
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        samples: How many of the first samples are used at most.
        budget: Seconds after which the test ends with its verdict so far; None for pytest's option
            ``--robust-ext-budget``, or no limit.
        inconclusive: The outcome of that verdict: ``"fail"``, ``"skip"`` or ``"pass"``; None for pytest's option
            ``--robust-ext-inconclusive``, or ``"fail"``.
        **settings: Settings of the binarization test.

    Returns:
        The result, for further assertions.

    Raises:
        AssertionError: The verdict is not "passed"; the text has the result's table, causes and remedies, and the
            attribute ``result`` is the result.
        RobustExtError: An argument, the model or the attack is not as described.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> x, threat_model = load_dataset("digits").take(range(32))[0], ThreatModel(norm="linf", epsilon=0.1)
        >>> attack = "robust_ext:APGD(steps=10)"
        >>> assert_attack_passes(digits_network(), attack, x, threat_model, inner_points=50).verdict
        'passed'
    """
    __tracebackhide__ = True
    given = plugin.defaults()
    begun = time.monotonic()
    try:
        check_integer("samples", samples, minimum=1)
        otherwise = check_choice("inconclusive", inconclusive or given.inconclusive, plugin.INCONCLUSIVE)
        budget = given.budget if budget is None else check_number("budget", budget, minimum=0, open_minimum=True)
        deadline = None if budget is None else begun + budget
        checked = make_settings(BinarizationSettings, {"sequential": True, **settings}, threat_model=threat_model)
        some = check_inputs("inputs", inputs, bounds=threat_model.bounds)[:samples]
        with run_context(replace(current_context(), deadline=deadline)):
            result = binarization_test(model, attack, some, threat_model, device=device, settings=checked)
            passes = result.verdict == "passed" or (result.verdict, otherwise) == ("inconclusive", "pass")
            causes = [] if passes else _causes(result, model, attack, some, labels, threat_model, device)
    except RobustExtError as error:
        # Only the traceback of the attack helps the reader, not that of this project.
        raise error.with_traceback(None) from error.__cause__
    words = f"{result.verdict}: {_words(result)}, {time.monotonic() - begun:.1f} s"
    plugin.note(words)
    if passes:
        return result
    text = "\n".join([words, "", str(result).rstrip(), *causes])
    if (result.verdict, otherwise) == ("inconclusive", "skip"):
        pytest.skip(text)
    failure = AssertionError(text)
    failure.result = result  # type: ignore[attr-defined]
    raise failure


def _words(result: BinarizationResult) -> str:
    """Describe the best attack of a result."""
    best = max(result.attacks.values(), key=lambda entry: entry["score"] or 0.0)
    if best["score"] is None:
        return f"{best['name']}, nothing decided"
    return f"{best['name']}, test score {best['score']:.2f} of {best['samples']}, R-ASR {best['random_score']:.2f}"


def _causes(
    result: BinarizationResult,
    model: object,
    attack: object,
    inputs: Tensor,
    labels: Array | None,
    threat_model: ThreatModel,
    device: str | torch.device | None,
) -> list[str]:
    """List findings of the test and, time permitting, of a diagnosis on a few clean samples."""
    causes: list[Mapping[str, Any]] = list(result.content["findings"])
    some = inputs[:_COMPARED]
    try:
        if labels is None:
            module = bounded_module(model, threat_model, device=device)
            with torch.no_grad():
                labels = module(some.to(module_device(module))).argmax(1)
        with warnings.catch_warnings():
            # A failure shows causes, and nothing of what a diagnosis warns of.
            warnings.simplefilter("ignore", RobustExtWarning)
            found = diagnose(model, attack, some, labels[:_COMPARED], threat_model, device=device, planted=0)
    except OutOfTimeError:
        return [*numbered(causes), "", "The time was over before the attack was compared with others."]
    except RobustExtError:
        # A pair of features and readout, say, has no diagnosis.
        return numbered(causes)
    known = {cause["code"] for cause in causes}
    causes += [cause for cause in found.content["findings"] if cause["code"] not in known]
    return numbered(sorted(causes, key=lambda cause: WEIGHTS.index(cause["weight"]))[:_SHOWN])
