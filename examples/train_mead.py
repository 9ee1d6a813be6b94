"""Train the MNIST network of the MEAD paper (Granese et al. 2022).

    python examples/train_mead.py --data-root FOLDER --out mead_mnist.safetensors

FOLDER holds the four idx files of MNIST. The settings are the paper's (SGD, learning rate .01, momentum .9) but for the
number of epochs, of which the paper takes 100. An epoch takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset

NETWORK = f"{Path(__file__).with_name('networks.py')}:mead_mnist"


def main() -> None:
    """Train, save, and print the accuracy on the test images after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, default=Path("mead_mnist.safetensors"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000, help="training images, at most 60000")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mnist = load_dataset("mnist", root=arguments.data_root, split="train")
    inputs, labels = mnist.take(mnist.choose(arguments.images, seed=arguments.seed))
    test = load_dataset("mnist", root=arguments.data_root)
    test_inputs, test_labels = test.take(range(len(test)))
    torch.manual_seed(arguments.seed)
    network = load_model(NETWORK).model
    assert isinstance(network, nn.Module)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(arguments.epochs):
        network.train()
        for rows in torch.randperm(len(inputs)).split(arguments.batch_size):
            loss = nn.functional.cross_entropy(network(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            predicted = torch.cat([network(x).argmax(1) for x in test_inputs.split(500)])
        print(f"epoch {epoch + 1}: test accuracy {(predicted == test_labels).float().mean():.4f}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, arguments.out)


if __name__ == "__main__":
    main()
