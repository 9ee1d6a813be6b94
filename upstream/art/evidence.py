"""Figures of the patches beside this file, with the ART that is imported: ``python evidence.py CASE``.

All cases run on the digits of scikit-learn (8 x 8, in [0, 1]), with a small network trained here on 1,000 of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from art.attacks import evasion
from art.defences.detector.evasion import BinaryActivationDetector
from art.defences.preprocessor import ThermometerEncoding
from art.defences.preprocessor.preprocessor import PreprocessorPyTorch
from art.estimators.classification import PyTorchClassifier
from sklearn.datasets import load_digits
from torch import nn

ROWS = 100


class Rescaled(nn.Module):
    """A network of inputs in [0, 1] as one of inputs in ``[0, width]``."""

    def __init__(self, network: nn.Module, width: float) -> None:
        super().__init__()
        self.network, self.width = network, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, 10)``."""
        logits: torch.Tensor = self.network(x / self.width)
        return logits


def fit(network: nn.Module, points: Any, labels: Any, steps: int) -> None:
    """Train on all points at once."""
    x, y = torch.from_numpy(points), torch.from_numpy(labels).long()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()


def trained() -> tuple[nn.Module, Any, Any]:
    """A network, and the images ``(100, 1, 8, 8)`` and labels ``(100,)`` to attack, all classified correctly."""
    torch.manual_seed(0)
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    )
    fit(network, images[:1000], digits.target[:1000], 60)
    test, labels = images[1000:], digits.target[1000:]
    right = network(torch.from_numpy(test)).argmax(1).numpy() == labels
    return network, test[right][:ROWS], labels[right][:ROWS]


def estimator(network: nn.Module, width: float = 1.0, **settings: Any) -> PyTorchClassifier:
    """ART's classifier of a network, for inputs in ``[0, width]``."""
    module = network if width == 1 else Rescaled(network, width)
    settings = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0.0, width), **settings}
    return PyTorchClassifier(module, loss=nn.CrossEntropyLoss(), **settings)


def success(classifier: PyTorchClassifier, points: Any, labels: Any) -> str:
    """How many points are misclassified."""
    wrong = int((classifier.predict(points).argmax(1) != labels).sum())
    return f"{wrong} of {len(labels)} misclassified"


def acg() -> None:
    """The conjugate-gradient attacks in linf, beside APGD."""
    network, x, y = trained()
    classifier = estimator(network)
    settings = {"eps": 0.15, "eps_step": 0.15, "max_iter": 20, "nb_random_init": 1, "loss_type": "cross_entropy"}
    for name in ("AutoConjugateGradient", "RescalingAutoConjugateGradient", "AutoProjectedGradientDescent"):
        np.random.seed(0)
        points = getattr(evasion, name)(classifier, verbose=False, **settings).generate(x, y)
        print(name, success(classifier, points, y))


def deepfool() -> None:
    """Lengths of DeepFool's perturbations relative to the width of the bounds, for one network in two scales."""
    network, x, y = trained()
    for width in (1.0, 255.0):
        points = evasion.DeepFool(estimator(network, width), batch_size=ROWS, verbose=False).generate(x * width)
        lengths = np.linalg.norm((points / width - x).reshape(ROWS, -1), axis=1)
        found = success(estimator(network, width), points, y)
        print(f"bounds (0, {width:g}): {found}, median l2 distance {np.median(lengths):.3f} of the width")


class Counted(nn.Module):
    """A network for inputs of any type that counts its points, and those of them with NaN or infinite values."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.points, self.broken = network, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, 10)``."""
        self.points += len(x)
        self.broken += int((~x.flatten(1).isfinite().all(1)).sum())
        logits: torch.Tensor = self.network(x.float())
        return logits


def square() -> None:
    """The square attack in l2."""
    network, x, y = trained()
    for epsilon in (0.5, 0.75, 1.0):
        counted = Counted(network)
        np.random.seed(0)
        random.seed(0)
        attack = evasion.SquareAttack(estimator(counted), norm=2, eps=epsilon, max_iter=500, verbose=False)
        found = success(estimator(network), attack.generate(x, y), y)
        print(f"eps {epsilon}: {found}, {counted.broken} of {counted.points} queries NaN")


def vat() -> None:
    """How far the virtual adversarial direction moves the prediction, with the default finite difference."""
    network, x, y = trained()
    classifier = estimator(nn.Sequential(network, nn.Softmax(1)))
    x, y = x[:50], y[:50]
    clean = classifier.predict(x)
    np.random.seed(0)
    attack = evasion.VirtualAdversarialMethod(classifier, max_iter=3, eps=1.0, batch_size=50, verbose=False)
    points = attack.generate(x)
    moved = (clean * np.log(clean / classifier.predict(points))).sum(1)
    print(f"{success(classifier, points, y)}, mean KL divergence {moved.mean():.4f}")


def apgd() -> None:
    """Cross-entropy of the points that APGD returns, by whether they are misclassified."""
    network, x, y = trained()
    classifier = estimator(network)
    for restarts in (1, 5):
        np.random.seed(0)
        attack = evasion.AutoProjectedGradientDescent(
            classifier, eps=0.1, eps_step=0.1, max_iter=20, nb_random_init=restarts, verbose=False
        )
        points = attack.generate(x, y)
        loss = classifier.compute_loss(points, np.eye(10)[y], reduction="none")
        clean = classifier.compute_loss(x, np.eye(10)[y], reduction="none")
        kept = classifier.predict(points).argmax(1) == y
        print(f"{restarts} restarts: {success(classifier, points, y)}, mean loss of the others {loss[kept].mean():.4f}")
        print(f"    the same images before the attack {clean[kept].mean():.4f}")


def rays() -> None:
    """RayS beside the other attacks of ART that see labels only, in linf with about as many queries an image."""
    network, x, y = trained()
    x, y = x[:20], y[:20]
    for name, settings in (
        ("RayS", {"max_queries": 1500}),
        ("HopSkipJump", {"norm": np.inf, "max_iter": 10, "init_eval": 50, "max_eval": 200}),
    ):
        counted = Counted(network)
        np.random.seed(0)
        points = getattr(evasion, name)(estimator(counted), verbose=False, **settings).generate(x, y)
        distance = np.abs(points - x).reshape(len(x), -1).max(1)
        print(f"{name}: {success(estimator(network), points, y)}, median linf distance {np.median(distance):.4f}")
        print(f"    {counted.points / len(x):.0f} queries an image")


def orthogonal() -> None:
    """PGD, selective and orthogonal PGD against a classifier with a detector that is trained on PGD's examples."""
    network, x, y = trained()
    classifier = estimator(network)
    settings = {"eps": 0.15, "eps_step": 0.02, "max_iter": 100, "batch_size": ROWS, "verbose": False}
    pgd = evasion.ProjectedGradientDescent(classifier, **settings)
    clean = (load_digits().images[:1000, None] / 16).astype(np.float32)
    made = pgd.generate(clean)
    torch.manual_seed(1)
    second = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 2))
    fit(second, np.concatenate([clean, made]), np.repeat([0, 1], 1000), 100)
    detector = estimator(second, nb_classes=2)
    print(f"false positives: {int(detector.predict(x).argmax(1).sum())} of {len(x)}")
    aware = evasion.OrthogonalProjectedGradientDescent
    for name, attack in (
        ("PGD", pgd),
        ("selective", aware(classifier, detector, orthogonal=False, **{**settings, "eps_step": 0.1})),
        ("orthogonal", aware(classifier, detector, **{**settings, "eps_step": 0.1})),
    ):
        found = attack.generate(x, y)
        wrong, seen = classifier.predict(found).argmax(1) != y, detector.predict(found).argmax(1) == 1
        print(f"{name}: {int(wrong.sum())} misclassified, {int((wrong & ~seen).sum())} of them not detected")


def matching() -> None:
    """PGD, feature adversaries and feature matching against ART's own detector on the features of a classifier."""
    network, x, y = trained()
    classifier = estimator(network)
    clean = (load_digits().images[:1000, None] / 16).astype(np.float32)
    settings = {"batch_size": ROWS, "verbose": False, "max_iter": 100}
    pgd = evasion.ProjectedGradientDescent(classifier, eps=0.2, eps_step=0.02, **settings)
    kinds = np.eye(2, dtype=np.float32)[np.repeat([0, 1], 1000)]
    torch.manual_seed(1)
    second = nn.Sequential(nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(second.parameters(), lr=1e-3)
    binary = estimator(second, input_shape=(576,), nb_classes=2, clip_values=None, optimizer=optimizer)
    detector = BinaryActivationDetector(classifier, binary, layer="4")
    made = evasion.ProjectedGradientDescent(
        classifier, eps=0.2, eps_step=0.05, batch_size=500, max_iter=20, verbose=False
    )
    np.random.seed(0)
    detector.fit(np.concatenate([clean, made.generate(clean)]), kinds, nb_epochs=60, verbose=False)
    print(f"false positives: {int(detector.detect(x)[1].sum())} of {len(x)}")
    classes = classifier.predict(clean).argmax(1)
    distances = np.square(x[:, None] - clean[None]).sum((2, 3, 4))
    guides = clean[np.where(classes[None] == y[:, None], np.inf, distances).argmin(1)]
    found = {
        "PGD": pgd.generate(x, y),
        "FeatureAdversariesPyTorch": evasion.FeatureAdversariesPyTorch(
            classifier, delta=0.2, layer="4", step_size=0.01, **settings
        ).generate(x, guides),
        "FeatureMatchingPyTorch": evasion.FeatureMatchingPyTorch(
            classifier, clean, layer="4", detector=detector, eps=0.2, eps_step=0.01, weight=3, **settings
        ).generate(x, y),
    }
    for name, points in found.items():
        wrong, seen = classifier.predict(points).argmax(1) != y, detector.detect(points)[1]
        print(f"{name}: {int(wrong.sum())} misclassified, {int((wrong & ~seen).sum())} of them not detected")


class Rounded(PreprocessorPyTorch):  # type: ignore[misc]
    """Rounding to five grey levels, with the identity as its differentiable estimate."""

    def __init__(self) -> None:
        super().__init__(is_fitted=True, apply_fit=False, apply_predict=True)

    def forward(self, x: torch.Tensor, y: Any = None) -> tuple[torch.Tensor, Any]:
        """Rounded inputs."""
        return torch.round(4 * x) / 4, y

    def estimate_forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        """The inputs."""
        return x


def bpda() -> None:
    """PGD on a classifier behind a preprocessor with a differentiable estimate."""
    network, x, y = trained()
    classifier = estimator(network, preprocessing_defences=Rounded())
    settings = {"eps": 0.2, "eps_step": 0.02, "max_iter": 50, "batch_size": ROWS, "verbose": False}
    print("images", success(classifier, x, y))
    print("PGD", success(classifier, evasion.ProjectedGradientDescent(classifier, **settings).generate(x, y), y))


def thermometer() -> None:
    """PGD on a network of thermometer encodings, for inputs in [0, 1] and in [0, 255]."""
    torch.manual_seed(0)
    digits, encode = load_digits(), ThermometerEncoding(clip_values=(0.0, 1.0), num_space=10, channels_first=True)
    images = (digits.images[:, None] / 16).astype(np.float32)
    network = nn.Sequential(nn.Conv2d(10, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    fit(network, encode(images[:1000])[0], digits.target[:1000], 60)
    x, y = images[1000 : 1000 + ROWS], digits.target[1000 : 1000 + ROWS]
    for width in (1.0, 255.0):
        encode = ThermometerEncoding(clip_values=(0.0, width), num_space=10, channels_first=True)
        defended = {"clip_values": (0.0, width), "preprocessing_defences": encode, "preprocessing": None}
        classifier = estimator(network, **defended)
        settings = {"eps": 0.2 * width, "eps_step": 0.02 * width, "max_iter": 50, "batch_size": ROWS, "verbose": False}
        points = evasion.ProjectedGradientDescent(classifier, **settings).generate(x * width, y)
        print(
            f"bounds (0, {width:g}): images {success(classifier, x * width, y)}, PGD {success(classifier, points, y)}"
        )


def wasserstein() -> None:
    """NaN and mass of what the Wasserstein attack returns at its default regularization."""
    network, x, y = trained()
    x, y = x[:8], y[:8]
    np.random.seed(0)
    settings = {"eps_step": 0.1, "eps_iter": 5, "max_iter": 3, "conjugate_sinkhorn_max_iter": 40}
    attack = evasion.Wasserstein(
        estimator(network), norm="2", projected_sinkhorn_max_iter=40, batch_size=8, verbose=False, **settings
    )
    points = attack.generate(x, y)
    finite = np.isfinite(points).reshape(len(x), -1).all(1)
    masses = [kind.reshape(len(x), -1).sum(1)[finite] for kind in (x, points)]
    print(
        f"{int((~finite).sum())} of {len(x)} NaN, mass of the others off by up to {np.ptp([*masses], axis=0).max():.2f}"
    )


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (acg, deepfool, square, vat, apgd, rays, orthogonal, matching, bpda, thermometer, wasserstein)
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
