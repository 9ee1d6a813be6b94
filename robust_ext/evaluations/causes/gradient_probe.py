"""Gradients at a model's input, and the places where they are lost, wrong or saturated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from robust_ext.core.random import seeded_globals, stream
from robust_ext.evaluations.causes import model_remedies as remedies
from robust_ext.evaluations.causes.calls import Call, Place, named
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.hooks import hook_findings
from robust_ext.evaluations.causes.layers import Fault, LayerReport, layer_reports, measure_gradients
from robust_ext.evaluations.causes.secants import near_identity
from robust_ext.evaluations.causes.tracing import PassTrace, traced
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.bpda import BPDA
from robust_ext.models.forms import float_twin, is_quantised

_WIDE = 16
# Rows beyond this share count: a unit may be dead for a row of a healthy network.
_SHARE = 0.1
_STEEP = 1.25
# How many layers are named.
_SHOWN = 5
# The logit difference that cross-entropy has gradients at.
_MARGIN = 10.0

_WORDS = {
    "zero_gradient": "has a gradient of exactly zero, while its outputs change with its inputs",
    "wrong_gradient": "has a gradient that does not predict how its outputs change",
    "saturated_layer": "is so steep or so flat that its gradient is valid for the smallest steps only",
}


def probe_gradients(
    module: nn.Module, inputs: Tensor, labels: Tensor, *, rows: int, seed: int, random: bool, softmax: Place | None
) -> tuple[list[Finding], tuple[LayerReport, ...]]:
    """Look at the gradients of the logit difference, and of cross-entropy at the logits.

    Args:
        module: From inputs to logits.
        inputs: ``(N, ...)``; the first 16 are used at most.
        labels: int64 ``(N,)``.
        rows: How many rows are looked at layer by layer.
        seed: Of directions and draws.
        random: Whether the module is; each pass then gets the same draws.
        softmax: Where the model takes the softmax that it returns; its own saturation is no further fault.

    Returns:
        The findings, and the measurements of each layer.
    """
    inputs, labels = inputs[:_WIDE], labels[:_WIDE]
    with seeded_globals(seed) if random else nullcontext():
        gradient, logits, error = _passed(module, inputs, labels)
    order = torch.arange(len(inputs), device=inputs.device)
    if gradient is not None:
        sound = gradient.flatten(1).isfinite().all(1) & (gradient.flatten(1) != 0).any(1)
        order = sound.long().argsort(stable=True)
    few, aims = inputs[order[:rows]], labels[order[:rows]]
    with traced(module, len(few)) as trace, seeded_globals(seed) if random else nullcontext():
        own = _passed(module, few, aims)[0]
    measured, faults = measure_gradients(module, few, trace, random=random, seed=seed)
    faults = [fault for fault in faults if not _excused(softmax, fault.call, fault.operation or "softmax")]
    # Hooks explain the measurements of layers.
    findings, hooks = list[Finding](), hook_findings(trace)
    if gradient is None:
        findings.append(_cut_finding(trace, faults, error))
    elif own is not None and not hooks:
        findings += _row_findings(gradient, own, trace, faults, softmax)
    if not findings and not hooks:
        findings += _fault_findings(faults)
    findings = [*hooks, *(replace(one, remedies=_helping(one.remedies, module, few, aims)) for one in findings)]
    if trace.taking is not None and not any(isinstance(part, AdaptiveDefense) for part in module.modules()):
        line, found = f"{named(trace.taking)} takes gradients of its own while it runs.", remedies.TEST_TIME
        findings = [replace(one, evidence=(*one.evidence, line), remedies=(found, *one.remedies)) for one in findings]
    if logits is not None and gradient is not None:
        findings += _loss_findings(logits, labels, gradient)
    return findings, layer_reports(trace, measured, faults)


def _passed(module: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor | None, Exception | None]:
    """Return the gradient of the summed logit difference at inputs, the logits, and any error."""
    x = inputs.clone().requires_grad_()
    logits = None
    try:
        # An operation in place at the front would be refused for a leaf.
        logits = module(x.clone())
        if not logits.requires_grad:
            return None, logits.detach(), None
        column = labels.view(-1, 1)
        others = logits.detach().scatter(1, column, -torch.inf).argmax(1, keepdim=True)
        difference = (logits.gather(1, others) - logits.gather(1, column)).sum()
        (gradient,) = torch.autograd.grad(difference, x, allow_unused=True)
    except Exception as error:
        return None, None if logits is None else logits.detach(), error
    return gradient, logits.detach(), None


def _helping(found: Sequence[Remedy], module: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Remedy, ...]:
    """The remedies that make gradients come back; where none does, those that need none."""
    kept = [one for one in found if _helps(one, module, inputs, labels)]
    without = () if any(one.view for one in kept) else (remedies.BLACK_BOX,)
    return *_of_twin(module, inputs, labels), *without, *kept


def _of_twin(module: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Remedy, ...]:
    """The gradients of a quantised network's float twin, where it has some, or else those of what it was made of."""
    if not is_quantised(module):
        return ()
    twin = float_twin(module)
    gradient = None if twin is None else _passed(twin, inputs, labels)[0]
    return (remedies.TRANSFER if gradient is None else remedies.FLOAT_TWIN,)


def _helps(remedy: Remedy, module: nn.Module, inputs: Tensor, labels: Tensor) -> bool:
    layer, backward = remedy.view.get("bpda"), remedy.view.get("gradient_mode", "identity")
    if layer is None and "gradient_mode" not in remedy.view:
        return True
    gradient, _, _ = _passed(BPDA(module, layer=layer, backward=backward), inputs, labels)
    return gradient is not None and bool(gradient.isfinite().all()) and bool((gradient != 0).any())


def _cut_finding(trace: PassTrace, faults: Sequence[Fault], error: Exception | None) -> Finding:
    cut, silent = trace.cut, faults[0].call if faults else None
    place = (trace.failed or trace.last_node) if error is not None else None if cut is None else cut.place
    call = trace.running or silent if place is None else place.call
    if error is not None:
        how, evidence = "raises where one is wanted", f"{type(error).__name__}: {error}"
        if call is not None:
            # It did not return where a gradient was wanted, so its shape was not looked at.
            call.same_shape = _keeps_shape(call)
    else:
        what = f"the operation {place.operation}" if place is not None and place.operation else "what it computes"
        off = cut is not None and cut.graph_off
        how = "switches gradients off (no_grad)" if off else f"cuts the graph by {what}"
        evidence = "The logits have no graph that leads to the input."
    return Finding(
        code="cut_gradient",
        cause=f"No gradient comes back to the input: {named(call)} {how}.",
        evidence=(evidence, *(_measured(one) for one in faults if call is not None and one.call.name == call.name)),
        layer=None if call is None else call.name,
        remedies=remedies.around(call, [fault.call for fault in faults], near=_near(call)),
    )


def _keeps_shape(call: Call) -> bool:
    try:
        with torch.no_grad():
            return [one.shape for one in call.again()] == [one.shape for one in call.points]
    except Exception:
        return False


def _row_findings(
    gradient: Tensor, own: Tensor, trace: PassTrace, faults: Sequence[Fault], softmax: Place | None
) -> Iterator[Finding]:
    """Rows whose gradient is zero or not finite, with the place where it became so."""
    for zero in (False, True):
        rows, few = _bad(gradient, zero), _bad(own, zero).cpu()
        if int(rows.sum()) <= _SHARE * len(rows):
            continue
        # Zero: the place nearest to the input, as branches may die harmlessly before. Not finite: the one nearest to
        # the output, as what follows is not finite because of it.
        places = [one for one in trace.killed if one.zero == zero and bool((one.rows & few).any())]
        killed = places[-1 if zero else 0] if places else None
        silent = next((fault.call for fault in faults if fault.code == "zero_gradient"), None)
        call = silent if killed is None else killed.place.call
        # A layer that stops a few rows' gradients because it is saturated is reported as such.
        milder = any(fault.call is call and fault.code != "zero_gradient" for fault in faults)
        if zero and ((milder and not bool(rows.all())) or (killed is not None and _excused(softmax, *killed.place))):
            continue
        if not zero:
            cause = f"The gradient at the input is not finite, from {named(call)} on."
        elif call is None:
            cause = "The gradient at the input is exactly zero, and no module stops it."
        else:
            cause = f"The gradient at the input is exactly zero: {named(call)} stops it."
        count = f"{int(rows.sum())} of {len(rows)} rows have a gradient that is {'zero' if zero else 'not finite'}"
        node = "" if killed is None else f"; it becomes so in {killed.node} ({killed.place.operation or 'its own'})"
        yield Finding(
            code="zero_gradient" if zero else "non_finite_gradient",
            cause=cause,
            evidence=(f"{count}{node}.", *[_measured(one) for one in faults if one.call is call]),
            samples=int(rows.sum()),
            of=len(rows),
            layer=None if call is None else call.name,
            remedies=remedies.around(call, [fault.call for fault in faults], near=_near(call))
            if zero
            else remedies.finite(call),
        )


def _excused(softmax: Place | None, call: Call, operation: str) -> bool:
    """Return whether something is the softmax of the outputs, which has a finding of its own."""
    return softmax is not None and call.name == softmax.call.name and (call.leaf or "softmax" in operation)


def _bad(gradient: Tensor, zero: bool) -> Tensor:
    flat = gradient.flatten(1)
    return (flat == 0).all(1) if zero else ~flat.isfinite().all(1)


def _fault_findings(faults: Sequence[Fault]) -> Iterator[Finding]:
    """One finding for the faults of a code, at the first of their layers."""
    for code in dict.fromkeys(fault.code for fault in faults):
        first, *others = [fault for fault in faults if fault.code == code]
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        likewise = f"; likewise {', '.join(map(_place, others[:_SHOWN]))}{more}" if others else ""
        identity = remedies.around(first.call, [fault.call for fault in faults])
        yield Finding(
            code=code,
            cause=f"{_place(first)} {_WORDS[code]}{likewise}.",
            evidence=(_measured(first),),
            layer=first.call.name,
            remedies=(*identity, remedies.SMOOTHED) if _near(first.call) else (*remedies.ACROSS_JUMPS, *identity),
        )


def _near(call: Call | None) -> bool:
    """Return whether a module is like the identity, or it cannot be seen."""
    try:
        return (
            call is None or not call.same_shape or near_identity(call.again, call.points, generator=stream(0, "near"))
        )
    except Exception:
        # Foreign code that runs in one way need not run in another.
        return True


def _place(fault: Fault) -> str:
    return f"{fault.operation} in {named(fault.call)}" if fault.operation else named(fault.call)


def _measured(fault: Fault) -> str:
    one = fault.found
    jumps = one.steepness is not None and one.steepness > _STEEP
    steep = f", and {one.steepness:.3g} times as steep nearby as over the large ones" if jumps else ""
    return (
        f"{_place(fault)}: gradient and differences are {one.small:.0%} apart over small steps, {one.large:.0%} "
        f"over large ones{steep}; healthy layers: under 30%."
    )


def _loss_findings(logits: Tensor, labels: Tensor, gradient: Tensor) -> Iterator[Finding]:
    """Rows for which cross-entropy has no gradient at the logits, though the network has one."""
    leaf = logits.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(cross_entropy(leaf, labels, reduction="sum"), leaf)
    rows = (pulled == 0).all(1) & ~_bad(gradient, True)
    if int(rows.sum()) <= _SHARE * len(rows):
        return
    found = logits[rows].double()
    margins = found.topk(2, 1).values
    margin = float((margins[:, 0] - margins[:, 1]).median())
    temperature = float(f"{max(margin / _MARGIN, 1.0):.1g}")
    yield Finding(
        code="saturated_loss",
        cause="Logits are so large that cross-entropy and its gradient are exactly zero.",
        evidence=(
            f"{int(rows.sum())} of {len(rows)} rows have a gradient of cross-entropy that is zero at the logits, and "
            f"not one of the logit difference; their logits lead by {margin:.3g} (median).",
        ),
        samples=int(rows.sum()),
        of=len(rows),
        remedies=(remedies.cooled(temperature), remedies.MARGIN),
    )
