"""``robust-ext robust-accuracy``."""

from __future__ import annotations

from functools import partial
from typing import Any

from robust_ext.cli.loading import ShardedOptions
from robust_ext.cli.options import command, number
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.threat import NORMS
from robust_ext.engine.arm import Arm, plan_runs
from robust_ext.engine.workers import count_records
from robust_ext.evaluations.binarization.preparation import as_attacks
from robust_ext.evaluations.robust_accuracy import robust_accuracy
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


@settings_class
class RobustAccuracyOptions(Settings):
    """Options of this command alone."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), or LABEL=library:Name(key=value); module:callable; repeatable.", panel="attack"
    )
    eps: str = setting(help="Budgets in the units of the inputs, as in 0.5,1,1.5 or 2/255,8/255.", panel="attack")
    norm: str = setting(default="linf", help=f"One of {', '.join(NORMS)}.", panel="attack")


@command(RobustAccuracySettings)
def robust_accuracy_command(run: ShardedOptions, own: RobustAccuracyOptions, settings: dict[str, Any]) -> None:
    """Robust accuracy at several budgets, under each attack and under all of them."""
    given = tuple(number("--eps", text) for text in own.eps.split(","))
    epsilons = RobustAccuracySettings(epsilons=given).epsilons or ()
    attacks = dict(_labelled(text) for text in own.attack)
    if len(attacks) < len(own.attack):
        expected = "a label of its own for each, LABEL=library:Name()"
        raise InvalidArgumentError("--attack", ", ".join(own.attack), expected)
    run.begin()
    samples = run.load_samples(seed=settings["seed"])
    if run.jobs > 1 and run.out is not None:
        arms = [
            Arm(attack=one, norm=own.norm, epsilon=epsilon, label=name)
            for name, one in as_attacks(attacks).items()
            for epsilon in epsilons
        ]
        runs = plan_runs(arms, bounds=run.limits, values=samples.inputs[0].numel())
        done = partial(count_records, *(run.out / "arms" / one.key for one in runs))
        run.run_shards(total=len(runs) * run.samples, done=done, title="robust accuracy", unit="candidate")
    result = robust_accuracy(
        run.load_model(),
        attacks,
        samples.inputs,
        samples.labels,
        norm=own.norm,
        epsilons=epsilons,
        bounds=run.limits,
        sample_ids=samples.ids,
        origin=run.origin(samples),
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
