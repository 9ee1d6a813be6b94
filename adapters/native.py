"""Shared parts of this project's attacks as classes of a host library: their constructors, and runs on its models."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.attacks.running import undisturbed
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import declared, default_of, setting_types
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer, check_labels
from robust_ext.models.defended import Defended

_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, kw_only=True)
class HostParameter:
    """One parameter of the constructor of a host's class.

    Args:
        name: In the host's words.
        annotation: Its type.
        default: Its value where none is given; ``inspect.Parameter.empty`` for a required one.
        help: One or more sentences.
        setting: The attack's setting whose value it is; None for those the host's class deals with itself.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    setting: str | None = None


SEED = HostParameter(
    name="seed",
    annotation=int | None,
    default=None,
    help="Of all draws, the same in every call; None: what the host's global seed makes of them.",
)


def host_parameters(attack_class: type[NativeAttack], host: str) -> list[HostParameter]:
    """Return an attack's settings under their names in a host, ``"foolbox"`` or ``"art"``, where they have one."""
    kinds, found = setting_types(attack_class), []
    for setting, info in declared(attack_class).items():
        name, default = info.names.get(host, setting), default_of(attack_class, setting)
        if name is not None:
            default = _EMPTY if default is dataclasses.MISSING else default
            kind = kinds[setting]
            found.append(HostParameter(name=name, annotation=kind, default=default, help=info.help, setting=setting))
    return found


def class_parts(
    attack_class: type[NativeAttack], parameters: tuple[HostParameter, ...], kind: Any, *first: HostParameter
) -> dict[str, Any]:
    """Return the members of a host's class of an attack: constructor and docstring.

    The constructor passes its values by name to ``self._start``; its parameters, of an :class:`inspect.Parameter` kind,
    are those of the host (``first``) and those of the attack.
    """
    every = [HostParameter(name="self", annotation=_EMPTY, default=_EMPTY, help=""), *first, *parameters]
    shown = [inspect.Parameter(one.name, kind, default=one.default, annotation=one.annotation) for one in every]
    shown[0] = shown[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature(shown, return_annotation=None)

    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        values = dict(bound.arguments)
        del values["self"]
        self._start(**values)

    construct.__name__ = "__init__"
    construct.__signature__ = signature  # type: ignore[attr-defined]
    doc = make_docstring(attack_class, every[1:])
    return {"core": attack_class, "parameters": parameters, "__init__": construct, "__doc__": doc}


def make_docstring(attack_class: type[NativeAttack], parameters: Iterable[HostParameter], *, first: str = "") -> str:
    """Make the docstring of an attack's class with a host's parameters; ``first`` opens it."""
    text = inspect.cleandoc(attack_class.__doc__ or "")
    for section in ("\n\nArgs:", "\n\nExample:", "\n\nRaises:"):
        text = text.partition(section)[0]
    see = f"See :class:`{attack_class.__module__}.{attack_class.__name__}`."
    lines = [
        textwrap.fill(
            f"{one.name}: {one.help}",
            116,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for one in parameters
    ]
    return f"{first}{text}\n\n{see}\n\nArgs:\n" + "\n".join(lines) + "\n"


def draws(attack_class: type[NativeAttack]) -> bool:
    """Return whether an attack may draw random numbers, and so has a seed."""
    return attack_class.traits.seeds != "none"


def build_attack(host: Any, values: Mapping[str, Any]) -> NativeAttack:
    """Make the attack of an object of a host's class with the values of its parameters, by the host's names."""
    names = {one.setting: one.name for one in host.parameters if one.setting is not None}
    try:
        made: NativeAttack = host.core(**{setting: values[name] for setting, name in names.items()})
        return made
    except InvalidArgumentError as error:
        if names.get(error.argument, error.argument) == error.argument:
            raise
        raise InvalidArgumentError(names[error.argument], error.got, error.expected) from error


def check_seed(seed: int | None) -> int | None:
    """Return a seed when it is None or an integer that torch takes."""
    return None if seed is None else check_integer("seed", seed, minimum=0, maximum=2**63 - 1)


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
    shell: str = "",
    **points: Any,
) -> Tensor:
    """Run an attack on a module in the mode it is in; one query of the clean inputs shows how many classes there are.

    Inputs ``(N, ...)`` may have any floating point dtype, which the module and the candidates then have; ``points`` are
    ``references`` and ``starting_points``, ``(N, R, ...)``. A detector-aware attack runs, in float32, on the classifier
    and the detector that the module is or holds. A random query shows whether anything around them changes inputs or
    logits, which is refused, as is a module without a detector: the error suggests ``shell``, the host's class.

    Raises AttackError where the attack cannot be run here, InvalidArgumentError for wrong inputs or labels.
    """
    attack.check(threat_model=threat_model, detector=attack.traits.detector)
    x, dtype, defended = check_inputs("inputs", inputs, bounds=threat_model.bounds).clone(), inputs.dtype, None
    if attack.traits.detector:
        if dtype != torch.float32:
            expected = "float32; detectors are attacked in no other type"
            raise InvalidArgumentError("inputs", f"dtype {dtype}", expected)
        defended = find_defended(module, expected=shell)
        _check_bare(module, defended, x, bounds=threat_model.bounds)
        module = defended.classifier
    elif dtype != torch.float32:
        module = _OfType(module, dtype)
    with frozen(module), torch.no_grad():
        classes = module(x).shape[1]
    y = check_labels("labels", labels, samples=len(x), classes=classes).to(x.device)
    target = Target(
        module=module,
        bounds=threat_model.bounds,
        classes=classes,
        input_shape=tuple(x.shape[1:]),
        device=x.device,
        defended=defended,
        **points,
    )
    ways: dict[str, Any] = {"threat_model": threat_model, "generator": generator, "targeted": targeted, "watch": watch}
    # Detector-aware attacks seed random detectors themselves.
    with undisturbed(attack, target, torch.Generator()) as shown:
        return attack.search(shown, x, y, **ways).to(dtype).clamp_(*threat_model.bounds)


def find_defended(module: nn.Module, *, expected: str) -> Defended:
    """Return the classifier with its detector that a module is or holds; an error suggests the ``expected`` class."""
    for part in module.modules():
        if isinstance(part, Defended):
            return part
    raise InvalidArgumentError("model", "one without a detector", f"a {expected}; this attack attacks its detector too")


def _check_bare(module: nn.Module, defended: Defended, inputs: Tensor, *, bounds: tuple[float, float]) -> None:
    """Raise where a host's model changes what goes into its classifier with a detector, or what comes out."""
    low, high = bounds
    # Preprocessing that rounds leaves many clean inputs as they are, but not these.
    drawn = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0))
    points = drawn.mul_(high - low).add_(low).clamp_(low, high).to(inputs.device)
    passes: list[tuple[Tensor, Tensor]] = []
    # A hook sees the argument itself, so it is copied before anything could change it in place.
    hook = defended.register_forward_hook(lambda _, args, out: passes.append((args[0].clone(), out.clone())))
    with hook, frozen(module), torch.no_grad(), seeded_globals(0):
        logits = module(points.clone())
    if len(passes) == 1 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(passes[0], (points, logits), strict=True)
    ):
        return
    expected = (
        "one that hands its inputs to its Defended as they are, and returns what that returns; put the preprocessing "
        "into the classifier before the detector is put beside it"
    )
    raise InvalidArgumentError("model", "one that changes inputs or logits around its detector", expected)


def check_references(points: object, inputs: Tensor, *, bounds: tuple[float, float]) -> Tensor:
    """Return points to imitate, ``(N, R, ...)`` or ``(R, ...)`` for all rows, as ``(N, R, ...)``, one group a row."""
    shown = ", ".join(map(str, inputs.shape[1:]))
    expected = (
        f"points of other classes that the detector lets pass, to imitate: a tensor ({len(inputs)}, R, {shown}) with R "
        f"points for each input, or (R, {shown}) with the same for all"
    )
    if not isinstance(points, Tensor):
        raise InvalidArgumentError("references", None if points is None else type(points).__name__, expected)
    groups = points[None].expand(len(inputs), *points.shape) if points.dim() == inputs.dim() else points
    return _check_groups("references", points, groups, inputs, expected, bounds)


def check_starting_points(argument: str, points: Tensor, inputs: Tensor, *, bounds: tuple[float, float]) -> Tensor:
    """Return points to begin at, ``(N, ...)`` or ``(N, S, ...)``, as ``(N, S, ...)``; ``argument`` is their name."""
    shown = ", ".join(map(str, inputs.shape[1:]))
    groups = points.unsqueeze(1) if points.dim() == inputs.dim() else points
    expected = f"shape ({len(inputs)}, {shown}) or ({len(inputs)}, S, {shown})"
    return _check_groups(argument, points, groups, inputs, expected, bounds)


def _check_groups(
    argument: str, points: Tensor, groups: Tensor, inputs: Tensor, expected: str, bounds: tuple[float, float]
) -> Tensor:
    if groups.shape[:1] != inputs.shape[:1] or groups.shape[2:] != inputs.shape[1:] or 0 in groups.shape[1:2]:
        raise InvalidArgumentError(argument, f"shape {tuple(points.shape)}", expected)
    return check_inputs(argument, groups.flatten(0, 1), bounds=bounds).view(groups.shape)


class _OfType(nn.Module):
    """A module of another floating point type, for attacks that work in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype, self.training = module, dtype, module.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x.to(self.dtype))
        return logits.float()
