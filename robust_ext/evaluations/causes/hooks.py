"""Hooks that change gradients on their way back: on a module, or on a tensor inside its forward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from robust_ext.core.random import stream
from robust_ext.evaluations.causes.calls import Call, named
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.remedies import BLACK_BOX
from robust_ext.evaluations.causes.tracing import PassTrace

# Below this cosine a gradient is another one; hooks that only look at it or scale it are left to other checks.
_ALIKE = 0.99
_KINDS = ("_backward_hooks", "_backward_pre_hooks")


def hook_findings(trace: PassTrace) -> list[Finding]:
    """Return one finding for each module of a traced pass whose hooks change gradients."""
    found = dict[str, Finding]()
    for one in (*_of_modules(trace), *_of_tensors(trace)):
        found.setdefault(str(one.layer), one)
    return list(found.values())


def _of_modules(trace: PassTrace) -> Iterator[Finding]:
    """Hooks of modules, seen by what comes back with them and without them."""
    for call in trace.first_calls:
        if not any(getattr(call.module, kind, None) for kind in _KINDS):
            continue
        hooks = [(getattr(call.module, kind), dict(getattr(call.module, kind))) for kind in _KINDS]
        try:
            with_them = _pulled(call)
            for kept, _ in hooks:
                kept.clear()
            change = _change(_pulled(call), with_them)
        except Exception:
            # Foreign code that runs in one way need not run in another.
            continue
        finally:
            for kept, those in hooks:
                kept.update(those)
        if change is not None:
            code, words = change
            owner = f'{{module}}.get_submodule("{call.name}")' if call.name else "{module}"
            yield Finding(
                code=code,
                cause=f"A backward hook of {named(call)} changes the gradient on its way back.",
                evidence=(f"With it, the gradient at its input {words} without it.",),
                layer=call.name,
                remedies=(
                    Remedy(
                        words="Remove the backward hook, for the attack at least.",
                        paste="\n".join(f"{owner}.{kind}.clear()" for kind in _KINDS),
                    ),
                    BLACK_BOX,
                ),
            )


def _of_tensors(trace: PassTrace) -> Iterator[Finding]:
    """Hooks of tensors, seen by what they were given and what they returned."""
    for call, given, returned in trace.hooked:
        if (change := _change(given, returned)) is not None:
            code, words = change
            remedy = Remedy(words="Take the hook (register_hook) out of the forward, for the attack at least.")
            yield Finding(
                code=code,
                cause=f"A hook on a tensor in the forward of {named(call)} changes the gradient on its way back.",
                evidence=(f"What it returns {words} of what it is given.",),
                layer=call.name,
                remedies=(remedy, BLACK_BOX),
            )


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
