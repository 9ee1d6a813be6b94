"""The trained part of each published defense, by its name."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from robust_ext.defenses import SOAP
from robust_ext.defenses._common import layer_names
from robust_ext.defenses.catalogue import NAMED
from robust_ext.defenses.training.loop import NetworkTraining
from robust_ext.defenses.training.views import RandomViews

# For grey images whose mirror images are no such images.
VIEWS = RandomViews(area=0.5, flip=0.0, jitter=0.4, grey=0.0)


def train(
    name: str,
    classifier: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epsilon: float = 0.1,
    epochs: int = 20,
    seed: int = 0,
    plain_views: bool = True,
    layers: str | None = None,
) -> nn.Module:
    """Train the part of a defense, or a copy of the classifier for SOAP's loss.

    Args:
        name: Of the defense.
        classifier: What it defends, from inputs in [0, 1] to logits.
        inputs: Clean training images ``(N, C, H, W)``.
        labels: Their classes ``(N,)``.
        epsilon: Of the linf attack that discriminators learn from.
        epochs: Passes over the images.
        seed: Of everything that is drawn.
        layers: Names of those that ``aid`` sees or ``clc`` controls, with commas between them; else all but the last.
        plain_views: Whether views are crops and brightness alone, or those of the authors, with flips and colours.
    """
    if name == "soap":
        return ConsistencyTraining(epochs=epochs, seed=seed).fit(classifier, inputs, labels, flip=not plain_views)
    chosen = None if layers is None else layer_names(layers)
    found = [key for key, part in classifier.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
    learned = {"epochs": epochs, "seed": seed}
    attacked = {"epsilon": epsilon, "attack_step_size": epsilon / 4, **learned}
    settings: dict[str, dict[str, Any]] = {
        "aid": {"layers": chosen or found[:-1], **attacked},
        "imf": attacked,
        "sodef": {"classes": classifier(inputs[:1]).shape[1], **learned},
        # The input and what enters each layer but the last; in the paper, what enters the blocks of a ResNet.
        "clc": {"layers": chosen or ["", *found[1:-1]]},
        "reverse": {"views": VIEWS if plain_views else RandomViews(), **learned},
        "adp": {"width": 16, **learned},
    }
    made: nn.Module = NAMED[name].training_class(**settings.get(name, learned)).fit(classifier, inputs, labels)
    return made


class ConsistencyTraining(NetworkTraining):
    """Training of a copy of a classifier with the label consistency loss of SOAP besides its own."""

    def fit(  # type: ignore[override]
        self, classifier: nn.Module, inputs: Tensor, labels: Tensor, *, flip: bool
    ) -> nn.Module:
        """Train a copy; ``flip`` is :class:`SOAP`'s."""
        trained = copy.deepcopy(classifier).requires_grad_()
        consistency = SOAP(trained, flip=flip)

        def loss(rows: Tensor) -> Tensor:
            own = nn.functional.cross_entropy(trained(inputs[rows]), labels[rows])
            return own + consistency.loss(inputs[rows]).mean()

        self.run(trained, len(inputs), loss)
        return trained
