"""Passes to the same verdict: the paper's protocol beside the command line's default, for pairs of network and attack.

    python benchmarks/passes.py [--mnist-root FOLDER] [--cifar-root FOLDER] [--wong-kolter FILE] [--resnet20 FILE]
        [--network NAME] [--inner uniform] [--samples 512] [--out FOLDER]

The paper's protocol: 512 samples (digits has 500), 999 inner points beside the clean one (half of them corners, as
uniform ones give an R-ASR that shows nothing; ``--inner uniform`` for those of the paper), the first point drawn
planted, 400 random points, one depth. The default is that of ``robust-ext binarization``: at most 128 samples, by the
sequential rule. Each attack is run alone by the default; by the paper's protocol all attacks of a network share what is
planted, which counts for each. Passes are rows sent forward and back, those of attacks too. ``--out`` keeps run
folders, and goes on with them.

Networks on the digits that come with scikit-learn: that of the demo, the same behind inputs rounded to 16 levels, with
logits times 1000, with random weights, and with features that a matrix of rank three mixes; with files given, the
small convnets, the robust network and the ResNet of benchmarks/inner_points.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inner_points import ascent, networks
from torch import Tensor, nn

import robust_ext
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import Rounded, Saturated

BUDGETS = {"mnist": 0.1, "cifar10": 8 / 255, "digits": 0.1}
PAPER: dict[str, Any] = {"inner_points": 999, "planted_candidates": 1, "random_inner": 200}
PAPER |= {"depths": (1.0,), "random_stops": False}
DEFAULT: dict[str, Any] = {"sequential": True}
AT_MOST = 128


def narrow() -> nn.Module:
    """The demo's network with features of rank three."""
    *features, last = digits_network()
    generator = torch.Generator().manual_seed(0)
    first, second = nn.Linear(128, 3, bias=False), nn.Linear(3, 128, bias=False)
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / layer.in_features**0.5)
    return nn.Sequential(*features, first, second, last).eval()


def predicted(model: nn.Module, x: Tensor, y: Tensor, *, threat_model: ThreatModel) -> Tensor:
    """Ascent on the labels that the model predicts instead of those given, the bug that canaries show."""
    with torch.no_grad():
        labels = model(x).argmax(1)
    found: Tensor = ascent(20, 1 / 8)(model, x, labels, threat_model=threat_model)
    return found


ATTACKS: dict[str, Any] = {
    "APGD-50": "robust_ext:APGD(steps=50, loss='margin')",
    "PGD-20": ascent(20, 1 / 8),
    "FGSM": ascent(1, 1.0),
    "20 x eps/200": ascent(20, 1 / 200),
    "predicted labels": predicted,
    "Square-200": "robust_ext:Square(queries=200)",
}


def pairs(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, str, str | None, Callable[[], nn.Module], tuple[str, ...]]]:
    """Name, dataset, its folder, what makes the network, and names of attacks."""
    yield "digits", "digits", None, digits_network, ("APGD-50", "PGD-20", "FGSM", "20 x eps/200", "predicted labels")
    yield "digits, rounded", "digits", None, lambda: Rounded(digits_network()), ("PGD-20", "Square-200")
    yield "digits, logits x 1000", "digits", None, lambda: Saturated(digits_network()), ("PGD-20", "APGD-50")
    random = lambda: digits_network(trained=False)  # noqa: E731
    yield "digits, random weights", "digits", None, random, ("PGD-20", "FGSM", "20 x eps/200")
    yield "digits, rank three", "digits", None, narrow, ("PGD-20", "20 x eps/200")
    for name, data, root, make in networks(arguments):
        if name != "digits":
            yield name, data, root, make, ("APGD-50", "PGD-20", "FGSM", "20 x eps/200")


def passes(attack: Mapping[str, Any]) -> int:
    """Rows of both ways."""
    return int(attack["passes"]["forward"] + attack["passes"]["backward"])


def shown(attack: Mapping[str, Any]) -> str:
    """Verdict, score and R-ASR, each with its number of problems."""
    score, random = (
        f"{attack[key]:.2f} of {attack[of]}" for key, of in (("score", "samples"), ("random_score", "random_samples"))
    )
    deep = f" at depth {attack['verdict_depth']:g}" if attack["verdict_depth"] > 1 else ""
    return f"{attack['verdict']}{deep} ({score}; {random})"


@dataclass(frozen=True)
class Tests:
    """The tests of one network."""

    network: nn.Module
    inputs: Tensor
    threat_model: ThreatModel
    out: Path | None

    def run(self, names: Sequence[str], folder: str, *, samples: int, **settings: Any) -> list[Mapping[str, Any]]:
        """The results of these attacks together."""
        out = None if self.out is None else self.out / folder.replace("/", "-")
        attacks = {name: ATTACKS[name] for name in names}
        result = robust_ext.binarization_test(
            self.network, attacks, self.inputs[:samples], self.threat_model, out=out, **settings
        )
        return list(result.attacks.values())


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("network", "mnist-root", "cifar-root", "wong-kolter", "resnet20"):
        options.add_argument(f"--{name}")
    options.add_argument("--inner", default=0.5, help="uniform: the paper's")
    options.add_argument("--samples", type=int, default=512)
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    print("| network | attack | paper's protocol (score; R-ASR) | passes | default | passes | share |")
    print("|---|---|---|---|---|---|---|")
    agree, shares = 0, list[float]()
    for network, data, root, make, names in pairs(arguments):
        if arguments.network not in (None, network):
            continue
        torch.manual_seed(0)
        begun, dataset = time.process_time(), load_dataset(data, root=root)
        inputs = dataset.take(dataset.choose(min(arguments.samples, len(dataset)), seed=0))[0]
        out = None if arguments.out is None else arguments.out / network
        tests = Tests(make(), inputs, ThreatModel(norm="linf", epsilon=BUDGETS[data]), out)
        protocol = {**PAPER, "inner": arguments.inner}
        papers = tests.run(names, f"paper {arguments.inner}", samples=len(inputs), **protocol)
        for name, paper in zip(names, papers, strict=True):
            (default,) = tests.run([name], name, samples=AT_MOST, **DEFAULT)
            agree += paper["verdict"] == default["verdict"]
            shares.append(passes(default) / passes(paper))
            cells = network, name, *(cell for one in (paper, default) for cell in (shown(one), f"{passes(one):,}"))
            print(f"| {' | '.join(cells)} | {shares[-1]:.3f} |", flush=True)
        print(f"<!-- {network}: {time.process_time() - begun:.0f} CPU seconds -->", flush=True)
    print(f"\nThe same verdict for {agree} of {len(shares)} pairs, with at most {max(shares):.3f} of the passes.")


if __name__ == "__main__":
    main()
