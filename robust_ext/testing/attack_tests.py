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
from robust_ext.core.finding_texts import numbered
from robust_ext.core.settings import make_settings
from robust_ext.core.target import module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_choice, check_inputs, check_integer, check_number
from robust_ext.engine.context import current_context, run_context
from robust_ext.engine.inputs import bounded_module
from robust_ext.evaluations.binarization import BinarizationResult, BinarizationSettings, binarization_test
from robust_ext.evaluations.causes.finding import WEIGHTS
from robust_ext.evaluations.diagnosis import diagnose
from robust_ext.evaluations.options import BinarizationOptions

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
    """Return the result of the binarization test; AssertionError, with the diagnosis, unless the attack passes.

    The sequential rule decides: 32 samples pass a perfect attack, and the first eight fail a hopeless one. The seed is
    fixed, so the same call has the same verdict.

    Args:
        model: As in :func:`robust_ext.binarization_test`.
        attack: Anything :func:`robust_ext.as_attack` takes.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds; 32 or more.
        threat_model: The norm, epsilon and bounds.
        labels: Classes of the samples ``(N,)``, for the diagnosis; the model's predictions when left out.
        device: Where to run it; the model's own device when left out.
        samples: How many of the first samples are used at most.
        budget: Seconds after which the test ends with its verdict so far; pytest's option ``--robust-ext-budget``.
        inconclusive: What becomes of it: ``"fail"``, ``"skip"`` or ``"pass"``; option ``--robust-ext-inconclusive``.
        **settings: Settings of the binarization test.

    Raises:
        AssertionError: The verdict is not "passed"; the text has table, causes and remedies, and ``result`` the result.
        RobustExtError: An argument, the model or the attack is not as described.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> x, limits = load_dataset("digits").take(range(32))[0], ThreatModel(norm="linf", epsilon=0.1)
        >>> assert_attack_passes(digits_network(), "robust_ext:APGD(steps=10)", x, limits, inner_points=50).verdict
        'passed'
    """
    __tracebackhide__ = True
    given, begun = plugin.defaults(), time.monotonic()
    try:
        check_integer("samples", samples, minimum=1)
        otherwise = check_choice("inconclusive", inconclusive or given.inconclusive, plugin.INCONCLUSIVE)
        budget = given.budget if budget is None else check_number("budget", budget, minimum=0, open_minimum=True)
        checked = make_settings(BinarizationSettings, {"sequential": True, **settings}, threat_model=threat_model)
        some = check_inputs("inputs", inputs, bounds=threat_model.bounds)[:samples]
        with (
            run_context(replace(current_context(), deadline=None if budget is None else begun + budget)),
            warnings.catch_warnings(),
        ):
            # The verdict states it too, and whether that fails is the caller's choice.
            warnings.filterwarnings("ignore", message="No attack can pass", category=RobustExtWarning)
            result = binarization_test(model, attack, some, threat_model, device=device, settings=checked)
            passes = result.verdict == "passed" or (result.verdict, otherwise) == ("inconclusive", "pass")
            causes = [] if passes else _causes(result, model, attack, some, labels, threat_model, device)
    except RobustExtError as error:
        # Only the traceback of the attack helps the reader, not that of this project.
        raise error.with_traceback(None) from error.__cause__
    plugin.note(words := f"{result.verdict}: {_words(result)}, {time.monotonic() - begun:.1f} s")
    if not passes:
        _fail("\n".join([words, "", str(result).rstrip(), *causes]), result, skip=otherwise == "skip")
    return result


def _fail(text: str, result: BinarizationResult, *, skip: bool) -> None:
    """Raise AssertionError with the result as an attribute, or skip the test where nothing was decided."""
    __tracebackhide__ = True
    if skip and result.verdict == "inconclusive":
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
