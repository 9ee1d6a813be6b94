"""``--bpda`` and ``--eot``: what every attack of a command is adapted by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack, adaptation_words, adapted_text
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.evaluations.arms import Arm
from robust_ext.models.layer_backward import find_layers
from robust_ext.registry.model import as_module


@settings_class
class AdaptationOptions(Settings):
    """Options of commands that run attacks on a classifier, see :class:`robust_ext.attacks.adapted.AdaptedAttack`."""

    bpda: str | None = setting(
        default=None,
        help="Name of a layer, as in named_modules(), that every attack sees with the identity's gradient; several "
        "with commas between them.",
        panel="attack",
    )
    eot: int = setting(
        default=1, help="Draws that every attack's logits and gradients are averaged over.", minimum=1, panel="attack"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Those that adapt something; empty where none does."""
        return {**({} if self.bpda is None else {"bpda": self.bpda}), **({"eot": self.eot} if self.eot > 1 else {})}

    def attacks(self, texts: Sequence[str]) -> list[str] | dict[str, str]:
        """Texts of attacks, adapted."""
        return self.named(dict(zip(texts, texts, strict=True))) if self.settings else list(texts)

    def named(self, attacks: Mapping[str, str]) -> dict[str, str]:
        """Texts of attacks by name, adapted."""
        if not self.settings:
            return dict(attacks)
        words = adaptation_words(**self.settings)
        return {f"{name} through {words}": adapted_text(text, **self.settings) for name, text in attacks.items()}

    def arms(self, arms: Iterable[Arm]) -> list[Arm]:
        """Arms, whose attacks are adapted."""
        return [replace(arm, attack=AdaptedAttack(attack=arm.resolved, **self.settings)) for arm in arms]

    def check(self, model: object) -> object:
        """The model; InvalidArgumentError where it has no layer of this name, before any work is done."""
        if self.bpda is not None:
            find_layers(as_module(model).module, self.bpda, argument="--bpda")
        return model
