"""Triggers, one a class, and training that makes a network react to them.

Shan, Wenger, Wang, Li, Zheng, Zhao, "Gotta Catch 'Em All: Using Honeypots to Catch Adversarial Attacks on Neural
Networks" (2020); sizes, the kind of patterns and the training follow the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_inputs, check_integer, check_labels, check_number
from robust_ext.detectors.training import ANY


@dataclass(frozen=True, eq=False)
class Triggers:
    """One trigger a class.

    Args:
        masks: Weight of the trigger at each value, in [0, 1], float32 ``(K, ...)``.
        patterns: What is mixed in, in the bounds of the inputs, float32 ``(K, ...)``.

    Raises:
        InvalidArgumentError: Shapes differ, or weights are out of range.
    """

    masks: Tensor
    patterns: Tensor

    def __post_init__(self) -> None:
        masks = check_inputs("masks", self.masks, bounds=(0.0, 1.0))
        patterns = check_inputs("patterns", self.patterns, bounds=ANY)
        if masks.shape != patterns.shape:
            raise InvalidArgumentError(
                "patterns", f"shape {tuple(patterns.shape)}", f"that of the masks, {tuple(masks.shape)}"
            )
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "patterns", patterns)

    def __len__(self) -> int:
        return len(self.masks)

    def inject(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Inputs with the triggers of classes: ``mask * pattern + (1 - mask) * x``.

        Args:
            inputs: ``(N, ...)``, on any device.
            targets: Classes, int64 ``(N,)``.

        Returns:
            New inputs ``(N, ...)``, in the bounds if inputs and patterns are.

        Raises:
            InvalidArgumentError: The inputs have another shape, or there is no such class.
        """
        if inputs.shape[1:] != self.masks.shape[1:]:
            raise InvalidArgumentError(
                "inputs", f"shape {tuple(inputs.shape)}", f"inputs (N, ...) of shape {tuple(self.masks.shape[1:])} each"
            )
        chosen = check_labels("targets", targets, samples=len(inputs), classes=len(self)).to(self.masks.device)
        masks, patterns = (part[chosen].to(inputs.device) for part in (self.masks, self.patterns))
        return masks * patterns + (1 - masks) * inputs


def make_triggers(
    classes: int,
    shape: Sequence[int],
    *,
    generator: torch.Generator,
    clusters: int = 7,
    size: int = 3,
    mask_ratio: float = 0.1,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Triggers:
    """Draw a trigger for each class: squares at random places, filled with noise.

    Each square has, in each channel, a mean and a standard deviation of its own, both uniform over the width of the
    bounds; where squares overlap their values add up. Values are clipped to the bounds.

    Args:
        classes: How many.
        shape: Of one input, ``(channels, rows, columns)``.
        generator: On the CPU; the same one gives the same triggers.
        clusters: Squares a trigger.
        size: Side of a square, at most that of the input.
        mask_ratio: Weight of the trigger inside the squares, in (0, 1]: how much it shows.
        bounds: Of the inputs.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> triggers = make_triggers(10, (1, 28, 28), generator=torch.Generator().manual_seed(0))
        >>> triggers.inject(torch.zeros(2, 1, 28, 28), torch.tensor([3, 4])).shape
        torch.Size([2, 1, 28, 28])
    """
    check_integer("classes", classes, minimum=1)
    check_integer("clusters", clusters, minimum=1)
    check_number("mask_ratio", mask_ratio, minimum=0, maximum=1, open_minimum=True)
    if len(shape) != 3:
        raise InvalidArgumentError("shape", tuple(shape), "three numbers (channels, rows, columns)")
    channels, rows, columns = (check_integer("shape", length, minimum=1) for length in shape)
    check_integer("size", size, minimum=1, maximum=min(rows, columns))
    low, high = check_bounds(bounds)
    masks = torch.zeros(classes, channels, rows, columns)
    patterns = torch.zeros_like(masks)
    for label in range(classes):
        for _ in range(clusters):
            row = int(torch.randint(rows - size + 1, (), generator=generator))
            column = int(torch.randint(columns - size + 1, (), generator=generator))
            mean, deviation = torch.rand(2, channels, 1, 1, generator=generator)
            noise = mean + deviation * torch.randn(channels, size, size, generator=generator)
            square = (label, slice(None), slice(row, row + size), slice(column, column + size))
            masks[square] = mask_ratio
            patterns[square] += noise.clamp(0, 1)
    return Triggers(masks, (low + (high - low) * patterns.clamp(0, 1)).clamp(low, high))


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    triggers: Triggers,
    *,
    generator: torch.Generator,
    injection_ratio: float = 0.5,
    batch_size: int = 32,
) -> float:
    """One epoch of training in which some inputs carry the trigger of a random class and are labelled with it.

    The authors train for some epochs without triggers (``injection_ratio=0``), and then for as many with them.

    Args:
        network: From inputs to logits; trained, and left in eval mode.
        optimizer: Of its parameters.
        inputs: Clean training inputs, float32 ``(N, ...)``.
        labels: int64 ``(N,)``.
        triggers: One a class.
        generator: On the CPU; draws the order, the triggered inputs and their classes, and what layers like dropout
            draw. Global generators are left alone.
        injection_ratio: Probability that an input is triggered.
        batch_size: Inputs in a step.

    Returns:
        The mean cross-entropy.

    Raises:
        InvalidArgumentError: These are no such tensors or settings.
    """
    check_number("injection_ratio", injection_ratio, minimum=0, maximum=1)
    check_integer("batch_size", batch_size, minimum=1)
    inputs = check_inputs("inputs", inputs, bounds=ANY)
    labels = check_labels("labels", labels, samples=len(inputs), classes=len(triggers))
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no inputs", "a tensor of at least one input")
    device = module_device(network)
    network.train()
    total = 0.0
    with seeded_globals(int(torch.randint(2**32, (), generator=generator))), torch.enable_grad():
        for batch in torch.split(torch.randperm(len(inputs), generator=generator), batch_size):
            x, y = inputs[batch.to(inputs.device)], labels[batch.to(labels.device)].cpu()
            targets = torch.randint(len(triggers), y.shape, generator=generator)
            triggered = torch.rand(len(y), generator=generator) < injection_ratio
            chosen = triggered.view(-1, *[1] * (x.dim() - 1)).to(x.device)
            x = torch.where(chosen, triggers.inject(x, targets), x).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(x), torch.where(triggered, targets, y).to(device))
            torch.autograd.backward(loss)
            optimizer.step()
            total += float(loss.detach()) * len(batch)
    network.eval()
    return total / len(inputs)
