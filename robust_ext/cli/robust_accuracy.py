"""``robust-ext robust-accuracy``."""

from __future__ import annotations

from typing import Any

from robust_ext.cli.adaptation import AdaptationOptions
from robust_ext.cli.loading import RunOptions
from robust_ext.cli.options import command, number
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.evaluations.robust_accuracy import robust_accuracy
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


@settings_class
class RobustAccuracyOptions(Settings):
    """Options of this command alone."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), or LABEL=library:Name(key=value); module:callable; repeatable.", panel="attack"
    )
    eps: str = setting(help="Budgets in the units of the inputs, as in 0.5,1,1.5 or 2/255,8/255.", panel="attack")
    norm: str = setting(default="linf", help=f"One of {', '.join(NORMS)}.", choices=NORMS, panel="attack")


@command(RobustAccuracySettings)
def robust_accuracy_command(
    run: RunOptions, own: RobustAccuracyOptions, adapt: AdaptationOptions, settings: dict[str, Any]
) -> None:
    """Robust accuracy at several budgets, under each attack and under all of them."""
    given = tuple(number("--eps", text) for text in own.eps.split(","))
    epsilons = RobustAccuracySettings(epsilons=given).epsilons or ()
    attacks = dict(_labelled(text) for text in own.attack)
    if len(attacks) < len(own.attack):
        expected = "a label of its own for each, LABEL=library:Name()"
        raise InvalidArgumentError("--attack", ", ".join(own.attack), expected)
    run.begin()
    samples = run.load_samples(seed=settings["seed"])
    with run.context(samples):
        result = robust_accuracy(
            adapt.check(run.load_model()),
            adapt.named(attacks),
            samples.inputs,
            samples.labels,
            ThreatModel(norm=own.norm, epsilon=epsilons[-1], bounds=run.limits),
            epsilons=epsilons,
            sample_ids=samples.ids,
            **run.keywords,
            **settings,
        )
    run.show(result)


def _labelled(text: str) -> tuple[str, str]:
    """``LABEL=library:Name()`` as label and attack; without a label the attack is its own."""
    label, found, rest = text.partition("=")
    if found and ":" not in label and "(" not in label:
        return label.strip(), rest
    return text, text
