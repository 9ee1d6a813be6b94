"""Checks of a model's outputs: logits, and the same ones for a row in any batch, at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import SINGLE, check_consistency
from robust_ext.core.errors import InconsistentModelError
from robust_ext.core.foreign import text_of
from robust_ext.evaluations.causes import model_remedies as remedies
from robust_ext.evaluations.causes.calls import Call, Place, named
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.layers import batch_calls, mode_calls, random_calls
from robust_ext.evaluations.causes.tracing import PassTrace, traced
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.black_box import BlackBox
from robust_ext.models.outputs import TwoClass

# Seconds that a pass of a few rows may take for more rows to be looked at.
_SLOW = 1.0
# As AutoAttack tests it.
_PROBABILITY = 1e-5
_ANY_SIZE = Remedy(words="Make the model accept batches of any size.")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The measured outputs of a model.

    Attributes:
        findings: What is wrong with them.
        logits: ``(n, K)`` of the first n rows, detached: all, or a few of a slow module; None without any.
        random: Whether the same rows give other ones, in the mode that the module was in.
        softmax: Where the softmax was taken that the model returns; None where it does not.
        only_minus_infinite: Whether those that are not finite are all minus infinity.
    """

    findings: tuple[Finding, ...]
    logits: Tensor | None = None
    random: bool = False
    softmax: Place | None = None
    only_minus_infinite: bool = False


def probe_outputs(module: nn.Module, inputs: Tensor, *, bounds: tuple[float, float], rows: int, seed: int) -> Outputs:
    """Look at mode and outputs of a module, which is in eval mode afterwards where its mode is at fault.

    Args:
        module: From inputs to logits.
        inputs: ``(N, ...)``.
        bounds: Of inputs.
        rows: How many rows are looked at layer by layer.
        seed: Of draws.
    """
    few, findings, random = inputs[:rows], list[Finding](), False
    with torch.no_grad():
        begun = time.monotonic()
        trace = _watched(module, inputs, rows)
        if isinstance(trace, Finding):
            return Outputs(findings=(trace,))
        if time.monotonic() - begun > _SLOW:
            inputs = few
        if calls := mode_calls(trace, seed):
            findings.append(_mode_finding(calls))
            random = _is_random(_inconsistency(module, inputs, bounds))
            trace = _watched(module.eval(), inputs, rows)
            if isinstance(trace, Finding):
                return Outputs(findings=(*findings, trace))
        if trace.changed is not None:
            findings.append(_changed_finding(trace.changed))
        inconsistent = _inconsistency(module, inputs, bounds)
        if inconsistent is not None:
            findings.append(_inconsistent_finding(inconsistent, trace, len(few)))
            if inconsistent.kind in ("raises", "shape"):
                return Outputs(findings=tuple(findings))
        logits = module(inputs.clone())
    findings += _infinite_findings(logits, trace)
    # Two classes made of one probability, and scores of a black box, are logarithms by design.
    made, softmax = any(isinstance(part, (TwoClass, BlackBox)) for part in module.modules()), None
    if (code := None if made else _probabilities(logits)) is not None:
        places = [Place(call, one) for call in trace.calls for one in call.operations if "softmax" in one]
        softmax = places[-1] if places else None
        findings.append(_probability_finding(code, softmax))
    return Outputs(
        findings=tuple(findings),
        logits=logits,
        random=random or _is_random(inconsistent),
        softmax=softmax,
        only_minus_infinite=not bool((logits.isnan() | logits.isposinf()).any()),
    )


def _mode_finding(calls: Sequence[Call]) -> Finding:
    more = f" and {len(calls) - 5} more" if len(calls) > 5 else ""
    shown = f"{', '.join(named(call) for call in calls[:5])}{more}"
    return Finding(
        code="train_mode",
        cause="The model is in train mode, in which its outputs differ from those in eval mode.",
        evidence=(f"In train mode and with other outputs there: {shown}.",),
        layer=calls[0].name,
        remedies=(remedies.EVAL,),
    )


def _changed_finding(call: Call) -> Finding:
    return Finding(
        code="changes_input",
        cause=f"{named(call)} changes the model's input in place, so the attack's points change without its knowledge.",
        evidence=("The tensor that was given is another one after the forward pass.",),
        layer=call.name,
        remedies=(remedies.CLONE,),
    )


def _watched(module: nn.Module, inputs: Tensor, rows: int) -> PassTrace | Finding:
    """A trace of a forward pass of the first rows; what is wrong where it raises."""
    given = inputs[:rows].clone()
    with traced(module, len(given), watched=given) as trace:
        try:
            module(given)
        except Exception as error:
            failed = error
        else:
            return trace
    # It may raise under a trace only, as code that inspects its caller does.
    return trace if _runs(module, inputs[:rows]) else _crashed_finding(module, inputs, len(given), trace, failed)


def _crashed_finding(module: nn.Module, inputs: Tensor, rows: int, trace: PassTrace, error: Exception) -> Finding:
    call, code, cause = trace.running, "crashed", f"The model raises on {rows} inputs."
    evidence = [f"{type(error).__name__} in {named(call)}: {text_of(error)}"]
    with torch.enable_grad():
        with_gradients = _runs(module, inputs[:rows])
    images = inputs.dim() == 4 and inputs.shape[3] in (1, 3, 4)
    found: tuple[Remedy, ...]
    if with_gradients:
        cause = "The model raises where gradients are switched off, as they are for predictions."
        found = (remedies.GRADIENTS_ON,)
        evidence.append("It runs where they are switched on.")
        if trace.taking is not None:
            cause = f"{named(trace.taking)} takes gradients of its own while it runs, and raises where they are off."
            found = (remedies.TEST_TIME, *found)
    elif sizes := [size for size in dict.fromkeys((1, len(inputs))) if size != rows and _runs(module, inputs[:size])]:
        evidence.append(f"It runs on a batch of {' and of '.join(map(str, sizes))}.")
        found = (_ANY_SIZE,)
    elif images and _runs(module, turned := inputs[:rows].permute(0, 3, 1, 2)):
        code, cause = "input_layout", "The inputs have their channels last, and the model takes them first."
        call, evidence = None, [f"It runs on inputs of shape {tuple(turned.shape)}.", *evidence]
        line = "import torch\ninputs = torch.as_tensor(inputs).permute(0, 3, 1, 2)"
        found = (Remedy(words="Give inputs.permute(0, 3, 1, 2).", paste=line),)
    else:
        found = (Remedy(words="Call the model on such a batch in your own process, and fix the error."),)
    layer = None if call is None else call.name
    return Finding(code=code, cause=cause, evidence=tuple(evidence), layer=layer, remedies=found)


def _runs(module: nn.Module, inputs: Tensor) -> bool:
    try:
        module(inputs.clone())
    except Exception:
        return False
    return True


class _Copying(nn.Module):
    """A module that gets copies of its inputs, so that it cannot change them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x.clone())
        return out


def _inconsistency(module: nn.Module, inputs: Tensor, bounds: tuple[float, float]) -> InconsistentModelError | None:
    inside = [part for part in module.modules() if isinstance(part, AdaptiveDefense)]
    # Rows of a random defense draw numbers of their own, by their place in the batch.
    row_wise = not any(part.batch_level or part.random for part in inside)
    try:
        check_consistency(_Copying(module), inputs, bounds=bounds, row_wise=row_wise, optimised=bool(inside))
    except InconsistentModelError as error:
        return error
    return None


def _is_random(found: InconsistentModelError | None) -> bool:
    return found is not None and found.kind == "random"


def _inconsistent_finding(found: InconsistentModelError, trace: PassTrace, rows: int) -> Finding:
    if found.kind in ("raises", "shape"):
        what = "raises" if found.kind == "raises" else "returns no row of logits for each input"
        remedy = _ANY_SIZE if found.tried == SINGLE else Remedy(words="Make the model accept all inputs in the bounds.")
        cause = f"The model {what} {found.tried}."
        return Finding(code="crashed", cause=cause, evidence=(str(found),), remedies=(remedy,))
    random = _is_random(found)
    calls = random_calls(trace) if random else batch_calls(trace, rows)
    where = ", ".join(named(call) for call in calls[:5]) or "the model"
    what = "the same rows again" if random else "other rows beside a row"
    return Finding(
        code="random_output" if random else "batch_dependent",
        cause=f"The logits of a row depend on {'chance' if random else 'the other rows of the batch'}, in {where}.",
        evidence=(f"With {what}, logits differ by up to {found.difference:.3g}; the largest is {found.scale:.3g}.",),
        layer=calls[0].name if calls else None,
        remedies=remedies.RANDOM if random else (remedies.ROW_WISE,),
    )


def _infinite_findings(logits: Tensor, trace: PassTrace) -> Iterator[Finding]:
    rows = ~logits.isfinite().all(1)
    if not bool(rows.any()):
        return
    call = next((call for call in trace.calls if call.finite == (True, False)), None)
    yield Finding(
        code="non_finite_logits",
        cause=f"Logits are infinite or NaN, from {named(call)} on.",
        evidence=(f"{int(rows.sum())} of {len(rows)} rows have logits that are not finite.",),
        samples=int(rows.sum()),
        of=len(rows),
        layer=None if call is None else call.name,
        remedies=(Remedy(words="Keep logarithms, divisions and exponentials in a range where they are finite."),),
    )


def _probabilities(logits: Tensor) -> str | None:
    """The code of what logits are where they are none."""
    rows = logits.double()
    if rows.shape[1] < 2 or not bool((rows <= 1 + _PROBABILITY).all()):
        return None
    if bool((rows >= -_PROBABILITY).all()) and bool(((rows.sum(1) - 1).abs() < _PROBABILITY).all()):
        return "probabilities"
    return "log_probabilities" if bool((rows.logsumexp(1).abs() < _PROBABILITY).all()) else None


def _probability_finding(code: str, softmax: Place | None) -> Finding:
    call, logarithms = None if softmax is None else softmax.call, code == "log_probabilities"
    cause = (
        "The model returns log-probabilities, not logits; the losses of attacks stay the same."
        if logarithms
        else "The model returns probabilities, not logits: the loss of an attack applies a second softmax, and is flat."
    )
    return Finding(
        code=code,
        cause=cause,
        evidence=("In each row, values or their exponentials lie between 0 and 1 and sum to 1.",),
        layer=None if call is None else call.name,
        remedies=remedies.logits_of(call, logarithms=logarithms),
    )
