"""Five attack recipes on a CIFAR-10 ResNet-20: two that can be trusted, three that cannot.

    python examples/resnet20_recipes.py --weights cifar10_resnet20.safetensors --data-root FOLDER --samples 32

FOLDER holds CIFAR-10 as distributed (``cifar-10-batches-bin`` or ``cifar-10-batches-py``). Settings are the paper's:
eps 8/255, 999 inner points, one planted corner, kappa .999.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.run import Rounded

sys.path.insert(0, str(Path(__file__).parent))
from networks import ResNet20, resnet20


class Scaled(ResNet20):
    """The network with its logits x 1000."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.load_state_dict(network.state_dict())
        with torch.no_grad():
            self.linear.weight.mul_(1000)
            self.linear.bias.mul_(1000)
        self.eval()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each row."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def logit_difference(logits: Tensor, labels: Tensor) -> Tensor:
    """Largest wrong logit minus the right one; has a gradient however large the logits are."""
    right = logits.gather(1, labels[:, None]).squeeze(1)
    return logits.scatter(1, labels[:, None], -torch.inf).amax(1) - right


def pgd(*, steps: int, relative_step: float, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Sign-gradient PGD from the clean input."""

    def attack(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
        adversarial = x.clone()
        for _ in range(steps):
            adversarial.requires_grad_(True)
            (gradient,) = torch.autograd.grad(loss(model(adversarial), y).sum(), adversarial)
            moved = adversarial.detach() + relative_step * epsilon * gradient.sign()
            adversarial = (x + (moved - x).clamp(-epsilon, epsilon)).clamp(0, 1)
        return adversarial

    return attack


def main() -> None:
    """Run all five and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    network = resnet20()
    network.load_state_dict(load_file(arguments.weights))
    cifar = load_dataset("cifar10", root=arguments.data_root)
    chosen = cifar.choose(arguments.samples, seed=arguments.seed)
    inputs, _ = cifar.take(chosen)
    good = {"steps": 20, "relative_step": 1 / 8}
    cases = [
        (
            "ResNet-20",
            network,
            {
                "PGD 20 x eps/8": pgd(**good, loss=cross_entropy),
                "PGD 20 x eps/200": pgd(steps=20, relative_step=1 / 200, loss=cross_entropy),
            },
        ),
        (
            "logits x 1000",
            Scaled(network),
            {
                "PGD, cross-entropy": pgd(**good, loss=cross_entropy),
                "PGD, logit difference": pgd(**good, loss=logit_difference),
            },
        ),
        ("16-level rounding", Rounded(network), {"PGD, plain gradients": pgd(**good, loss=cross_entropy)}),
    ]
    for target, model, attacks in cases:
        result = robust_ext.binarization_test(
            model,
            attacks,
            inputs,
            robust_ext.ThreatModel(norm="linf", epsilon=8 / 255),
            sample_ids=[int(index) for index in chosen],
            seed=arguments.seed,
            progress=True,
        )
        for attack in result.content["attacks"]:
            print(
                f"{target:<18} {attack['name']:<22} score {attack['score']:.3f}  R-ASR {attack['random_score']:.3f}  "
                f"samples {attack['samples']}  planted {attack['planted_points']['adversarial']}"
                f"/{attack['planted_points']['drawn']}  {attack['verdict']}"
            )


if __name__ == "__main__":
    main()
