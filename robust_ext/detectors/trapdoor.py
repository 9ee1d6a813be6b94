"""Trapdoor: how much an input looks, inside the network, like the trigger that was planted for its class.

Shan, Wenger, Wang, Li, Zheng, Zhao, "Gotta Catch 'Em All: Using Honeypots to Catch Adversarial Attacks on Neural
Networks" (2020); sizes, the kind of patterns and the training follow the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_inputs, check_integer, check_labels, check_number
from robust_ext.detectors._features.layers import check_name
from robust_ext.detectors.base import Detector, check_clean
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import ANY, train_pass


@dataclass(frozen=True, eq=False)
class Triggers:
    """One trigger a class: weights and patterns of the same shape.

    Args:
        masks: Weight of the trigger at each value, in [0, 1], float32 ``(K, ...)``.
        patterns: Patterns that are mixed in, in the bounds of the inputs, float32 ``(K, ...)``.
    """

    masks: Tensor
    patterns: Tensor

    def __post_init__(self) -> None:
        masks = check_inputs("masks", self.masks, bounds=(0.0, 1.0))
        patterns = check_inputs("patterns", self.patterns, bounds=ANY)
        if masks.shape != patterns.shape:
            expected = f"that of the masks, {tuple(masks.shape)}"
            raise InvalidArgumentError("patterns", f"shape {tuple(patterns.shape)}", expected)
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "patterns", patterns)

    def __len__(self) -> int:
        return len(self.masks)

    def inject(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """New inputs ``(N, ...)`` with the triggers of classes, int64 ``(N,)``: ``mask * pattern + (1 - mask) * x``."""
        if inputs.shape[1:] != self.masks.shape[1:]:
            expected = f"inputs (N, ...) of shape {tuple(self.masks.shape[1:])} each"
            raise InvalidArgumentError("inputs", f"shape {tuple(inputs.shape)}", expected)
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
        generator: On the CPU, of everything that is drawn, in layers like dropout too; global ones are left alone.
        injection_ratio: Probability that an input is triggered.
        batch_size: Inputs in a step.

    Returns:
        The mean cross-entropy.
    """
    check_number("injection_ratio", injection_ratio, minimum=0, maximum=1)
    check_integer("batch_size", batch_size, minimum=1)
    inputs = check_inputs("inputs", inputs, bounds=ANY)
    labels = check_labels("labels", labels, samples=len(inputs), classes=len(triggers))
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no inputs", "a tensor of at least one input")
    device = module_device(network)

    def loss(batch: Tensor) -> tuple[Tensor, Tensor]:
        x, y = inputs[batch.to(inputs.device)], labels[batch.to(labels.device)].cpu()
        targets = torch.randint(len(triggers), y.shape, generator=generator)
        triggered = torch.rand(len(y), generator=generator) < injection_ratio
        chosen = triggered.view(-1, *[1] * (x.dim() - 1)).to(x.device)
        x = torch.where(chosen, triggers.inject(x, targets), x).to(device)
        found = nn.functional.cross_entropy(network(x), torch.where(triggered, targets, y).to(device))
        return found, found

    network.train()
    with seeded_globals(int(torch.randint(2**32, (), generator=generator))), torch.enable_grad():
        mean = train_pass(optimizer, torch.split(torch.randperm(len(inputs), generator=generator), batch_size), loss)
    network.eval()
    return mean


@module_class
class TrapdoorDetector(Detector):
    """Cosine similarity to the trapdoor signature of the predicted class (Shan et al. 2020).

    It watches a network that was trained to react to triggers, see :func:`robust_ext.detectors.trapdoor.train_epoch`.
    A class's signature is the mean activation over inputs that carry its trigger. Attacks on such a
    network tend to find the triggers' shortcuts, and so look like the signatures. The authors set one threshold a
    class: ``detector.calibrate(clean_inputs, per_class=True)``.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> from robust_ext.detectors.trapdoor import make_triggers
        >>> inputs, _ = load_dataset("digits", split="train").take(range(100))
        >>> triggers = make_triggers(10, (1, 8, 8), generator=torch.Generator().manual_seed(0))
        >>> detector = TrapdoorDetector(digits_network(), layer="6")
        >>> detector.fit(inputs, triggers).shape
        torch.Size([10])
        >>> detector.score(inputs[:4]).shape
        torch.Size([4])
    """

    layer: str = setting(
        help="Name of the layer whose output is compared, as in ``classifier.named_modules()``: the activation before "
        "the last linear layer.",
        check=check_name,
    )
    pool: bool = setting(
        default=False,
        help="Whether the output is averaged over positions first: for networks that do so between that layer and the "
        "last.",
    )
    neurons: float = setting(
        default=1.0,
        help="Share of the neurons that is compared. Below 1 they are drawn again for each input at each call (section "
        "7.2, where 0.1 is used in the authors' code), and the detector is random.",
        above=0,
        maximum=1,
    )
    signatures: Tensor = buffer("One a class, ``(K, F)``; empty until fitted.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = (self.layer,)
        self.random = self.neurons < 1

    def fit(self, inputs: Tensor, triggers: Triggers, *, batch_size: int = 256) -> Tensor:
        """Take the signatures of all classes, from clean inputs and the triggers that the network was trained with.

        See :class:`Detector`. Returns for each class the share of the inputs that its trigger makes the network assign
        to it, ``(K,)``: near 1 after a training that worked.
        """
        inputs = check_inputs("inputs", inputs, bounds=ANY)
        check_clean(inputs, batch_size)
        means, shares = [], []

        def seen(one: Observation) -> tuple[Tensor, Tensor]:
            classes = one.logits.shape[1]
            if classes != len(triggers):
                expected = f"one a class, of which there are {classes}"
                raise InvalidArgumentError("triggers", f"{len(triggers)} triggers", expected)
            return one.units(self.layers[0], pool=self.pool).double().sum(0), one.predicted

        for label in range(len(triggers)):
            triggered = triggers.inject(inputs, torch.full((len(inputs),), label))
            sums, predicted = zip(*self.over_batches(triggered, seen, batch_size), strict=True)
            means.append(torch.stack(sums).sum(0) / len(inputs))
            shares.append((torch.cat(predicted) == label).float().mean())
        signatures = torch.stack(means).float()
        if not bool(torch.isfinite(signatures).all()):
            raise self.error("activations of the triggered inputs are not finite")
        self.signatures = signatures
        return torch.stack(shares)

    def score_of(self, observed: Observation) -> Tensor:
        """The cosine similarity, in [-1, 1], ``(N,)``."""
        self.check_fitted(self.signatures.numel(), on="training_inputs, triggers")
        activations = observed.units(self.layers[0], pool=self.pool)
        met = (observed.logits.shape[1], activations.shape[1])
        self.check_same(tuple(self.signatures.shape), met, "classes and activations")
        signatures = self.signatures[observed.predicted]
        if self.random:
            # The same for a row however a data set is cut into batches.
            rows, neurons = activations.shape
            count = max(1, round(self.neurons * neurons))
            drawn = [torch.randperm(neurons)[:count] for _ in range(rows)] or [torch.empty(0, dtype=torch.int64)]
            kept = torch.cat(drawn).view(rows, count).to(activations.device)
            activations, signatures = activations.gather(1, kept), signatures.gather(1, kept)
        return nn.functional.cosine_similarity(activations, signatures, dim=1)
