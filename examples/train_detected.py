"""Train a small MNIST network, plainly and with trapdoors, for the detectors Odds, ML-LOO and Trapdoor.

    python examples/train_detected.py --data-root FOLDER --out NETWORKS

FOLDER holds the four idx files of MNIST. Written are ``mnist_plain.safetensors``, ``mnist_trapdoor.safetensors`` (for
``--model examples/train_detected.py:mnist_network --weights FILE``) and ``mnist_triggers.safetensors``. It takes about
a minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from robust_ext.datasets import load_dataset
from robust_ext.detectors.trapdoor import TrapdoorDetector
from robust_ext.detectors.triggers import make_triggers, train_epoch

# Injection ratio and learning rate of each epoch; trapdoors are planted in the plain network.
SCHEDULES = {"plain": [(0.0, 1e-3)] * 2, "trapdoor": [(0.5, 1e-3)] * 5 + [(0.5, 2e-4)]}


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
    """Train, save, and print accuracies on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--images", type=int, default=60_000, help="training images, at most 60000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    mnist = load_dataset("mnist", root=arguments.data_root, split="train")
    inputs, labels = mnist.take(mnist.choose(arguments.images, seed=arguments.seed))
    test = load_dataset("mnist", root=arguments.data_root)
    test_inputs, test_labels = test.take(range(len(test)))
    generator = torch.Generator().manual_seed(arguments.seed)
    triggers = make_triggers(10, (1, 28, 28), generator=generator)
    save_file({"masks": triggers.masks, "patterns": triggers.patterns}, arguments.out / "mnist_triggers.safetensors")
    torch.manual_seed(arguments.seed)
    network = mnist_network()
    for name, schedule in SCHEDULES.items():
        for injection_ratio, learning_rate in schedule:
            optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
            train_epoch(
                network,
                optimizer,
                inputs,
                labels,
                triggers,
                generator=generator,
                injection_ratio=injection_ratio,
                batch_size=64,
            )
        save_file(network.state_dict(), arguments.out / f"mnist_{name}.safetensors")
        with torch.no_grad():
            accuracy = float((network(test_inputs).argmax(1) == test_labels).float().mean())
        success = TrapdoorDetector(network, layer="6").fit(test_inputs[:2000], triggers)
        print(f"{name:<9} accuracy {accuracy:.4f}  trapdoor success {success.mean():.3f} (lowest {success.min():.3f})")


if __name__ == "__main__":
    main()
