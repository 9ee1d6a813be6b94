"""How inner points and planted candidates change the binarization test: R-ASR, scores of weak and good attacks, cost.

    python benchmarks/inner_points.py [--network digits] [--mnist-root FOLDER] [--cifar-root FOLDER]
        [--wong-kolter FILE] [--resnet20 FILE] [--samples 12] [--rows settings] [--norm linf] [--out FILE]

Networks: ``digits`` (of the demo), ``mnist`` and ``cifar10`` (small convnets, trained here in seconds, plainly),
``wong-kolter`` (robust, MNIST) and ``resnet20``; each where its files are given. ``--rows budgets`` compares the
paper's points (999 uniform, the first one drawn planted), half corners and the default in three norms at three budgets
each; ``--rows settings`` goes through share of corners, number and candidates in linf at the middle budget; ``--rows
others`` changes one other setting at a time, there too. A line gives R-ASR, the share of samples with a readout that
separates, scores of FGSM (one step), of 20 steps of eps/200 and of a good attack (20 steps of eps/8; in l1 APGD with 20
steps), its depth as the median reach, and rows sent forward a sample without those of attacks. ``--rows price`` has
what lowers the price of a verdict, an end of random search and fewer inner points, in three norms at the middle budget,
with verdicts at all depths (``proven_rate=0``, as few samples show no rate of three attacks). ``--rows candidates``
trades inner points for candidates, in the same three norms; ``--rows random`` has other numbers of random points in the
ball and where points are planted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import resnet20, wong_kolter_mnist

import robust_ext
from robust_ext.attacks._common.rows import l2_normalize, project
from robust_ext.casestudies.networks import small_features
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.defenses.training.loop import train_network
from robust_ext.demo.network import digits_network

BUDGETS = {
    "digits": {"linf": (0.05, 0.1, 0.2), "l2": (0.25, 0.5, 1.0), "l1": (1.0, 2.0, 4.0)},
    "mnist": {"linf": (0.05, 0.1, 0.2), "l2": (0.75, 1.5, 3.0), "l1": (6.0, 12.0, 24.0)},
    "cifar10": {"linf": (2 / 255, 8 / 255, 16 / 255), "l2": (0.25, 0.5, 1.0), "l1": (6.0, 12.0, 24.0)},
}
PAPER: dict[str, Any] = {"inner": "uniform", "inner_points": 999, "planted_candidates": 1}
OTHERS: dict[str, tuple[Any, ...]] = {
    "kappa": (0.5, 0.9, 0.99, 0.9999),
    "C": (0.1, 1.0, 100.0),
    "readout": ("max-margin",),
    "gap": (0.0, 0.2, 0.5),
    "boundary": ("surface",),
    "boundary_points": (4,),
    "logit_scale": ("unit",),
}
WHOLE: dict[str, Any] = {"depths": (1.0, 2.0, 4.0, 8.0), "canaries": 8, "proven_rate": 0.0}
COMPARED: tuple[dict[str, Any], ...] = (PAPER, PAPER | {"inner": 0.5}, {})


def small(data: str, root: str) -> nn.Module:
    """A small convnet, trained on 5,000 images."""
    train = load_dataset(data, root=root, split="train")
    x, y = train.take(train.choose(5000, seed=0))
    torch.manual_seed(0)
    network = nn.Sequential(small_features(x.shape[1:]), nn.Linear(64, 10))
    loss = lambda rows: nn.functional.cross_entropy(network(x[rows]), y[rows])  # noqa: E731
    train_network(network, len(x), loss, epochs=6, batch_size=64, seed=0)
    return network.eval()


def loaded(make: Callable[[], nn.Module], file: str) -> nn.Module:
    """A published network with its weights."""
    network = make()
    network.load_state_dict(load_file(file))
    return network


def networks(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str | None, Callable[[], nn.Module]]]:
    """Name, dataset, its folder, and what makes the network."""
    mnist, cifar = arguments.mnist_root, arguments.cifar_root
    yield "digits", "digits", None, digits_network
    if mnist:
        yield "mnist", "mnist", mnist, partial(small, "mnist", mnist)
    if cifar:
        yield "cifar10", "cifar10", cifar, partial(small, "cifar10", cifar)
    if mnist and arguments.wong_kolter:
        yield "wong-kolter", "mnist", mnist, partial(loaded, wong_kolter_mnist, arguments.wong_kolter)
    if cifar and arguments.resnet20:
        yield "resnet20", "cifar10", cifar, partial(loaded, resnet20, arguments.resnet20)


def ascent(steps: int, relative: float) -> Callable[..., Tensor]:
    """Projected gradient ascent by hand: sign steps in linf, normalised ones else."""

    def attack(model: nn.Module, x: Tensor, y: Tensor, *, threat_model: ThreatModel) -> Tensor:
        points = x.clone()
        for _ in range(steps):
            points.requires_grad_(True)
            loss = nn.functional.cross_entropy(model(points), y, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, points)
            linf = threat_model.norm == "linf"
            step = gradient.sign() if linf else l2_normalize(gradient.flatten(1)).view_as(gradient)
            points = project(points.detach() + relative * threat_model.epsilon * step, x, threat_model)
        return points

    attack.__name__ = f"{steps} x eps {relative:g}"
    return attack


def measured(
    network: nn.Module, inputs: Tensor, threat_model: ThreatModel, settings: dict[str, Any], **rules: Any
) -> dict[str, Any]:
    """The numbers of one line; ``rules`` are settings that change nothing about the problems."""
    good = "robust_ext:APGD(steps=20)" if threat_model.norm == "l1" else ascent(20, 1 / 8)
    attacks = [ascent(1, 1.0), ascent(20, 1 / 200), good]
    rules = {"depths": (1.0,), "canaries": 0, "random_stops": False, "progress": False, **rules}
    start = time.perf_counter()
    result = robust_ext.binarization_test(network, attacks, inputs, threat_model, **rules | settings)
    one = result.content["attacks"]
    return {
        "norm": threat_model.norm,
        "epsilon": threat_model.epsilon,
        **{name: result.content["settings"][name] for name in {**PAPER, **settings}},
        "random_score": one[0]["random_score"],
        "planted": one[0]["samples"] / len(inputs),
        "fgsm": one[0]["score"],
        "small_steps": one[1]["score"],
        "good": one[2]["score"],
        "verdicts": "/".join(attack["verdict"] for attack in one),
        "random_samples": one[0]["random_samples"],
        "forwards": (one[0]["passes"]["forward"] - one[0]["passes"]["backward"]) / len(inputs),
        "seconds": time.perf_counter() - start,
    }


def settings_of(rows: str) -> Iterator[dict[str, Any]]:
    """Share of corners, number and candidates."""
    if rows == "budgets":
        yield from COMPARED
        return
    if rows == "price":
        for count, candidates in ((399, 32), (199, 64), (149, 64), (149, 48)):
            yield {"inner_points": count, "planted_candidates": candidates, "random_stops": False}
        return
    if rows == "candidates":
        for count, candidates in (
            (399, 32),
            (399, 16),
            (249, 32),
            (199, 32),
            (199, 64),
            (149, 64),
            (149, 96),
            (99, 128),
        ):
            yield {"inner_points": count, "planted_candidates": candidates}
        return
    if rows == "random":
        for candidates in (1, 64):
            for inside, edge in ((200, 200), (20, 200), (0, 200), (0, 400), (200, 0)):
                yield {"planted_candidates": candidates, "random_inner": inside, "random_corners": edge}
        return
    if rows == "others":
        yield {}
        yield from ({name: value} for name, values in OTHERS.items() for value in values)
        return
    for inner in (0.0, 0.5, 1.0):
        for count in (199, 399, 499, 999):
            for candidates in (1, 8, 32):
                yield {"inner": inner, "inner_points": count, "planted_candidates": candidates}


def main() -> None:
    """Print a line a setting."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("network", "mnist-root", "cifar-root", "wong-kolter", "resnet20", "out"):
        options.add_argument(f"--{name}")
    options.add_argument("--samples", type=int, default=12)
    options.add_argument(
        "--rows", choices=("budgets", "settings", "others", "candidates", "price", "random"), default="budgets"
    )
    options.add_argument("--norm", choices=("linf", "l2", "l1"))
    arguments = options.parse_args()
    found: list[dict[str, Any]] = []
    for name, data, root, make in networks(arguments):
        if arguments.network not in (None, name):
            continue
        dataset, network = load_dataset(data, root=root), make()
        inputs = dataset.take(dataset.choose(arguments.samples, seed=0))[0]
        norms = {arguments.norm or one for one in BUDGETS[data]}
        norms = {"linf"} if arguments.rows in ("settings", "others") else norms
        rules = WHOLE if arguments.rows == "price" else {}
        for norm, budgets in BUDGETS[data].items():
            for epsilon in budgets if arguments.rows == "budgets" else budgets[1:2]:
                for settings in settings_of(arguments.rows) if norm in norms else ():
                    line = measured(network, inputs, ThreatModel(norm=norm, epsilon=epsilon), settings, **rules)
                    found.append({"network": name, **line})
                    shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found[-1].items())
                    print(", ".join(shown), flush=True)
                    if arguments.out:
                        Path(arguments.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
