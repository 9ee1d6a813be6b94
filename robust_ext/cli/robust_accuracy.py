"""``robust-ext robust-accuracy``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from robust_ext.cli.loading import load_model
from robust_ext.cli.values import number, pair, share, torch_device, without_jobs
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_integer
from robust_ext.datasets import load_dataset
from robust_ext.engine.arm import Arm, plan_runs
from robust_ext.engine.workers import count_records, end_with_parent, run_shards
from robust_ext.evaluations.binarization.preparation import as_attacks
from robust_ext.evaluations.robust_accuracy import robust_accuracy
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


def robust_accuracy_command(
    model: Annotated[
        str, typer.Option(help="digits, package.module:object or file.py:object; a model or what makes one.")
    ],
    attack: Annotated[
        list[str],
        typer.Option(help="library:Name(key=value), or LABEL=library:Name(key=value); module:callable; repeatable."),
    ],
    data: Annotated[
        str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.")
    ],
    eps: Annotated[str, typer.Option(help="Budgets in the units of the inputs, as in 0.5,1,1.5 or 2/255,8/255.")],
    norm: Annotated[str, typer.Option(help=f"One of {', '.join(NORMS)}.")] = "linf",
    bounds: Annotated[str, typer.Option(help="Lowest and highest input value of the model.")] = "0,1",
    weights: Annotated[str | None, typer.Option(help="State dict of the model: .safetensors, or a torch file.")] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder with the data's files.")] = None,
    data_split: Annotated[str, typer.Option(help="test or train.")] = "test",
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 100,
    order: Annotated[str, typer.Option(help="Which samples: random (by the seed) or first.")] = "random",
    out: Annotated[
        Path | None, typer.Option(help="Run folder; a killed run goes on there. result.json, report.html.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Processes; needs --out.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Samples attacked at once.")] = 100,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    shard: Annotated[str, typer.Option(hidden=True)] = "0/1",
) -> None:
    """Robust accuracy at several budgets, under each attack and under all of them."""
    check_integer("--samples", samples, minimum=1)
    check_integer("--jobs", jobs, minimum=1)
    limits, where, part = pair("--bounds", bounds), torch_device(device), share("--shard", shard)
    epsilons = RobustAccuracySettings(epsilons=tuple(number("--eps", text) for text in eps.split(","))).epsilons or ()
    if jobs > 1 and out is None:
        raise InvalidArgumentError("--jobs", jobs, "a run folder (--out) when there is more than one")
    if part[1] > 1:
        end_with_parent()
    attacks = dict(_labelled(text) for text in attack)
    if len(attacks) < len(attack):
        raise InvalidArgumentError("--attack", ", ".join(attack), "a label of its own for each, LABEL=library:Name()")
    dataset = load_dataset(data, root=data_root, split=data_split)
    chosen = dataset.choose(samples, seed=seed, order=order)
    inputs, labels = dataset.take(chosen, bounds=limits)
    if jobs > 1 and out is not None:
        arms = [
            Arm(attack=one, norm=norm, epsilon=epsilon, label=name)
            for name, one in as_attacks(attacks).items()
            for epsilon in epsilons
        ]
        runs = plan_runs(arms, bounds=limits, values=inputs[0].numel())
        run_shards(
            without_jobs(sys.argv[1:]),
            jobs=jobs,
            total=len(runs) * samples,
            done=partial(count_records, *(out / "arms" / run.key for run in runs)),
            progress=progress,
            title="robust accuracy",
            unit="candidate",
        )
    result = robust_accuracy(
        load_model(model, weights=weights, device=where),
        attacks,
        inputs,
        labels,
        norm=norm,
        epsilons=epsilons,
        bounds=limits,
        sample_ids=[int(index) for index in chosen],
        out=out,
        batch_size=batch_size,
        seed=seed,
        progress=progress and part[1] == 1 and jobs == 1,
        origin={
            "model": model if weights is None else f"{model}, weights {weights}",
            "data": f"{dataset.name}, order {order}",
        },
        shard=part,
    )
    if part[1] == 1:
        typer.echo(str(result))
        if out is not None:
            typer.echo(f"{out / 'result.json'} and {out / 'report.html'} hold the details.")


def _labelled(text: str) -> tuple[str, str]:
    """``LABEL=library:Name()`` as label and attack; without a label the attack is its own."""
    label, found, rest = text.partition("=")
    if found and ":" not in label and "(" not in label:
        return label.strip(), rest
    return text, text
