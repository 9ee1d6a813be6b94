"""This project's own attacks under the name ``robust_ext``, as in ``robust_ext:APGD(steps=50)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from robust_ext.adapters.wrapped import check_settings
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.settings import trial_settings
from robust_ext.core.specification import check_keywords, did_you_mean, parse_call
from robust_ext.registry.attack import as_attack
from robust_ext.registry.base import Adapter, AttackListing, adapters, named_object
from robust_ext.registry.model import as_module


class OwnAdapter(Adapter):
    """Adapter of this project's own attacks, which need no adapting."""

    name = "robust_ext"

    def list_attacks(self) -> list[AttackListing]:
        """List every attack of this project."""
        from robust_ext.attacks.catalogue import ATTACKS

        return [
            AttackListing(name=known.__name__, traits=known().traits, trial=trial_settings(known)) for known in ATTACKS
        ]

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that class name, with these settings."""
        classes = _classes()
        if attack not in classes:
            expected = f"one of {', '.join(classes)}{did_you_mean(attack, classes)}"
            raise InvalidArgumentError("attack", f"robust_ext:{attack}", expected)
        check_keywords(classes[attack], settings, argument="attack", label=attack)
        if attack == "AdaptedAttack":
            settings = {**settings, "attack": as_attack(settings["attack"])}
        if attack == "Transfer":
            given = settings["surrogates"]
            texts = given if isinstance(given, Mapping) else {given: given}
            settings = {**settings, "surrogates": {name: _network(text) for name, text in texts.items()}}
        made: Attack = classes[attack](**settings).named(name)
        return made

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Make an attack of one of the classes, or of a tuple (class, settings)."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2:
            attack, settings = attack
        if not isinstance(attack, type) or attack.__name__ == "Transfer" or attack not in _classes().values():
            return None
        return self.build_attack(attack.__name__, check_settings(settings), name=name or attack.__name__)


def _classes() -> dict[str, Callable[..., Any]]:
    """The attacks by name, and a preset; loaded here, as attacks of other libraries need none of them."""
    from robust_ext.attacks.adapted import AdaptedAttack
    from robust_ext.attacks.catalogue import ATTACKS
    from robust_ext.attacks.linear_region.attack import LinearRegion
    from robust_ext.attacks.transfer import Transfer

    own: tuple[type[Any], ...] = (*ATTACKS, AdaptedAttack, Transfer)
    return {**{known.__name__: known for known in own}, "LinearRegion.paper": LinearRegion.paper}


def _network(text: object) -> nn.Module:
    """Return the network that ``file.py:object`` names, or its function makes, or a library's by name."""
    found = text
    if isinstance(text, str) and parse_call(text, argument="surrogates", any_name=True).scope not in adapters():
        found = named_object(text, accepted="a network, or what makes one", argument="surrogates")
        if callable(found) and not hasattr(found, "bounds") and not isinstance(found, nn.Module):
            hint = "a function that makes a model is called without arguments"
            with foreign_code("surrogates", f"{text}()", hint=hint):
                found = found()
    return as_module(found, argument="surrogates").module


ADAPTER = OwnAdapter()
