"""Training of the discriminators that IMF and AID-purifier need.

Sources: Hwang et al., "AID-Purifier: A Light Auxiliary Network for Boosting Adversarial Defense" (2021), for training
on mixtures; Qian et al., "Improving Model Robustness with Latent Distribution Locally and Globally" (2021), for a
discriminator of logits. Theirs are far larger, and Qian et al. train classifier and discriminator together; here the
classifier is given and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.bounds import check_bounds
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer, check_labels, check_number
from robust_ext.defenses.discriminator import Discriminator
from robust_ext.defenses.sign_steps import over_rows
from robust_ext.detectors.observation import observe

Examples = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From numbers of rows to training inputs ``(M, ...)`` and how clean each is, ``(M,)`` in [0, 1]."""


def fit_discriminator(
    classifier: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    layers: Sequence[str] = (),
    mixed: bool | None = None,
    gamma: float = 2.0,
    epsilon: float = 0.031,
    attack_steps: int = 10,
    attack_step_size: float = 0.004,
    epochs: int = 20,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    **sizes: int,
) -> Discriminator:
    """Train a discriminator for a classifier, which is left as it was.

    It learns from the inputs and from what PGD on the classifier's cross-entropy makes of them, all of it, successful
    or not. Trained ``mixed``, as AID-purifier's, it sees inputs anywhere on the line to an adversarial one drawn out
    ``gamma`` times, and learns which share of them is clean; else clean and adversarial inputs. Constants are those of
    AID-purifier's code for CIFAR-10, but for Adam in place of SGD, the adversarial inputs made only once, and more
    passes over fewer data.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        inputs: Clean training inputs, floating point ``(N, ...)`` in the bounds, at least 2.
        labels: Their classes, integers ``(N,)``.
        layers: Names of the layers it sees, for AID-purifier; empty for the logits, for IMF.
        mixed: See above; left out, where there are layers.
        gamma: How far mixtures go, relative to the perturbation, above 0.
        epsilon: Of the linf attack, for inputs in [0, 1], above 0; follows the width of other bounds.
        attack_steps: Of PGD from a random start, at least 1.
        attack_step_size: In the units of ``epsilon``, above 0.
        epochs: Passes over the data, at least 1.
        learning_rate: Of Adam, above 0.
        batch_size: Inputs in a step, at least 2.
        bounds: Of the inputs.
        seed: Of everything that is drawn; global generators are left alone.
        **sizes: ``width``, ``before`` and ``after`` of :class:`Discriminator`.

    Returns:
        In eval mode, on the classifier's device; its parameters ask for no gradients.

    Raises:
        InvalidArgumentError: These are no such tensors or settings, or there is no such layer.
        ModelError: The classifier is not one, or is in train mode.
        AttackError: It gives no gradients.
    """
    low, high = check_bounds(bounds)
    check_number("gamma", gamma, minimum=0, open_minimum=True)
    check_integer("epochs", epochs, minimum=1)
    check_number("learning_rate", learning_rate, minimum=0, open_minimum=True)
    check_integer("batch_size", batch_size, minimum=2)
    share = check_number("epsilon", epsilon, minimum=0, open_minimum=True)
    step = check_number("attack_step_size", attack_step_size, minimum=0, open_minimum=True)
    clean = check_inputs("inputs", inputs, bounds=(low, high)).to(module_device(classifier))
    if len(clean) < 2:
        raise InvalidArgumentError("inputs", f"{len(clean)} inputs", "at least 2 training inputs")
    classes = check_classifier(classifier, clean[:2]).shape[1]
    labels = check_labels("labels", labels, samples=len(clean), classes=classes).to(clean.device)
    # A wrong name is told before the attack.
    channels = [values.shape[1] for values in _activations(classifier, clean[:1], layers)]
    adversarial = _attacked(
        ObjectivePGD(objective="ace", steps=attack_steps, step_size=step * (high - low)),
        Target(
            module=classifier, bounds=(low, high), classes=classes, input_shape=clean.shape[1:], device=clean.device
        ),
        clean,
        labels,
        threat_model=ThreatModel(norm="linf", epsilon=share * (high - low), bounds=(low, high)),
        generator=stream(seed, "adversarial"),
        batch_size=batch_size,
    )
    if layers if mixed is None else mixed:
        vertex = (clean + gamma * (adversarial - clean)).clamp(low, high)
        examples: Examples = partial(_mixtures, clean, vertex)
    else:
        examples = partial(_both, clean, adversarial)
    with seeded_globals(derive_seed(seed, "discriminator")), torch.enable_grad():
        discriminator = Discriminator(channels, layers=layers, **sizes).to(clean.device).train()
        optimizer = torch.optim.Adam(discriminator.parameters(), lr=learning_rate)
        for _ in range(epochs):
            # No batch of one row, of which batch normalisation has no variance.
            order = torch.randperm(len(clean)).to(clean.device)
            for rows in torch.tensor_split(order, max(len(clean) // batch_size, 1)):
                x, cleanness = examples(rows)
                said = discriminator(*_activations(classifier, x, layers))
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(said, cleanness))
                optimizer.step()
    return discriminator.eval().requires_grad_(False)


def _activations(classifier: nn.Module, x: Tensor, layers: Sequence[str]) -> list[Tensor]:
    with torch.no_grad():
        seen = observe(classifier, x, layers)
    return [seen.layers[name] for name in layers] if layers else [seen.logits]


def _both(clean: Tensor, adversarial: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Clean and adversarial inputs, and which of them are clean."""
    cleanness = torch.cat([torch.ones(len(rows)), torch.zeros(len(rows))]).to(clean)
    return torch.cat([clean[rows], adversarial[rows]]), cleanness


def _mixtures(clean: Tensor, vertex: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Points between the two, and how much of each is the clean one."""
    share = torch.rand(len(rows)).to(clean)
    return torch.lerp(vertex[rows], clean[rows], over_rows(share, clean)), share


def _attacked(
    attack: ObjectivePGD,
    target: Target,
    clean: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
    batch_size: int,
) -> Tensor:
    pairs = zip(torch.split(clean, batch_size), torch.split(labels, batch_size), strict=True)
    found = [run_attack(attack, target, x, y, threat_model=threat_model, generator=generator) for x, y in pairs]
    return torch.cat(found)
