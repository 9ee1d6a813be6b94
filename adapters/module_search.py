"""Running an attack of this project on a module that a host library's model is or holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.attacks.running import undisturbed
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels
from robust_ext.models.defended import Defended


def search_module(
    attack: NativeAttack,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
    targeted: bool = False,
    watch: Watch | None = None,
    defended: Defended | None = None,
    references: Tensor | None = None,
    starting_points: Tensor | None = None,
) -> Tensor:
    """Run an attack on a module in the mode it is in; one query of the clean inputs shows how many classes there are.

    Inputs ``(N, ...)`` may have any floating point dtype, which the module and the candidates then have; ``references``
    and ``starting_points`` are ``(N, R, ...)``. Raises AttackError where the attack cannot be run here,
    InvalidArgumentError for wrong inputs or labels.
    """
    attack.check(threat_model=threat_model, detector=defended is not None)
    dtype = inputs.dtype
    x = check_inputs("inputs", inputs, bounds=threat_model.bounds).clone()
    network = module if dtype == torch.float32 else _OfType(module, dtype)
    with frozen(network), torch.no_grad():
        classes = network(x).shape[1]
    y = check_labels("labels", labels, samples=len(x), classes=classes).to(x.device)
    target = Target(
        module=network,
        bounds=threat_model.bounds,
        classes=classes,
        input_shape=tuple(x.shape[1:]),
        device=x.device,
        defended=defended,
        references=references,
        starting_points=starting_points,
    )
    # Detector-aware attacks seed random detectors themselves.
    with undisturbed(attack, target, torch.Generator()) as shown:
        candidates = attack.search(
            shown, x, y, threat_model=threat_model, generator=generator, targeted=targeted, watch=watch
        )
    return candidates.to(dtype).clamp_(*threat_model.bounds)


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
    """Run a detector-aware attack on the classifier and the detector inside a host library's model, float32.

    The model is queried once for random points: anything around its detector is refused with InvalidArgumentError, as
    is a model without one, which ``expected`` (the host's class) is suggested for.
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
    """Return the classifier with its detector that a module is or holds; an error suggests the ``expected`` class."""
    for part in module.modules():
        if isinstance(part, Defended):
            return part
    raise InvalidArgumentError("model", "one without a detector", f"a {expected}; this attack attacks its detector too")


def check_references(references: object, inputs: Tensor, *, bounds: tuple[float, float]) -> Tensor:
    """Return points to imitate, ``(N, R, ...)`` or ``(R, ...)`` for all rows, as ``(N, R, ...)``, one group a row."""
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


def check_starting_points(argument: str, points: Tensor, inputs: Tensor, *, bounds: tuple[float, float]) -> Tensor:
    """Return points to begin at, ``(N, ...)`` or ``(N, S, ...)``, as ``(N, S, ...)``; ``argument`` is their name."""
    groups = points.unsqueeze(1) if points.dim() == inputs.dim() else points
    if groups.shape[:1] != inputs.shape[:1] or groups.shape[2:] != inputs.shape[1:]:
        shape = ", ".join(map(str, inputs.shape[1:]))
        expected = f"shape ({len(inputs)}, {shape}) or ({len(inputs)}, S, {shape})"
        raise InvalidArgumentError(argument, f"shape {tuple(points.shape)}", expected)
    return check_inputs(argument, groups.flatten(0, 1), bounds=bounds).view(groups.shape)


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


class _OfType(nn.Module):
    """A module of another floating point type, for attacks that work in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x.to(self.dtype))
        return logits.float()
