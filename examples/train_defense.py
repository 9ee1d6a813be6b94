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
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset
from robust_ext.defenses.catalogue import TRAINED
from robust_ext.defenses.training.parts import train
from robust_ext.registry.defense import named_defense


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
