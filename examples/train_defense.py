"""Train the parts that a test-time defense needs next to its classifier, for the command ``robust-ext test-time``.

    python examples/train_defense.py --defense aid --out aid.safetensors

This trains for the embedded network on scikit-learn's digits, in seconds. For another network, as for the command:

    NETWORK="--model examples/networks.py:wong_kolter_mnist --weights net.safetensors --data mnist --data-root FOLDER"
    python examples/train_defense.py --defense aid $NETWORK --images 6000 --epochs 10 --out aid.safetensors
    robust-ext test-time --defense aid --defense-weights aid.safetensors $NETWORK --eps 0.15 --out run

``soap`` is another case: it needs no parts, but a classifier that was trained for its loss. What is written for it are
weights for ``--weights``.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset
from robust_ext.defenses import SOAP
from robust_ext.defenses._common import layer_names
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.defenses.training.loop import NetworkTraining
from robust_ext.defenses.training.views import RandomViews
from robust_ext.registry.defense import named_defense

# For grey images whose mirror images are no such images.
VIEWS = RandomViews(area=0.5, flip=0.0, jitter=0.4, grey=0.0)


def train(
    name: str,
    classifier: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epsilon: float = 0.1,
    epochs: int = 20,
    seed: int = 0,
    plain_views: bool = True,
    layers: str | None = None,
) -> nn.Module:
    """The trained part of a defense.

    Args:
        name: Of the defense.
        classifier: What it defends, from inputs in [0, 1] to logits.
        inputs: Clean training images ``(N, C, H, W)``.
        labels: Their classes ``(N,)``.
        epsilon: Of the linf attack that discriminators learn from.
        epochs: Passes over the images.
        seed: Of everything that is drawn.
        layers: Names of those that ``aid`` sees or ``clc`` controls, with commas between them; else all but the last.
        plain_views: Whether views are crops and brightness alone, or those of the authors, with flips and colours.
    """
    if name == "soap":
        return ConsistencyTraining(epochs=epochs, seed=seed).fit(classifier, inputs, labels, flip=not plain_views)
    chosen = None if layers is None else layer_names(layers)
    found = [key for key, part in classifier.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
    learned = {"epochs": epochs, "seed": seed}
    attacked = {"epsilon": epsilon, "attack_step_size": epsilon / 4, **learned}
    settings: dict[str, dict[str, Any]] = {
        "aid": {"layers": chosen or found[:-1], **attacked},
        "imf": attacked,
        "sodef": {"classes": classifier(inputs[:1]).shape[1], **learned},
        # The input and what enters each layer but the last; in the paper, what enters the blocks of a ResNet.
        "clc": {"layers": chosen or ["", *found[1:-1]]},
        "reverse": {"views": VIEWS if plain_views else RandomViews(), **learned},
        "adp": {"width": 16, **learned},
    }
    made: nn.Module = NAMED[name].training_class(**settings.get(name, learned)).fit(classifier, inputs, labels)
    return made


class ConsistencyTraining(NetworkTraining):
    """Training of a copy of a classifier with the label consistency loss of SOAP besides its own."""

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor, *, flip: bool) -> nn.Module:
        """The copy; ``flip`` is :class:`SOAP`'s."""
        trained = copy.deepcopy(classifier).requires_grad_()
        consistency = SOAP(trained, flip=flip)

        def loss(rows: Tensor) -> Tensor:
            own = nn.functional.cross_entropy(trained(inputs[rows]), labels[rows])
            return own + consistency.loss(inputs[rows]).mean()

        self.run(trained, len(inputs), loss)
        return trained


def save(name: str, part: nn.Module, file: Path) -> None:
    """Write a trained part where the named defense finds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if name == "soap":
        save_file({key: value.contiguous() for key, value in part.state_dict().items()}, file)
    else:
        part.save(file)


def main() -> None:
    """Train, save, and print what the defense does to the accuracy on test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defense", choices=(*TRAINED, "soap"), default="aid")
    parser.add_argument("--model", default="digits", help="of the classifier: digits, or file.py:function")
    parser.add_argument("--weights", help="of the classifier")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--images", type=int, default=1000, help="training images")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--eps", type=float, default=0.1, help="of the attack that aid and imf learn from")
    parser.add_argument("--layers", help="aid, clc: names with commas between them; an empty one is the input")
    parser.add_argument("--colour", action="store_true", help="views with flips and colours, as for CIFAR-10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="nothing is written without it")
    arguments = parser.parse_args()
    classifier = load_model(arguments.model, weights=arguments.weights).model
    assert isinstance(classifier, nn.Module)
    data = load_dataset(arguments.data, root=arguments.data_root, split="train")
    inputs, labels = data.take(data.choose(arguments.images, seed=arguments.seed))
    name = arguments.defense
    part = train(
        name,
        classifier,
        inputs,
        labels,
        epsilon=arguments.eps,
        epochs=arguments.epochs,
        seed=arguments.seed,
        plain_views=not arguments.colour,
        layers=arguments.layers,
    )
    print(f"{name}: trained on {len(inputs)} images of {data.name}")
    test = load_dataset(arguments.data, root=arguments.data_root)
    images, truth = test.take(test.choose(64, seed=arguments.seed))
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.out or Path(folder) / "part.safetensors"
        save(name, part, file)
        if name == "soap":
            defense = named_defense("soap" if arguments.colour else "soap(flip=False)", part, images[:2])
        else:
            settings = "(group_size=16)" if name in ("clc", "reverse") else ""
            defense = named_defense(name + settings, classifier, images[:2], weights=file)
    with torch.no_grad():
        logits_of = {"static": defense.classifier(images), "defended": defense(images)}
    accuracy = {key: float((logits.argmax(1) == truth).float().mean()) for key, logits in logits_of.items()}
    print(f"accuracy on 64 test images: static {accuracy['static']:.3f}, defended {accuracy['defended']:.3f}")


if __name__ == "__main__":
    main()
