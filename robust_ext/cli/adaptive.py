"""``robust-ext test-time``."""

from __future__ import annotations

from typing import Any

from robust_ext.cli.loading import ThreatOptions
from robust_ext.cli.models import load_model
from robust_ext.cli.options import command
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.evaluations.adaptive import AdaptiveSettings, evaluate_defense


@settings_class
class AdaptiveOptions(Settings):
    """Options of this command alone."""

    defense: str = setting(
        help=f"{', '.join(NAMED)}, with settings as in hd(steps=5); or package.module:object or file.py:object: a "
        "function that purifies inputs, an AdaptiveDefense, or what makes one of a classifier.",
        panel="model",
    )
    defense_weights: str | None = setting(
        default=None,
        help=f"Trained parts of a named defense ({', '.join(TRAINED)}), a .safetensors file.",
        panel="model",
    )
    surrogate: tuple[str, ...] = setting(
        default=(),
        help="A further network to transfer points from, as --model, with its weights after an @ as in "
        "net.py:make@FILE; repeatable.",
        panel="attack",
    )


@command(AdaptiveSettings, samples=64)
def adaptive_command(run: ThreatOptions, own: AdaptiveOptions, settings: dict[str, Any]) -> None:
    """Evaluate a defense that acts at test time against the static model it defends."""
    threat_model = run.threat_model
    run.begin()
    device = check_device(run.device, argument="--device")
    samples = run.load_samples(seed=settings["seed"])
    surrogates = {}
    for text in own.surrogate:
        spec, at, weights = text.partition("@")
        if not spec or (at and not weights):
            raise InvalidArgumentError("--surrogate", text, "a model, or a model with weights, SPEC@FILE")
        surrogates[text] = load_model(spec, weights=weights or None, device=device).model
    defense = own.defense if own.defense_weights is None else f"{own.defense}, weights {own.defense_weights}"
    with run.context(samples, defense=defense):
        result = evaluate_defense(
            own.defense,
            None,
            samples.inputs,
            samples.labels,
            threat_model,
            classifier=run.load_model(),
            defense_weights=own.defense_weights,
            surrogates=surrogates,
            sample_ids=samples.ids,
            **run.keywords,
            **settings,
        )
    run.show(result)
