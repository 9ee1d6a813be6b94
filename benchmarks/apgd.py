"""APGD against the libraries' attacks on a CIFAR-10 ResNet-20: robust accuracy, and the time of a step.

    python benchmarks/apgd.py --weights cifar10_resnet20.safetensors --data-root FOLDER [--samples 100]

All attacks get the same number of gradients from one random start, and every candidate is verified here. The libraries
are called directly. Times are those of a step in batches of 32, divided by those of a hand-written PGD loop on the same
inputs; both alternate in one process, and the spread of the loop's own times says how far to trust the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import warnings
from collections.abc import Callable

import torch
from common import load, parser, pgd, seconds
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import verify

LOSSES = ("ce", "dlr", "margin")


def ours(target: Target, loss: str, steps: int) -> Callable[..., Tensor]:
    """This project's attack as a function of inputs, labels and epsilon."""
    attack = APGD(steps=steps, loss=loss)

    def run(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        threat_model = ThreatModel(norm="linf", epsilon=epsilon)
        return attack.search(target, x, y, threat_model=threat_model, generator=stream(0, "benchmark"))

    return run


def libraries(network: nn.Module, steps: int) -> dict[str, Callable[..., Tensor]]:
    """The libraries' attacks, as functions of inputs, labels and epsilon."""
    import foolbox
    import torchattacks
    from art.attacks.evasion import AutoProjectedGradientDescent
    from art.estimators.classification import PyTorchClassifier

    def by_foolbox(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
        candidates: Tensor = foolbox.attacks.LinfPGD(steps=steps)(model, x, y, epsilons=epsilon)[1]
        return candidates

    def by_art(loss: str) -> Callable[..., Tensor]:
        def run(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
            classifier = PyTorchClassifier(
                network, loss=nn.CrossEntropyLoss(), input_shape=(3, 32, 32), nb_classes=10, clip_values=(0, 1)
            )
            attack = AutoProjectedGradientDescent(
                classifier,
                eps=epsilon,
                eps_step=2 * epsilon,
                max_iter=steps,
                nb_random_init=1,
                batch_size=len(x),
                loss_type=loss,
                verbose=False,
            )
            return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))

        return run

    def by_torchattacks(loss: str) -> Callable[..., Tensor]:
        def run(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
            candidates: Tensor = torchattacks.APGD(network, eps=epsilon, steps=steps, loss=loss)(x, y)
            return candidates

        return run

    return {
        "Foolbox LinfPGD (ce)": by_foolbox,
        "ART AutoPGD (ce)": by_art("cross_entropy"),
        "torchattacks APGD (ce)": by_torchattacks("ce"),
        "ART AutoPGD (dlr)": by_art("difference_logits_ratio"),
        "torchattacks APGD (dlr)": by_torchattacks("dlr"),
    }


def accuracies(network: nn.Module, target: Target, inputs: Tensor, arguments: argparse.Namespace) -> None:
    """Print how many inputs each attack leaves robust; the labels are the network's own decisions."""
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    attacks = {f"robust_ext APGD ({loss})": ours(target, loss, arguments.steps) for loss in LOSSES}
    attacks |= libraries(network, arguments.steps)
    for name, attack in attacks.items():
        left = []
        for epsilon in arguments.epsilons:
            with frozen(network), seeded_globals(0), contextlib.redirect_stdout(io.StringIO()):
                candidates = attack(inputs.clone(), labels.clone(), epsilon / 255)
            threat_model = ThreatModel(norm="linf", epsilon=epsilon / 255)
            found = verify(candidates, inputs, labels, module=network, threat_model=threat_model, attack=name).outcomes
            left.append(sum(outcome != "found" for outcome in found))
        shown = "  ".join(f"{count:>3}" for count in left)
        print(f"{name:<26} robust of {len(inputs)} at {arguments.epsilons}/255: {shown}", flush=True)


def times(network: nn.Module, target: Target, inputs: Tensor, arguments: argparse.Namespace) -> None:
    """Print the time of a step of each loss and norm over that of PGD by hand."""
    x = inputs[:32]
    steps = arguments.timed_steps
    with torch.no_grad():
        y = network(x).argmax(1)
    by_hand = pgd(steps)
    cases = {f"linf {loss}": (ThreatModel(norm="linf", epsilon=8 / 255), loss) for loss in LOSSES}
    cases |= {norm: (ThreatModel(norm=norm, epsilon=e), "ce") for norm, e in (("l2", 0.5), ("l1", 12))}
    for name, (threat_model, loss) in cases.items():
        attack = APGD(steps=steps, loss=loss)

        def adapted(attack: APGD = attack, threat_model: ThreatModel = threat_model) -> object:
            return attack.search(target, x, y, threat_model=threat_model, generator=stream(0))

        theirs, mine = [], []
        with frozen(network):
            for _ in range(arguments.rounds + 1):
                theirs.append(seconds(lambda: by_hand(network, x, y, epsilon=8 / 255)) / steps)
                mine.append(seconds(adapted) / steps)
        # The first round warms up. A run of APGD has one more forward pass, to judge its last point.
        theirs, mine = theirs[1:], mine[1:]
        with frozen(network), torch.no_grad():
            last = min(seconds(lambda: network(x)) for _ in range(3)) / steps
        ratio = statistics.median(mine) / statistics.median(theirs)
        bare = (min(mine) - last) / min(theirs)
        print(
            f"{name:<12} ratio of medians {ratio:.3f}, of minima {min(mine) / min(theirs):.3f}, less the last forward "
            f"pass {bare:.3f}; a step by hand took {1e3 * min(theirs):.1f} to {1e3 * max(theirs):.1f} ms",
            flush=True,
        )


def main() -> None:
    """Print a table of robust accuracies, then ratios of times."""
    options = parser(__doc__)
    options.set_defaults(samples=100)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--epsilons", type=float, nargs="+", default=[8, 1], help="in 255ths")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--timed-steps", type=int, default=20)
    options.add_argument("--only", choices=("accuracy", "time"))
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    network, inputs = load(arguments)
    target = Target(
        module=network, bounds=(0.0, 1.0), classes=10, input_shape=tuple(inputs.shape[1:]), device=inputs.device
    )
    if arguments.only != "time":
        accuracies(network, target, inputs, arguments)
    if arguments.only != "accuracy":
        times(network, target, inputs, arguments)


if __name__ == "__main__":
    main()
