"""Train small networks that differ, for the comparison of minimum-norm attacks (``benchmarks/linear_region.py``).

    python benchmarks/linear_region_networks.py --mnist FOLDER --cifar10 FOLDER --out networks [--only digits]
    python benchmarks/linear_region_networks.py --gtsrb FOLDER --out networks --only gtsrb_plain

Writes NAME.safetensors for each: trained plainly, or against l2 or linf (PGD, Madry et al. 2018) with a fixed seed, for
minutes on one core; prints the CPU seconds, and the accuracy on test images as they are and after PGD of 40 steps at
the budget of the training (at a small one where it was trained plainly). Their definitions are functions of this file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from networks import Block, pooled, resnet20, wong_kolter_mnist
from train_robust import accuracy, pgd, train

from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset


def mnist_plain() -> nn.Module:
    """Batch normalisation, LeakyReLU and max pooling, for MNIST."""
    return nn.Sequential(
        *_step(1, 16, 3, norm=True, activation=nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2),
        *_step(16, 32, 3, norm=True, activation=nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2),
        *_head(32 * 7 * 7),
    ).eval()


def mnist_linf() -> nn.Module:
    """Strided convolutions and ReLU, for MNIST."""
    return nn.Sequential(*_step(1, 16, 5, stride=2), *_step(16, 32, 5, stride=2), *_head(32 * 7 * 7)).eval()


def signs(classes: int) -> nn.Module:
    """Strided convolutions and ReLU in colour: the paper's network for traffic signs, which have 43 classes."""
    return nn.Sequential(*_step(3, 16, 5, stride=2), *_step(16, 32, 5, stride=2), *_head(32 * 8 * 8, classes)).eval()


def cifar10_linf() -> nn.Module:
    """Strided convolutions, batch normalisation and ReLU, for CIFAR-10."""
    return nn.Sequential(
        *_step(3, 16, 3, stride=2, norm=True),
        *_step(16, 32, 3, norm=True),
        *_step(32, 64, 3, stride=2, norm=True),
        *_head(64 * 8 * 8),
    ).eval()


def cifar10_l2() -> nn.Module:
    """LeakyReLU and max pooling, for CIFAR-10."""
    return nn.Sequential(
        *_step(3, 16, 3, activation=nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2),
        *_step(16, 32, 3, activation=nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2),
        *_step(32, 64, 3, activation=nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2),
        *_head(64 * 4 * 4),
    ).eval()


def cifar10_residual() -> nn.Module:
    """Residual blocks with batch normalisation and ReLU, averaged at the end, for CIFAR-10."""
    blocks = (Block(16, 32, 2), Block(32, 64, 2))
    return nn.Sequential(*_step(3, 16, 3, norm=True), *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10)).eval()


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, and on what."""

    make: Callable[[], nn.Module]
    data: str
    norm: str = "none"
    eps: float = 0.0
    steps: int = 3
    epochs: int = 4
    images: int = 20_000
    learning_rate: float = 0.003
    tested: tuple[str, float] | None = None


RECIPES = {
    "mnist_plain": Recipe(mnist_plain, "mnist", epochs=3, tested=("linf", 0.1)),
    "mnist_linf": Recipe(mnist_linf, "mnist", norm="linf", eps=0.3, steps=5, epochs=5, images=30_000),
    "cifar10_linf": Recipe(cifar10_linf, "cifar10", norm="linf", eps=8 / 255),
    "cifar10_l2": Recipe(cifar10_l2, "cifar10", norm="l2", eps=0.5, epochs=5),
    "cifar10_residual": Recipe(cifar10_residual, "cifar10", epochs=12, learning_rate=0.01, tested=("linf", 1 / 255)),
    "cifar10_plain": Recipe(partial(signs, 10), "cifar10", epochs=5, tested=("linf", 1 / 255)),
    "gtsrb_plain": Recipe(partial(signs, 43), "gtsrb", epochs=5, images=40_000, tested=("linf", 1 / 255)),
    "digits": Recipe(partial(pooled, side=8, kernel=2), "digits", norm="linf", eps=0.1, epochs=40, learning_rate=0.01),
}
PUBLISHED = {"resnet20": (resnet20, "cifar10"), "wong_kolter_mnist": (wong_kolter_mnist, "mnist")}
NETWORKS = PUBLISHED | {name: (one.make, one.data) for name, one in RECIPES.items()}
HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
TESTED = 1000


@dataclass(frozen=True)
class Sample:
    """A network and images of its test set that it classifies correctly: inputs ``(N, ...)``, labels, indices."""

    network: nn.Module
    inputs: Tensor
    labels: Tensor
    indices: list[int]


def fit(network: nn.Module, inputs: Tensor, labels: Tensor, recipe: Recipe) -> None:
    """Train a network in place."""
    train(network, inputs, labels, argparse.Namespace(**vars(recipe), batch_size=64))


def name_of(text: str) -> str:
    """Of a network that is given as FILE or NAME=FILE."""
    return text.split("=", 1)[0] if "=" in text else Path(text).stem


def load(text: str, given: argparse.Namespace, *, half: str = "all") -> Sample:
    """A network (FILE or NAME=FILE) and the first images of half of its test set, with the options of a parser."""
    name, weights = name_of(text), text.split("=", 1)[-1]
    if name not in NETWORKS:
        raise SystemExit(f"{text}: no network of this name; give NAME=FILE with one of: {', '.join(NETWORKS)}")
    make, data = NETWORKS[name]
    network = make()
    network.load_state_dict(load_file(weights))
    test = load_dataset(data, root=getattr(given, data, None))
    indices = torch.arange(len(test))[HALVES[half]][: 3 * given.images + 20]
    inputs, labels = test.take(indices)
    with torch.no_grad():
        right = (network(inputs).argmax(1) == labels).nonzero().flatten()[: given.images]
    return Sample(network, inputs[right], labels[right], indices[right].tolist())


def parser(description: str | None, *, networks: str) -> argparse.ArgumentParser:
    """Options that the benchmarks of this attack share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("networks", nargs=networks, metavar="NAME=FILE", help="weights (.safetensors)")
    made.add_argument("--images", type=int, default=16)
    return with_folders(made)


def with_folders(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that name the folders of data sets."""
    made.add_argument("--mnist", help="folder with MNIST's idx files")
    made.add_argument("--cifar10", help="folder with CIFAR-10")
    made.add_argument("--gtsrb", help="folder with the German traffic signs")
    return made


def main() -> None:
    """Train, save and print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = with_folders(made)
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--only", help="names of networks, with commas between; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    here = [name for name, one in RECIPES.items() if one.data == "digits" or getattr(given, one.data)]
    for name in given.only.split(",") if given.only else here:
        recipe, begin = RECIPES[name], time.process_time()
        root = getattr(given, recipe.data, None)
        data = load_dataset(recipe.data, root=root, split="train")
        inputs, labels = data.take(data.choose(min(recipe.images, len(data)), seed=given.seed))
        torch.manual_seed(given.seed)
        network = recipe.make().train()
        fit(network, inputs, labels, recipe)
        network.eval()
        weights = {key: value.contiguous() for key, value in network.state_dict().items()}
        save_file(weights, given.out / f"{name}.safetensors")
        spent = time.process_time() - begin
        test = load_dataset(recipe.data, root=root)
        inputs, labels = test.take(range(min(TESTED, len(test))))
        norm, eps = recipe.tested or (recipe.norm, recipe.eps)
        points = pgd(network, inputs, labels, ThreatModel(norm=norm, epsilon=eps), steps=40)
        print(
            f"{name}: {spent:.0f} CPU s, accuracy {accuracy(network, inputs, labels):.3f} on {len(labels)} images, "
            f"{accuracy(network, points, labels):.3f} after PGD at {norm} {eps:.4g}",
            flush=True,
        )


def _step(
    inside: int, outside: int, kernel: int, *, stride: int = 1, norm: bool = False, activation: nn.Module | None = None
) -> list[nn.Module]:
    """A padded convolution and what follows it."""
    between: list[nn.Module] = [nn.BatchNorm2d(outside)] if norm else []
    return [nn.Conv2d(inside, outside, kernel, stride, kernel // 2), *between, activation or nn.ReLU()]


def _head(features: int, classes: int = 10) -> list[nn.Module]:
    """Two dense layers."""
    return [nn.Flatten(), nn.Linear(features, 100), nn.ReLU(), nn.Linear(100, classes)]


if __name__ == "__main__":
    main()
