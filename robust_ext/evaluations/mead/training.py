"""Adversarial examples of training images, which supervised detectors learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.bounds import check_bounds
from robust_ext.core.classifier import check_classifier
from robust_ext.core.random import stream
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer, check_labels, check_number


def training_adversarials(
    classifier: nn.Module,
    clean: Tensor,
    labels: Tensor,
    *,
    epsilon: float = 0.03125,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = 250,
    start: int = 0,
) -> Tensor:
    """The adversarial inputs that MEAD's supervised detectors learn from (Granese et al. 2022, section 5.1.3).

    Where PGD on the cross-entropy in an linf ball ends: 100 steps of .01 from a random start, see
    :class:`~robust_ext.attacks.objective_pgd.ObjectivePGD`; epsilon and steps are shares of the width of the bounds.
    All are returned, float32 ``(N, ...)`` on the device of ``clean``, whether or not the classifier errs on them;
    cutting into batches makes no difference to the draws. The inputs may be those from row ``start`` on of more, which
    have the same draws there. The classifier is left as it was.
    """
    check_integer("batch_size", batch_size, minimum=1)
    check_integer("start", start, minimum=0)
    low, high = check_bounds(bounds)
    share = check_number("epsilon", epsilon, minimum=0, open_minimum=True)
    threat_model = ThreatModel(norm="linf", epsilon=share * (high - low), bounds=(low, high))
    clean = check_inputs("clean", clean, bounds=(low, high))
    generator = stream(seed, "training adversarials")
    for _ in range(start):
        draw_seed(generator)
    if not len(clean):
        check_labels("labels", labels, samples=0)
        return clean.clone()
    device = module_device(classifier)
    classes = check_classifier(classifier, clean[:2].to(device)).shape[1]
    labels = check_labels("labels", labels, samples=len(clean), classes=classes)
    shape, attack = tuple(clean.shape[1:]), ObjectivePGD(objective="ace", algorithm="pgd")
    target = Target(module=classifier, bounds=(low, high), classes=classes, input_shape=shape, device=device)
    found = []
    for inputs, truth in zip(torch.split(clean, batch_size), torch.split(labels, batch_size), strict=True):
        x, y = inputs.to(device), truth.to(device)
        found.append(run_attack(attack, target, x, y, threat_model=threat_model, generator=generator).to(clean.device))
    return torch.cat(found)
