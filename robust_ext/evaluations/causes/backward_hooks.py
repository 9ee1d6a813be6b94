"""Hooks that change gradients on their way back: on a module, or on a tensor inside its forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from robust_ext.core.random import stream
from robust_ext.evaluations.causes.calls import Call
from robust_ext.evaluations.causes.cut_operations import PassTrace
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.layers import first_calls
from robust_ext.evaluations.causes.output_probe import named
from robust_ext.evaluations.causes.remedies import BLACK_BOX

# Below this cosine a gradient is another one; hooks that only look at it or scale it are left to other checks.
_ALIKE = 0.99
_KINDS = ("_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Changed:
    """A hook that changes the gradient: to zero, to what is not finite, or to one of another direction."""

    call: Call
    code: str
    words: str
    of_module: bool


def hook_findings(trace: PassTrace) -> Iterator[Finding]:
    """One finding for each module of a traced pass whose hooks change gradients."""
    seen = set()
    for one in (*_of_modules(trace), *_of_tensors(trace)):
        if one.call.name in seen:
            continue
        seen.add(one.call.name)
        kind = "A backward hook" if one.of_module else "A hook on a tensor in the forward"
        yield Finding(
            code=one.code,
            cause=f"{kind} of {named(one.call)} changes the gradient on its way back.",
            evidence=(one.words,),
            layer=one.call.name,
            remedies=(_removed(one), BLACK_BOX),
        )


def _removed(changed: _Changed) -> Remedy:
    if not changed.of_module:
        return Remedy(words="Take the hook (register_hook) out of the forward, for the attack at least.")
    found = f'{{module}}.get_submodule("{changed.call.name}")' if changed.call.name else "{module}"
    lines = "\n".join(f"{found}.{kind}.clear()" for kind in _KINDS)
    return Remedy(words="Remove the backward hook, for the attack at least.", paste=lines)


def _of_modules(trace: PassTrace) -> Iterator[_Changed]:
    """Hooks of modules, seen by what comes back with them and without them."""
    for call in first_calls(trace):
        if not any(getattr(call.module, kind, None) for kind in _KINDS):
            continue
        try:
            with_them, without = _pulled(call), _without(call.module, partial(_pulled, call))
        except Exception:
            # Foreign code that runs in one way need not run in another.
            continue
        if (change := _change(without, with_them)) is not None:
            code, words = change
            yield _Changed(call, code, f"With it, the gradient at its input {words} without it.", of_module=True)


def _of_tensors(trace: PassTrace) -> Iterator[_Changed]:
    """Hooks of tensors, seen by what they were given and what they returned."""
    for call, given, returned in trace.hooked:
        if (change := _change(given, returned)) is not None:
            code, words = change
            yield _Changed(call, code, f"What it returns {words} of what it is given.", of_module=False)


def _pulled(call: Call) -> Tensor:
    """The gradient of a weighted sum of what a module returns, at its arguments, as one vector in float64."""
    points, generator = [point.detach().requires_grad_() for point in call.points], stream(0, "hooks")
    with torch.enable_grad():
        outputs = [one for one in call.again(points) if one.requires_grad]
        weights = [torch.randn(one.shape, generator=generator).to(one) for one in outputs]
        value = torch.stack([(one * weight).sum() for one, weight in zip(outputs, weights, strict=True)]).sum()
    found = torch.autograd.grad(value, points, allow_unused=True)
    pairs = zip(found, points, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten().double().cpu() for g, p in pairs])


def _without(module: nn.Module, run: partial[Tensor]) -> Tensor:
    kept = {kind: dict(getattr(module, kind)) for kind in _KINDS}
    try:
        for kind in _KINDS:
            getattr(module, kind).clear()
        return run()
    finally:
        for kind, hooks in kept.items():
            getattr(module, kind).update(hooks)


def _change(before: Tensor, after: Tensor) -> tuple[str, str] | None:
    """The code of what a hook does to a gradient, and how it differs; None where it leaves its direction."""
    before, after = before.flatten().double(), after.flatten().double()
    if not bool(before.isfinite().all()) or not bool(before.any()):
        return None
    if not bool(after.isfinite().all()):
        return "non_finite_gradient", "is not finite, and it is"
    if not bool(after.any()):
        return "zero_gradient", "is exactly zero, and not that"
    if before.shape != after.shape:
        return None
    # Products of tiny gradients would round to 0.
    cosine = float(nn.functional.cosine_similarity(before / before.abs().max(), after / after.abs().max(), dim=0))
    return None if cosine > _ALIKE else ("wrong_gradient", f"has a cosine of {cosine:.2f} with that")
