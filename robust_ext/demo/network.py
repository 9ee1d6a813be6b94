"""The embedded network: a small convnet for scikit-learn's 8x8 digits, with its trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("digits.safetensors")


def digits_network(*, trained: bool = True) -> nn.Sequential:
    """A convnet from inputs ``(N, 1, 8, 8)`` in [0, 1] to logits ``(N, 10)``, with 128 features, in eval mode.

    Args:
        trained: With the weights that ship with the package (92% of the test split right), or as initialised.

    Example:
        >>> digits_network()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    if trained:
        network.load_state_dict(load_file(WEIGHTS))
    return network.eval()


def train_digits_network(inputs: Tensor, labels: Tensor, *, epochs: int = 30, seed: int = 0) -> nn.Sequential:
    """Train the network from scratch, as the shipped weights were; about five seconds on one core.

    Args:
        inputs: float32 ``(N, 1, 8, 8)`` in [0, 1].
        labels: int64 ``(N,)``.
        epochs: Passes over the data.
        seed: Of initialisation and order.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = digits_network(trained=False).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-4)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(inputs)), 64):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(network(inputs[batch]), labels[batch]))
                optimizer.step()
    return network.eval()
