"""Train a small MNIST network plainly, for the test-time defenses that stand before one.

    python examples/train_plain.py --data-root FOLDER --out mnist_plain.safetensors

FOLDER holds the four idx files of MNIST. It takes half a minute on one core; at the end it prints the accuracy on the
test images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from robust_ext.datasets import load_dataset
from robust_ext.defenses.training.loop import train_network


def mnist_network() -> nn.Sequential:
    """Inputs (N, 1, 28, 28) in [0, 1], logits (N, 10), 512 features (layer "6"), in eval mode."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    ).eval()


def main() -> None:
    """Train, save, and print the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=60_000, help="training images, at most 60000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mnist = load_dataset("mnist", root=arguments.data_root, split="train")
    inputs, labels = mnist.take(mnist.choose(arguments.images, seed=arguments.seed))
    test = load_dataset("mnist", root=arguments.data_root)
    test_inputs, test_labels = test.take(range(len(test)))
    torch.manual_seed(arguments.seed)
    network = mnist_network()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(inputs[rows]), labels[rows])

    train_network(network, len(inputs), loss, epochs=2, batch_size=64)
    save_file(network.state_dict(), arguments.out)
    with torch.no_grad():
        print(f"accuracy {float((network(test_inputs).argmax(1) == test_labels).float().mean()):.4f}")


if __name__ == "__main__":
    main()
