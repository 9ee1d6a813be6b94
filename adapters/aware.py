"""This project's attacks that know the detector, on the models of host libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import declared
from robust_ext.core.target import frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs
from robust_ext.models.defended import Defended


def search_defended(
    attack: NativeAttack,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    expected: str,
    threat_model: ThreatModel,
    generator: torch.Generator,
    targeted: bool = False,
    watch: Watch | None = None,
    references: Tensor | None = None,
) -> Tensor:
    """Run an attack that knows the detector on the classifier and the detector inside a host library's model.

    The model is asked once for random points, to see that nothing lies around the detector.

    Args:
        attack: The attack.
        module: The host's model, with a :class:`Defended` in it and nothing around that.
        inputs: float32 ``(N, ...)`` in the bounds; not changed.
        labels: Integers ``(N,)`` below the number of the classifier's classes.
        expected: The host's class of models with a detector, for error messages.
        threat_model: See :func:`robust_ext.adapters.native.search_module`, as for the arguments that follow.
        generator: Likewise.
        targeted: Likewise.
        watch: Likewise.
        references: Likewise, or ``(R, ...)`` for all rows; read only where the attack needs them.

    Returns:
        Candidates ``(N, ...)``, float32.

    Raises:
        AttackRefusedError: The attack does not work for this norm, or follows scores that have no gradients.
        InvalidArgumentError: The model has no detector or something around it, or an argument is not as stated.
    """
    if inputs.dtype != torch.float32:
        raise InvalidArgumentError(
            "inputs", f"dtype {inputs.dtype}", "float32; detectors are attacked in no other type"
        )
    x = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    defended = find_defended(module, expected=expected)
    _check_bare(module, defended, x, bounds=threat_model.bounds)
    if attack.traits.references:
        references = check_references(references, x, bounds=threat_model.bounds)
    return search_module(
        attack,
        defended.classifier,
        x,
        labels,
        threat_model=threat_model,
        generator=generator,
        targeted=targeted,
        watch=watch,
        defended=defended,
        references=references,
    )


def find_defended(module: nn.Module, *, expected: str) -> Defended:
    """The classifier with its detector that a module is or holds.

    Args:
        module: Any.
        expected: What to pass instead, for the error message.

    Raises:
        InvalidArgumentError: There is none.
    """
    for part in module.modules():
        if isinstance(part, Defended):
            return part
    raise InvalidArgumentError("model", "one without a detector", f"a {expected}; this attack attacks its detector too")


def check_references(references: object, inputs: Tensor, *, bounds: tuple[float, float]) -> Tensor:
    """Return points to imitate as ``(N, R, ...)``, one group a row.

    Args:
        references: Floating point ``(N, R, ...)``, or ``(R, ...)`` for all rows, in the bounds; R at least 1.
        inputs: ``(N, ...)``.
        bounds: Lowest and highest input value.

    Raises:
        InvalidArgumentError: They are something else, or None.
    """
    rows, shape = len(inputs), tuple(inputs.shape[1:])
    shown = ", ".join(map(str, shape))
    expected = (
        f"points of other classes that the detector lets pass, to imitate: a tensor ({rows}, R, {shown}) with R points "
        f"for each input, or (R, {shown}) with the same for all"
    )
    if not isinstance(references, Tensor):
        raise InvalidArgumentError("references", None if references is None else type(references).__name__, expected)
    groups = references[None].expand(rows, *references.shape) if references.dim() == inputs.dim() else references
    if groups.dim() != inputs.dim() + 1 or len(groups) != rows or groups.shape[2:] != shape or not groups.shape[1]:
        raise InvalidArgumentError("references", f"shape {tuple(references.shape)}", expected)
    return check_inputs("references", groups.flatten(0, 1), bounds=bounds).view(groups.shape)


def settings_of(attack: Any, core: type[NativeAttack], *, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings of a core attack, read from the attributes of a host's attack.

    Args:
        attack: The host's attack.
        core: The attack's class in this project.
        names: From settings to attributes, where they are not of the same name.
    """
    other = {"rel_step_size": "step_size", "step_size": "", **(names or {})}
    return {name: getattr(attack, other.get(name, name)) for name in declared(core) if other.get(name, name)}


def _check_bare(module: nn.Module, defended: Defended, inputs: Tensor, *, bounds: tuple[float, float]) -> None:
    """Raise where a host's model changes what goes into its classifier with a detector, or what comes out."""
    low, high = bounds
    generator = torch.Generator().manual_seed(0)
    # Preprocessing that rounds leaves many clean inputs as they are, but not these.
    drawn = torch.rand(inputs.shape, generator=generator).mul_(high - low).add_(low).clamp_(low, high)
    points = drawn.to(inputs.device)
    passes: list[tuple[Tensor, Tensor]] = []
    # A hook sees the argument itself, so it is copied before anything could change it in place.
    handle = defended.register_forward_hook(lambda _module, args, out: passes.append((args[0].clone(), out.clone())))
    try:
        with frozen(module), torch.no_grad(), seeded_globals(0):
            logits = module(points.clone())
    finally:
        handle.remove()
    same = len(passes) == 1 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(passes[0], (points, logits), strict=True)
    )
    if not same:
        expected = (
            "one that hands its inputs to its Defended as they are, and returns what that returns; put the "
            "preprocessing into the classifier before the detector is put beside it"
        )
        raise InvalidArgumentError("model", "one that changes inputs or logits around its detector", expected)
