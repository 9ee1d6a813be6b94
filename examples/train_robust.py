"""Train a small ReLU network plainly, or with the adversarial training of Madry et al. 2018 in linf or l2.

    python examples/train_robust.py
    python examples/train_robust.py --data mnist --data-root FOLDER --eps 0.3 --steps 5 --epochs 3 --out net.safetensors

Without arguments it trains on scikit-learn's digits in seconds, and writes nothing. FOLDER holds the four idx files of
MNIST, on which training takes minutes. The networks are for ``--model examples/networks.py:pooled --weights FILE``. At
the end it prints the accuracy on the test images as they are and after PGD at the budget of the training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from robust_ext.attacks._common.rows import l2_normalize, project
from robust_ext.cli.models import load_model
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

NETWORKS = f"{Path(__file__).with_name('networks.py')}:pooled"
# Of the training, the share in which the budget grows from 0: at the full budget from the start, a small network learns
# to give the same answer to everything.
WARM_UP = 0.5


def pgd(network: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, steps: int) -> Tensor:
    """Points of high loss in the ball, by ``steps`` steps of 2.5 epsilon / steps from a random start."""
    size = 2.5 * threat_model.epsilon / steps
    noise = torch.rand_like(inputs).mul_(2).sub_(1)
    points = project(inputs + threat_model.epsilon * noise, inputs, threat_model)
    for _ in range(steps):
        points.requires_grad_()
        loss = nn.functional.cross_entropy(network(points), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, points)
        step = gradient.sign() if threat_model.norm == "linf" else l2_normalize(gradient.flatten(1)).view_as(gradient)
        points = project(points.detach() + size * step, inputs, threat_model)
    return points


def accuracy(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of the rows that are classified as their label."""
    with torch.no_grad():
        predicted = torch.cat([network(x).argmax(1) for x in inputs.split(500)])
    return float((predicted == labels).float().mean())


def train(network: nn.Module, inputs: Tensor, labels: Tensor, arguments: argparse.Namespace) -> None:
    """Train in place, with Adam and a learning rate that rises and falls."""
    rounds = [rows for _ in range(arguments.epochs) for rows in torch.randperm(len(inputs)).split(arguments.batch_size)]
    optimizer = torch.optim.Adam(network.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, total_steps=len(rounds))
    for number, rows in enumerate(rounds):
        x, y = inputs[rows], labels[rows]
        if arguments.norm != "none":
            budget = arguments.eps * min(1, (number + 1) / (WARM_UP * len(rounds)))
            x = pgd(network, x, y, ThreatModel(norm=arguments.norm, epsilon=budget), steps=arguments.steps)
        loss = nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if number % 100 == 99:
            print(f"batch {number + 1} of {len(rounds)}: loss {float(loss.detach()):.3f}", flush=True)


def main() -> None:
    """Train, save, and print accuracies on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--norm", choices=("none", "linf", "l2"), default="linf")
    parser.add_argument("--eps", type=float, default=0.1, help="budget of the training, in the units of the inputs")
    parser.add_argument("--steps", type=int, default=3, help="of PGD in training")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.01, help="the highest")
    parser.add_argument("--images", type=int, help="training images; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to write; nothing is written when left out")
    arguments = parser.parse_args()
    data = load_dataset(arguments.data, root=arguments.data_root, split="train")
    inputs, labels = data.take(data.choose(arguments.images or len(data), seed=arguments.seed))
    torch.manual_seed(arguments.seed)
    network = load_model(NETWORKS if arguments.data == "mnist" else f"{NETWORKS}(side=8, kernel=2)").model
    assert isinstance(network, nn.Module)
    train(network, inputs, labels, arguments)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in network.state_dict().items()}, arguments.out)
    test = load_dataset(arguments.data, root=arguments.data_root)
    inputs, labels = test.take(range(len(test)))
    print(f"test accuracy {accuracy(network, inputs, labels):.4f}")
    if arguments.norm != "none":
        threat_model = ThreatModel(norm=arguments.norm, epsilon=arguments.eps)
        points = pgd(network, inputs[:1000], labels[:1000], threat_model, steps=40)
        print(f"after PGD at {arguments.norm} {arguments.eps} {accuracy(network, points, labels[:1000]):.4f}")


if __name__ == "__main__":
    main()
