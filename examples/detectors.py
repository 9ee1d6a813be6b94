"""Three published detectors on real images, each against an attack that ignores it and one that knows it.

    python examples/train_detected.py --data-root MNIST --out NETWORKS
    python examples/detectors.py --detector trapdoor --data-root MNIST --networks NETWORKS [--samples 32]
    python examples/detectors.py --detector ml-loo --data-root MNIST --networks NETWORKS
    python examples/detectors.py --detector odds --data-root CIFAR10 --networks FOLDER

The last FOLDER holds ``cifar10_resnet20.safetensors``, weights for ``examples/networks.py:resnet20``.

Printed are the AUROC against the blind attack, clean alarms at a threshold of 5%, robust accuracy (correct or
rejected) under both attacks, and the scores of both in the regular and the inverted binarization test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from networks import resnet20
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from train_detected import mnist_network

import robust_ext
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.detectors import Detector, MLLOODetector, OddsDetector, TrapdoorDetector, Triggers
from robust_ext.models.defended import Defended

BLIND = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"


def attack(
    spec: str,
    network: nn.Module,
    detector: Detector,
    x: Tensor,
    y: Tensor,
    *,
    references: Tensor,
    threat_model: ThreatModel,
) -> Tensor:
    """Candidates of an attack on a network with a detector."""
    target = Target(
        module=network,
        bounds=(0.0, 1.0),
        classes=10,
        input_shape=tuple(x.shape[1:]),
        device=torch.device("cpu"),
        defended=Defended(network, detector),
        references=references,
    )
    generator = torch.Generator().manual_seed(0)
    return run_attack(robust_ext.as_attack(spec), target, x, y, threat_model=threat_model, generator=generator)


def odds(
    network: nn.Module, inputs: Tensor, labels: Tensor, _adversarial: Callable[[Tensor, Tensor], Tensor]
) -> Detector:
    """Odds with the paper's normal noise, thirty levels strong, and few draws."""
    detector = OddsDetector(network, noises=[("normal", 30 / 255)], draws=8)
    with seeded_globals(0):
        detector.fit(inputs[:500], labels[:500])
    return detector


def trapdoor(network: nn.Module, inputs: Tensor, folder: Path) -> Detector:
    """Trapdoor on the network that was trained with its triggers."""
    detector = TrapdoorDetector(network, layer="6")
    detector.fit(inputs[:2000], Triggers(**load_file(folder / "mnist_triggers.safetensors")))
    return detector


def ml_loo(
    network: nn.Module, inputs: Tensor, labels: Tensor, adversarial: Callable[[Tensor, Tensor], Tensor]
) -> Detector:
    """ML-LOO that blanks every fourth value with grey: black would change nothing where MNIST is black."""
    detector = MLLOODetector(network, layers=["3", "6"], fill=0.5, stride=2, units=64)
    candidates = adversarial(inputs[:300], labels[:300])
    with torch.no_grad():
        wrong = network(candidates).argmax(1) != labels[:300]
    detector.fit(inputs[300:500], candidates[wrong][:200])
    return detector


AWARE = {
    "odds": "robust_ext:OrthogonalPGD(steps=100)",
    "trapdoor": "robust_ext:OrthogonalPGD(steps=300)",
    "ml-loo": "robust_ext:OrthogonalPGD(steps=60)",
}


def main() -> None:
    """Fit, calibrate, attack and test one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--detector", choices=sorted(AWARE), required=True)
    parser.add_argument("--epsilon", type=float, help="0.1 on MNIST, 8/255 on CIFAR-10 when left out")
    parser.add_argument("--samples", type=int, default=32, help="of each binarization test")
    parser.add_argument("--attacked", type=int, default=100, help="images for robust accuracy")
    parser.add_argument("--inner-points", type=int, default=999)
    parser.add_argument("--planting-tries", type=int, default=200)
    parser.add_argument("--aware", help="attack that knows the detector")
    arguments = parser.parse_args()
    name = arguments.detector
    data = "cifar10" if name == "odds" else "mnist"
    threat_model = ThreatModel(norm="linf", epsilon=arguments.epsilon or {"mnist": 0.1, "cifar10": 8 / 255}[data])
    # Training images fit the detector and serve as references; test images calibrate it and are attacked.
    split = "test" if data == "cifar10" else "train"
    train = load_dataset(data, root=arguments.data_root, split=split)
    inputs, labels = train.take(train.choose(4000, seed=1))
    test = load_dataset(data, root=arguments.data_root)
    taken = set(train.choose(4000, seed=1).tolist()) if split == "test" else set()
    chosen = [index for index in test.choose(6000, seed=0).tolist() if index not in taken]
    x, y = test.take(chosen[: arguments.attacked + 600])
    held_out, x, y = x[arguments.attacked :], x[: arguments.attacked], y[: arguments.attacked]
    files = {"odds": "cifar10_resnet20", "trapdoor": "mnist_trapdoor", "ml-loo": "mnist_plain"}
    network = resnet20() if data == "cifar10" else mnist_network()
    network.load_state_dict(load_file(arguments.networks / f"{files[name]}.safetensors"))
    network.eval()

    def blind_on(some: Tensor, classes: Tensor) -> Tensor:
        target = Target(
            module=network, bounds=(0.0, 1.0), classes=10, input_shape=tuple(x.shape[1:]), device=torch.device("cpu")
        )
        generator = torch.Generator().manual_seed(1)
        spec = robust_ext.as_attack(BLIND)
        return run_attack(spec, target, some, classes, threat_model=threat_model, generator=generator)

    if name == "trapdoor":
        detector = trapdoor(network, inputs, arguments.networks)
    else:
        detector = {"odds": odds, "ml-loo": ml_loo}[name](network, inputs, labels, blind_on)
    with seeded_globals(0):
        calibration = detector.calibrate(held_out[:400], per_class=name == "trapdoor")
    defended, aware = Defended(network, detector), arguments.aware or AWARE[name]
    # For attacks that imitate some: clean training images of another class, which the detector lets pass.
    with seeded_globals(0), torch.no_grad():
        passed = ~detector.decide(inputs[2000:2600])
    pool, classes = inputs[2000:2600][passed], labels[2000:2600][passed]
    others = [pool[classes != label] for label in y.tolist()]
    references = torch.stack([some[(7 * row) % (len(some) - 3) :][:3] for row, some in enumerate(others)])
    candidates = {}
    for title, spec in (("blind", BLIND), ("aware", aware)):
        start = time.perf_counter()
        parts = [
            attack(spec, network, detector, a, b, references=c, threat_model=threat_model)
            for a, b, c in zip(x.split(25), y.split(25), references.split(25), strict=True)  # type: ignore[no-untyped-call]
        ]
        candidates[title] = torch.cat(parts)
        with seeded_globals(0):
            predicted, rejected = defended.decide(candidates[title])
        fooled = (predicted != y) & ~rejected & threat_model.contains(candidates[title], x)
        print(
            f"{name} {title}: misclassified {float((predicted != y).float().mean()):.2f}, robust accuracy (correct or "
            f"rejected) {1 - float(fooled.float().mean()):.2f}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    with seeded_globals(0), torch.no_grad():
        wrong = network(candidates["blind"]).argmax(1) != y
        natural, adversarial = detector.score(held_out[400:]), detector.score(candidates["blind"][wrong])
        alarms = float(detector.decide(held_out[400:]).float().mean())
    auroc = roc_auc_score([0] * len(natural) + [1] * len(adversarial), torch.cat([natural, adversarial]).numpy())
    print(
        f"{name}: AUROC {auroc:.3f} against the blind attack, clean alarms {alarms:.3f} on 200 other images", flush=True
    )
    print(f"{name}: calibration {calibration.achieved:.3f} of {calibration.samples}", flush=True)
    result = robust_ext.binarization_test(
        network,
        {"blind": BLIND, "aware": aware},
        x[: arguments.samples],
        threat_model,
        detector=detector,
        inner_points=arguments.inner_points,
        planting_tries=arguments.planting_tries,
        canaries=0,
    )
    for one in result.content["attacks"]:
        for title, part in one["tests"].items():
            planting, points = part["planting"], part["planted_points"]
            print(
                f"{name} {one['name']}, {title} test: score {part['score']}, R-ASR {part['random_score']}, planted "
                f"{part['samples']} of {planting['samples']} samples ({planting['by_attack']} by an attack), re-check "
                f"{points['adversarial']}/{points['drawn']} points, {planting['references']} references, outcomes "
                f"{part['outcomes']}, {part['seconds']['total']:.0f} s",
                flush=True,
            )
        print(f"{name} {one['name']}: {one['verdict']}, score {one['score']}", flush=True)


if __name__ == "__main__":
    main()
