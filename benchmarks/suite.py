"""Compare the standard suite with AutoAttack: worst case of each sample, and rows forward and back, on many networks.

    python benchmarks/suite.py --cache nets --mnist FOLDER --cifar10 FOLDER --autoattack FOLDER [--only ...]

``--cache`` holds weights (NAME.safetensors; put the published ``resnet20`` and ``wong_kolter_mnist`` there, the others
are trained with fixed seeds, in minutes on one core) and what AutoAttack found, which is run only where that is
missing. ``--autoattack`` is a checkout of github.com/fra31/auto-attack. The suite was composed on half of the cases;
those of the other half are marked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from linear_region_networks import RECIPES, Recipe, cifar10_residual, fit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import pooled, resnet20, wong_kolter_mnist

from robust_ext.core.target import PassCounter, count_calls
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.engine.verify import BROKEN, verify
from robust_ext.evaluations.evaluate import evaluate
from robust_ext.evaluations.evaluate.suite import BUDGETS

SAMPLES = 200
_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


def strided(channels: int, side: int) -> nn.Module:
    """Strided convolutions and ReLU without normalisation, which bounds of intervals go through."""
    last = 32 * (side // 4) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(last, 100), nn.ReLU(), nn.Linear(100, 10)),
    ).eval()


@dataclass(frozen=True)
class Certified:
    """Training by interval bounds (Gowal et al. 2018), linf."""

    make: Any
    data: str
    eps: float
    epochs: int = 8
    images: int = 20_000
    learning_rate: float = 0.002


TRAINED: dict[str, Recipe | Certified] = {
    **RECIPES,
    "digits_plain": Recipe(partial(pooled, side=8, kernel=2), "digits", epochs=40, learning_rate=0.01),
    "cifar10_residual_linf": Recipe(cifar10_residual, "cifar10", norm="linf", eps=4 / 255, epochs=5),
    "mnist_interval": Certified(partial(strided, 1, 28), "mnist", 0.2),
    "cifar10_interval": Certified(partial(strided, 3, 32), "cifar10", 2 / 255),
    "digits_interval": Certified(partial(strided, 1, 8), "digits", 0.1, epochs=60, learning_rate=0.005),
}
PUBLISHED = {"resnet20": (resnet20, "cifar10"), "wong_kolter_mnist": (wong_kolter_mnist, "mnist")}


@dataclass(frozen=True)
class Case:
    """A network and a threat model; ``held_out`` where the suite was not composed on it."""

    network: str
    norm: str
    epsilon: float
    held_out: bool
    samples: int = SAMPLES

    @property
    def name(self) -> str:
        """Of the row, for files and ``--only``."""
        return f"{self.network}-{self.norm}-{self.epsilon:.3g}"

    @property
    def threat_model(self) -> ThreatModel:
        """The norm and epsilon, for inputs in [0, 1]."""
        return ThreatModel(norm=self.norm, epsilon=self.epsilon)


CASES = [
    Case("digits", "linf", 0.1, False),
    Case("digits_plain", "linf", 0.05, True),
    Case("digits_interval", "linf", 0.1, False),
    Case("mnist_plain", "linf", 0.1, False),
    Case("mnist_linf", "linf", 0.3, False),
    Case("wong_kolter_mnist", "linf", 0.1, True),
    Case("mnist_interval", "linf", 0.2, True),
    Case("cifar10_linf", "linf", 8 / 255, False),
    Case("cifar10_residual_linf", "linf", 4 / 255, True),
    Case("cifar10_residual", "linf", 1 / 255, False),
    Case("cifar10_l2", "linf", 2 / 255, True),
    Case("cifar10_interval", "linf", 2 / 255, False),
    Case("resnet20", "linf", 1 / 255, True, samples=64),
    Case("digits", "l2", 0.6, False),
    Case("mnist_plain", "l2", 1.5, False),
    Case("mnist_linf", "l2", 1.5, False),
    Case("wong_kolter_mnist", "l2", 1.0, True),
    Case("cifar10_l2", "l2", 0.5, True),
    Case("cifar10_linf", "l2", 0.5, True),
    Case("resnet20", "l2", 0.1, True, samples=64),
    Case("digits", "l1", 2.0, False),
    Case("mnist_plain", "l1", 8.0, True),
    Case("cifar10_l2", "l1", 8.0, False),
]


@dataclass(frozen=True)
class Found:
    """What was found on the samples of a case.

    Args:
        robust: Which samples no attack broke.
        forward: Rows sent forward.
        backward: Rows that a gradient came back through.
        members: By attack, how many samples it broke and its rows forward and back.
        seconds: CPU seconds.
    """

    robust: list[bool]
    forward: int
    backward: int
    members: dict[str, tuple[int, int]]
    seconds: float

    @property
    def passes(self) -> int:
        """Rows forward and back."""
        return self.forward + self.backward


def interval_train(network: nn.Sequential, inputs: Tensor, labels: Tensor, recipe: Certified) -> None:
    """Train on the logits at the input and on the worst ones that interval bounds allow, both growing in weight."""
    rounds = [rows for _ in range(recipe.epochs) for rows in torch.randperm(len(inputs)).split(100)]
    optimizer = torch.optim.Adam(network.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=len(rounds))
    for number, rows in enumerate(rounds):
        x, y = inputs[rows], labels[rows]
        grown = min(1.0, 2 * (number + 1) / len(rounds))
        centre, radius = x, torch.full_like(x, recipe.eps * grown)
        for layer in network:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                positive = nn.functional.conv2d if isinstance(layer, nn.Conv2d) else nn.functional.linear
                given = (layer.stride, layer.padding) if isinstance(layer, nn.Conv2d) else ()
                centre, radius = layer(centre), positive(radius, layer.weight.abs(), None, *given)
            elif isinstance(layer, nn.ReLU):
                low, high = layer(centre - radius), layer(centre + radius)
                centre, radius = (high + low) / 2, (high - low) / 2
            else:
                centre, radius = layer(centre), layer(radius)
        worst = torch.where(nn.functional.one_hot(y, 10).bool(), centre - radius, centre + radius)
        loss = (1 - grown / 2) * nn.functional.cross_entropy(network(x), y)
        loss = loss + grown / 2 * nn.functional.cross_entropy(worst, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()


def load(name: str, given: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return a network, trained where its weights are not in the cache, and the name of its dataset."""
    file = given.cache / f"{name}.safetensors"
    if name in PUBLISHED:
        make, data = PUBLISHED[name]
        network = make()
    else:
        recipe = TRAINED[name]
        network, data = recipe.make(), recipe.data
        if not file.exists():
            images = load_dataset(data, root=roots(given)[data], split="train")
            inputs, labels = images.take(images.choose(min(recipe.images, len(images)), seed=0))
            torch.manual_seed(0)
            network = recipe.make().train()
            if isinstance(recipe, Recipe):
                fit(network, inputs, labels, recipe)
            else:
                interval_train(network, inputs, labels, recipe)
            save_file({key: value.contiguous() for key, value in network.state_dict().items()}, file)
    network.load_state_dict(load_file(file))
    return network.eval(), data


def roots(given: argparse.Namespace) -> dict[str, str | None]:
    """Return the folders of datasets."""
    return {"mnist": given.mnist, "cifar10": given.cifar10, "digits": None}


def sample(data: str, given: argparse.Namespace, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return test images and labels."""
    images = load_dataset(data, root=roots(given)[data])
    return images.take(images.choose(samples, seed=0))


def autoattack(network: nn.Module, x: Tensor, y: Tensor, case: Case, folder: Path, *, seed: int) -> Found:
    """Run AutoAttack's standard version."""
    sys.path.insert(0, str(folder))
    from autoattack import AutoAttack

    counter, members, before = PassCounter(), dict[str, tuple[int, int]](), [0, 0]
    attack = AutoAttack(network, norm=_NORMS[case.norm], eps=case.epsilon, seed=seed, device="cpu", verbose=False)
    attack.verbose = True

    def note(text: str) -> None:
        """Read what is left after each attack from the log."""
        if text.startswith(("robust accuracy after", "initial accuracy")):
            left = round(float(text.split("%")[0].split()[-1]) / 100 * len(x))
            passes = counter.forward + counter.backward
            if text.startswith("robust"):
                members[text.split()[3].rstrip(":")] = (before[0] - left, passes - before[1])
            before[:] = [left, passes]

    attack.logger.log = note
    begin = time.process_time()
    with count_calls(network, counter):
        candidates = attack.run_standard_evaluation(x, y, bs=len(x))
    outcomes = verify(candidates, x, y, module=network, threat_model=case.threat_model, attack="AutoAttack").outcomes
    robust = [one not in BROKEN for one in outcomes]
    return Found(robust, counter.forward, counter.backward, members, time.process_time() - begin)


def suite(network: nn.Module, x: Tensor, y: Tensor, case: Case, budget: str, *, seed: int) -> Found:
    """Run the standard suite as an evaluation does, without a certificate."""
    begin = time.process_time()
    settings: Any = {"budget": budget, "planted": 0, "search": False, "seed": seed, "batch_size": len(x)}
    content = evaluate(network, x, y, case.threat_model, **settings).content
    members = {one["name"]: (one["broken"], sum(one["passes"].values())) for one in content["steps"]}
    forward, backward = (sum(one["passes"][way] for one in content["steps"]) for way in ("forward", "backward"))
    robust = [one == "1" for one in content["worst_case"]["robust"]]
    # The clean inputs and the candidates go forward once more.
    forward += len(x) + sum(one["samples"] for one in content["steps"])
    return Found(robust, forward, backward, members, time.process_time() - begin)


def cached(case: Case, given: argparse.Namespace, network: nn.Module, x: Tensor, y: Tensor, *, seed: int) -> Found:
    """Return AutoAttack's result, from the cache where it is there."""
    file = given.cache / "autoattack" / f"{case.name}-{len(x)}-{seed}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        found = autoattack(network, x, y, case, given.autoattack, seed=seed)
        file.write_text(json.dumps(vars(found)))
    return Found(**json.loads(file.read_text()))


HEADER = """\
| case | | AutoAttack leaves | ours leaves | broken by ours alone | by AutoAttack alone | passes | ours | share |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def row(case: Case, pairs: Sequence[tuple[Found, Found]]) -> str:
    """Return a line of the table: AutoAttack's and our results with each seed."""
    flags = [(torch.tensor(theirs.robust), torch.tensor(ours.robust)) for theirs, ours in pairs]
    more, less = ([int(one.sum()) for one in both] for both in zip(*((a & ~b, b & ~a) for a, b in flags), strict=True))
    theirs, ours = ([sum(one[side].robust) for one in pairs] for side in (0, 1))
    their_passes, our_passes = (sum(one[side].passes for one in pairs) / len(pairs) for side in (0, 1))
    cells = [
        case.name,
        "held out" if case.held_out else "",
        f"{_seeds(theirs)} of {case.samples}",
        *map(_seeds, (ours, more, less)),
        *(f"{passes:,.0f}" for passes in (their_passes, our_passes)),
        f"{our_passes / their_passes:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _seeds(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder with weights and AutoAttack's results")
    parser.add_argument("--mnist", help="folder with MNIST's idx files")
    parser.add_argument("--cifar10", help="folder with CIFAR-10")
    parser.add_argument("--autoattack", type=Path, help="checkout of AutoAttack")
    parser.add_argument("--only", default="", help="words in the names of the cases to run, with commas between")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", choices=BUDGETS, default="standard")
    parser.add_argument("--members", action="store_true", help="print what each attack broke, and its passes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADER)
    for case in (one for one in CASES if any(word in one.name for word in given.only.split(","))):
        network, data = load(case.network, given)
        x, y = sample(data, given, case.samples)
        pairs = []
        for seed in range(given.seeds):
            theirs = cached(case, given, network, x, y, seed=seed)
            pairs.append((theirs, suite(network, x, y, case, given.budget, seed=seed)))
        print(row(case, pairs), flush=True)
        if given.members:
            for both in pairs:
                print(*(one.members for one in both), flush=True)


if __name__ == "__main__":
    main()
