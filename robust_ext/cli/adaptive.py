"""``robust-ext test-time``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from robust_ext.cli.loading import load_model
from robust_ext.cli.values import number, pair, torch_device
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_integer
from robust_ext.datasets import load_dataset
from robust_ext.defenses.named import NAMED, TRAINED
from robust_ext.evaluations.adaptive import AdaptiveSettings as Settings
from robust_ext.evaluations.adaptive import evaluate_defense


def defense_command(
    model: Annotated[str, typer.Option(help="The static model: digits, package.module:object or file.py:object.")],
    defense: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(NAMED)}, with settings as in hd(steps=5); or package.module:object or file.py:object: a "
            "function that purifies inputs, an AdaptiveDefense, or what makes one of a classifier."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.")
    ],
    eps: Annotated[str, typer.Option(help="Budget in the units of the inputs; fractions such as 8/255 are fine.")],
    norm: Annotated[str, typer.Option(help=f"One of {', '.join(NORMS)}.")] = "linf",
    bounds: Annotated[str, typer.Option(help="Lowest and highest input value of the model.")] = "0,1",
    weights: Annotated[str | None, typer.Option(help="State dict of the model: .safetensors, or a torch file.")] = None,
    defense_weights: Annotated[
        str | None,
        typer.Option(help=f"Trained parts of a named defense ({', '.join(TRAINED)}), a .safetensors file."),
    ] = None,
    surrogate: Annotated[
        list[str] | None,
        typer.Option(
            help="A further network to transfer points from, as --model, with its weights after an @ as in "
            "net.py:make@FILE; repeatable."
        ),
    ] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder with the data's files.")] = None,
    data_split: Annotated[str, typer.Option(help="test or train.")] = "test",
    samples: Annotated[int, typer.Option(help="Number of samples; whole groups for batch-level defenses.")] = 64,
    order: Annotated[str, typer.Option(help="Which samples: random (by the seed) or first.")] = "random",
    out: Annotated[
        Path | None, typer.Option(help="Run folder; a killed run goes on there. result.json, report.html.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Of APGD in each run.")] = Settings.steps,
    queries: Annotated[int, typer.Option(help="Of Square and RayS for each sample.")] = Settings.queries,
    draws: Annotated[
        int, typer.Option(help="Random defenses: draws that gradients are averaged over.")
    ] = Settings.draws,
    repeats: Annotated[
        int, typer.Option(help="Random defenses: answers to choose the worst attack by, and as many to judge it by.")
    ] = Settings.repeats,
    batch_size: Annotated[int, typer.Option(help="Samples attacked at once.")] = Settings.batch_size,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = Settings.seed,
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Evaluate a defense that acts at test time against the static model it defends."""
    threat_model = ThreatModel(norm=norm, epsilon=number("--eps", eps), bounds=pair("--bounds", bounds))
    check_integer("--samples", samples, minimum=1)
    where = torch_device(device)
    dataset = load_dataset(data, root=data_root, split=data_split)
    chosen = dataset.choose(samples, seed=seed, order=order)
    inputs, labels = dataset.take(chosen, bounds=threat_model.bounds)
    result = evaluate_defense(
        load_model(model, weights=weights, device=where),
        defense,
        inputs,
        labels,
        threat_model,
        defense_weights=defense_weights,
        surrogates={text: _surrogate(text, where) for text in surrogate or []},
        sample_ids=[int(index) for index in chosen],
        out=out,
        progress=progress,
        origin={
            "model": model if weights is None else f"{model}, weights {weights}",
            "defense": defense if defense_weights is None else f"{defense}, weights {defense_weights}",
            "data": f"{dataset.name}, order {order}",
        },
        steps=steps,
        queries=queries,
        draws=draws,
        repeats=repeats,
        batch_size=batch_size,
        seed=seed,
    )
    typer.echo(str(result))
    if out is not None:
        typer.echo(f"{out / 'result.json'} and {out / 'report.html'} hold the details.")


def _surrogate(text: str, device: torch.device) -> object:
    spec, _, weights = text.partition("@")
    return load_model(spec, weights=weights or None, device=device)
