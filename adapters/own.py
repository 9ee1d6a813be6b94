"""This project's own attacks under the name ``robust_ext``, as in ``robust_ext:APGD(steps=50)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.adapters.wrapped import check_settings
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import trial_settings
from robust_ext.core.specification import check_keywords, did_you_mean
from robust_ext.registry.attack import as_attack
from robust_ext.registry.base import Adapter, AttackListing


class OwnAdapter(Adapter):
    """Adapter of this project's own attacks, which need no adapting."""

    name = "robust_ext"

    def list_attacks(self) -> list[AttackListing]:
        """Every attack of this project."""
        return [
            AttackListing(name=known.__name__, traits=known().traits, trial=trial_settings(known)) for known in ATTACKS
        ]

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that class name, with these settings."""
        own: tuple[type[Any], ...] = (*ATTACKS, AdaptedAttack)
        classes = {known.__name__: known for known in own}
        if attack not in classes:
            expected = f"one of {', '.join(classes)}{did_you_mean(attack, classes)}"
            raise InvalidArgumentError("attack", f"robust_ext:{attack}", expected)
        check_keywords(classes[attack], settings, argument="attack", label=attack)
        if attack == AdaptedAttack.__name__:
            settings = {**settings, "attack": as_attack(settings["attack"])}
        made: Attack = classes[attack](**settings).named(name)
        return made

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Make an attack of one of the classes, or of a tuple (class, settings)."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2:
            attack, settings = attack
        if not isinstance(attack, type) or attack not in (*ATTACKS, AdaptedAttack):
            return None
        return self.build_attack(attack.__name__, check_settings(settings), name=name or attack.__name__)


ADAPTER = OwnAdapter()
