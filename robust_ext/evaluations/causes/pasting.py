"""Remedies as the caller can paste them: options of the command that was run, or lines of Python.

What does not fit is left out: other gradients for attacks that take none, draws for those that average already, and
lines of code for the inside of an attack that is a library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.errors import InvalidArgumentError, RobustExtError, shell_words
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import parse_call
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import current_context
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.remedies import BLACK_BOX
from robust_ext.evaluations.causes.rewriting import call_of, call_of_text
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT

# The option that takes an attack, by command; the other commands take none.
_OPTIONS = {"binarization": "--attack", "diagnose": "--attack", "robust-accuracy": "--attack", "mead": "--arm"}
# Settings of an adapted attack that change gradients, besides those that average them.
_GRADIENTS = {"bpda", "gradient_mode", "steps", "temperature"}
# Those of a BPDA around a model.
_AROUND = ({"bpda"}, {"bpda", "gradient_mode"}, {"gradient_mode"})
_IMPORT = "import robust_ext"
# Options that all commands share: data, threat model, device.
_SHARED = ("--data", "--eps=", "--norm=", "--bounds=", "--input-size=", "--device=")
# How a module becomes a model of a library with what else the caller's model declares.
_REBUILT = {
    "foolbox": ("import foolbox", "foolbox.PyTorchModel({}, bounds=model.bounds)"),
    "art": (
        "import torch\nfrom art.estimators.classification import PyTorchClassifier",
        "PyTorchClassifier(\n    {},\n    loss=torch.nn.CrossEntropyLoss(),\n    input_shape=model.input_shape,\n"
        "    nb_classes=model.nb_classes,\n    clip_values=model.clip_values,\n)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The caller of an evaluation, and its arguments.

    Args:
        module: The model, as it is evaluated.
        attacks: The attacks by the names that findings have.
        arms: Norm and epsilon by the same names, where each attack has its own; empty where all share one.
        images: Whether inputs are ``(N, C, H, W)``, as Square needs them.
    """

    module: nn.Module
    attacks: Mapping[str, Attack]
    arms: Mapping[str, ThreatModel] = field(default_factory=dict)
    images: bool = True

    def addressed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Findings with the remedies that apply to their attacks, each as it can be pasted."""
        found = list(findings)
        # The mean of many draws has no gradient either behind a layer that blocks it.
        dead = any(one.code in ("cut_gradient", "zero_gradient") and one.layer is not None for one in found)
        return [replace(one, remedies=self.fitting(one.remedies, one.attack, dead=dead)) for one in found]

    def fitting(self, remedies: Sequence[Remedy], name: str | None, *, dead: bool) -> tuple[Remedy, ...]:
        """The remedies that apply to the attack of this name, or to any of them; each as it can be pasted.

        ``dead``: whether no gradient comes through the model.
        """
        mine = None if name is None else self.attacks.get(name)
        named = self.attacks if name is None or mine is None else {name: mine}
        found = []
        for one in remedies:
            flat = one.attack == BLACK_BOX.attack and not self.images
            remedy = replace(one, attack="robust_ext:RandomSearch(points=2000)") if flat else one
            # With several attacks, the first that it applies to stands for them.
            fits = [key for key, attack in named.items() if _changes(remedy, attack, self.module, dead=dead)]
            if not fits and named:
                continue
            paste, code = self._pasted(remedy, fits[0] if fits else None), remedy.code
            if remedy.paste and not paste:
                # A command has no option for it: it is for the file that the model is in.
                code = remedy.paste.replace("{module}", "model")
            found.append(replace(remedy, paste=paste, code=code))
        # The model is the user's own code, and so are functions; lines for the inside of other attacks are of no use.
        if mine is not None and not _own(mine):
            found = [replace(one, code="") for one in found]
            found = [one for one in found if one.paste] or found
        return tuple(found)

    @property
    def library(self) -> str:
        """The library whose model was given; empty for a module, and for a defense of any model."""
        if isinstance(self.module, AdaptiveDefense):
            return ""
        found = (getattr(part, "library", None) for part in self.module.modules())
        return next((one for one in found if isinstance(one, str)), "")

    def _pasted(self, remedy: Remedy, name: str | None) -> str:
        attack = None if name is None else self.attacks[name]
        arm = None if name is None else self.arms.get(name)
        if current_context().command:
            return _options(remedy, attack, arm)
        call = None if attack is None or not remedy.view or remedy.paste else call_of(attack)
        if call is not None and (isinstance(attack, AdaptedAttack) or attack is None or name != attack.name):
            # Adapted attacks are not adapted again, and planned attacks have no name of the caller's.
            remedy = replace(remedy, attack=call.viewed(remedy.view), view={})
        return self._python(remedy, attack, arm)

    def _python(self, remedy: Remedy, attack: Attack | None, arm: ThreatModel | None) -> str:
        """Lines of Python that begin with their imports."""
        if remedy.paste or remedy.evaluate:
            module = "robust_ext.as_module(model).module" if self.library else "model"
            lines = (remedy.paste or "{module}.eval()").replace("{module}", module)
            return lines if module == "model" or _IMPORT in lines else f"{_IMPORT}\n{lines}"
        if self.library in _REBUILT and {*remedy.view} in _AROUND:
            return self._around(remedy)
        imports = [_IMPORT]
        if remedy.transfer:
            imports = ["from robust_ext.attacks.transfer import Transfer"]
            value = 'Transfer(surrogates={"float": float_model})  # the network before it was quantised'
        elif remedy.attack is not None:
            imports, value = self._constructed(remedy.attack, attack)
        elif remedy.view:
            value = f"robust_ext.AdaptedAttack(attack=robust_ext.as_attack(attack), {_keywords(remedy.view)})"
        else:
            return ""
        if remedy.beside and arm is None:
            value = f"[attack, {value}]"
        elif arm is not None and not remedy.transfer:
            value = f"robust_ext.Arm(attack={value}, norm={arm.norm!r}, epsilon={arm.epsilon!r})"
            imports = list(dict.fromkeys([*imports, _IMPORT]))
        return "\n".join([*imports, f"attack = {value}"])

    def _constructed(self, text: str, attack: Attack | None) -> tuple[list[str], str]:
        """Imports, and the attack as an object of its library where the caller gave one, else its text."""
        call = call_of_text(text)
        if call is None or call.view or attack is None or _textual(attack):
            return [], _quoted(text)
        made_of = getattr(attack, "made_of", None) or type(getattr(attack, "attack", None))
        settings = _keywords(call.settings)
        if call.scope == "foolbox" and made_of.__module__.startswith("foolbox."):
            return ["import foolbox"], f"foolbox.attacks.{call.name}({settings})"
        if call.scope == self.library == "art" and made_of.__name__ == call.name:
            given = ", ".join(filter(None, ("model", settings)))
            return [f"from {made_of.__module__} import {call.name}"], f"{call.name}({given})"
        return [], _quoted(text)

    def _around(self, remedy: Remedy) -> str:
        """Lines that make a model of the caller's library, which evaluations and the library's own attacks take."""
        imports, rebuilt = _REBUILT[self.library]
        names = {"bpda": "layer", "gradient_mode": "backward"}
        settings = _keywords({names[key]: value for key, value in remedy.view.items()})
        return f"{imports}\n{_IMPORT}\nmodel = {rebuilt.format(f'robust_ext.BPDA(model, {settings})')}"


def _options(remedy: Remedy, attack: Attack | None, arm: ThreatModel | None) -> str:
    """Options to add to the command that was run, or the command with another attack; empty where it takes none."""
    command, *given = current_context().command
    option = _OPTIONS.get(command)
    if remedy.paste and "evaluate_defense" in remedy.paste and "{module}, None" in remedy.paste:
        return _test_time(given)
    if option is None or remedy.paste:
        return ""
    view, text, call = dict(remedy.view), remedy.attack, None if attack is None else call_of(attack)
    if view and view.keys() <= {"bpda", "eot"}:
        named = [one.partition("=")[2] for one in given if one.startswith("--bpda=")]
        layers = ["--bpda", ",".join([*named, view["bpda"]])] if "bpda" in view else []
        return shell_words([*layers, *(["--eot", str(view["eot"])] if "eot" in view else [])])
    if remedy.transfer:
        file = next((one.partition("=")[2].rpartition(":")[0] for one in given if one.startswith("--model=")), "")
        text = f"robust_ext:Transfer(surrogates='{file}:float_model')"
    elif view and call is not None:
        text = call.viewed(view)
    if text is None:
        return ""
    if arm is not None:
        return shell_words([option, f"{arm.norm}:{arm.epsilon!r}={text}"])
    if remedy.beside or attack is None:
        return shell_words([option, text])
    # The text of an attack has its adaptation; a run folder holds one set of attacks.
    old = ("--bpda=", "--eot=", "--out=", "--no-progress", f"{option}={attack.code_text or attack.name}")
    adapted = isinstance(attack, AdaptedAttack) and any(one.startswith(old[:2]) for one in given)
    kept = [one for one in given if not one.startswith(old) and not (adapted and one.startswith(option))]
    return shell_words(["robust-ext", command, *kept, option, text])


def _test_time(given: Sequence[str]) -> str:
    """The command that evaluates the model as a defense; empty where it is no object of a file or package."""
    model = next((one.partition("=")[2] for one in given if one.startswith("--model=")), "")
    try:
        made = resolve_object(model)
    except RobustExtError:
        return ""
    called = "" if isinstance(made, nn.Module) or model.endswith(")") else "()"
    kept = [one for one in given if one.startswith(_SHARED)]
    static = f"--model={model.rpartition(':')[0]}:static_model"
    return shell_words(["robust-ext", "test-time", f"--defense={model}{called}", static, *kept])


def _changes(remedy: Remedy, attack: Attack, module: nn.Module, *, dead: bool) -> bool:
    """Return whether a remedy can change anything for an attack."""
    view = dict(remedy.view)
    if remedy.attack is not None:
        call, before = call_of_text(remedy.attack), call_of(attack)
        if call is None or before is None or (call.scope, call.name) != (before.scope, before.name):
            return True
        view = {key: value for key, value in call.view.items() if before.view.get(key) != value}
    averaging = view.keys() & {"eot", "noise"}
    if not averaging and not view.keys() & _GRADIENTS:
        return True
    if not attack.traits.gradients or (dead and "noise" in view):
        return False
    return view.keys() != averaging or not _averages(attack, module, noise="noise" in view)


def _averages(attack: Attack, module: nn.Module, *, noise: bool) -> bool:
    """Return whether an attack takes the mean over draws already, or that over noisy inputs."""
    if isinstance(attack, AdaptedAttack) and (attack.noise > 0 if noise else attack.eot > 1):
        return True
    call = call_of(attack)
    settings = {} if call is None or noise else {**(call.defaults or {}), **call.settings}
    drawn = [value for name, value in settings.items() if name == "eot" or name.startswith("eot_")]
    return any(isinstance(value, int) and value > 1 for value in drawn) or (
        not noise and any(isinstance(part, EoT) for part in module.modules())
    )


def _own(attack: Attack) -> bool:
    """Return whether the inside of an attack is the user's own code."""
    if isinstance(attack, AdaptedAttack):
        return _own(attack.attack)
    return isinstance(attack, CallableAttack) or not type(attack).__module__.startswith("robust_ext.")


def _textual(attack: Attack) -> bool:
    """Return whether an attack was given as a text."""
    try:
        parse_call(attack.code_text or attack.name)
    except InvalidArgumentError:
        return False
    return True


def _quoted(value: Any) -> str:
    """A value as Python writes it, texts in double quotes where that needs no escapes."""
    return f'"{value}"' if isinstance(value, str) and not set(value) & set('"\\\n') else repr(value)


def _keywords(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_quoted(value)}" for key, value in settings.items())
