"""The small network that IMF and AID-purifier query for how clean an input is, and its training.

Sources: Hwang et al., "AID-Purifier: A Light Auxiliary Network for Boosting Adversarial Defense" (2021), for training
on mixtures; Qian et al., "Improving Model Robustness with Latent Distribution Locally and Globally" (2021), for a
discriminator of logits. Theirs are far larger, and Qian et al. train classifier and discriminator together; here the
classifier is given and stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_integer, check_labels
from robust_ext.defenses._common import over_rows
from robust_ext.defenses.training.loop import NetworkTraining, TrainedPart, check_rows
from robust_ext.detectors.observation import observe


class Discriminator(TrainedPart):
    """Separates the activations of clean inputs from those of adversarial ones.

    Each activation is averaged over all places, goes through an encoder of its own, and all meet in layers of half the
    width each (Hwang et al. 2021, with their depths). The defaults of the widths are smaller than the authors' 1024.

    Args:
        channels: Of each activation, at least one.
        layers: Names of the layers of a classifier that make them; empty for its logits.
        width: Of the encoders.
        before: How many layers an encoder has after its first one.
        after: How many layers follow the encoders.

    Example:
        >>> discriminator = Discriminator([4, 10])
        >>> discriminator(torch.rand(3, 4, 8, 8), torch.rand(3, 10)).shape
        torch.Size([3])
    """

    def __init__(
        self, channels: Sequence[int], *, layers: Sequence[str] = (), width: int = 64, before: int = 1, after: int = 3
    ) -> None:
        super().__init__()
        self.channels = tuple(check_integer("channels", count, minimum=1) for count in channels)
        self.layers = tuple(layers)
        if not self.channels or isinstance(layers, str) or len(self.layers) not in (0, len(self.channels)):
            expected = "at least one number, and one for each of the layers"
            raise InvalidArgumentError("channels", f"{channels} with layers {layers}", expected)
        for name, value, minimum in (("width", width, 1), ("before", before, 0), ("after", after, 0)):
            check_integer(name, value, minimum=minimum)
        self.encoders = nn.ModuleList(
            nn.Sequential(_block(count, width), *(_block(width, width) for _ in range(before)))
            for count in self.channels
        )
        sizes = [max(width * len(self.channels) // 2**number, 1) for number in range(after + 1)]
        self.common = nn.Sequential(*map(_block, sizes, sizes[1:]))
        self.readout = nn.Linear(sizes[-1], 1)
        sizes_of = {"width": width, "before": before, "after": after}
        self.settings = {"channels": list(self.channels), "layers": list(self.layers), **sizes_of}
        self.eval()

    def forward(self, *activations: Tensor) -> Tensor:
        """Return the logit ``(N,)`` of being clean, from the inputs' activations ``(N, channels, ...)`` in order."""
        shapes = [tuple(values.shape) for values in activations]
        if [shape[1:2] for shape in shapes] != [(count,) for count in self.channels]:
            raise ModelError(f"discriminator: got activations {shapes}, expected (N, channels, ...) of {self.channels}")
        pooled = [values.flatten(2).mean(2) if values.dim() > 2 else values for values in activations]
        encoded = [encoder(values) for encoder, values in zip(self.encoders, pooled, strict=True)]
        out: Tensor = self.readout(self.common(torch.cat(encoded, 1)))
        return out.squeeze(1)


@settings_class
class DiscriminatorTraining(NetworkTraining):
    """Training of a :class:`Discriminator`.

    It learns from the inputs and from what PGD on the classifier's cross-entropy makes of them, all of it, successful
    or not. Trained ``mixed``, as AID-purifier's, it sees inputs anywhere on the line to an adversarial one drawn out
    ``gamma`` times, and learns which share of them is clean; else clean and adversarial inputs. Constants are those of
    AID-purifier's code for CIFAR-10, but for Adam in place of SGD, the adversarial inputs made only once, and more
    passes over fewer data.
    """

    layers: tuple[str, ...] = setting(
        default=(), help="Names of the layers it sees, for AID-purifier; empty for the logits, for IMF."
    )
    mixed: bool | None = setting(default=None, help="See above; when left out, where there are layers.")
    gamma: float = setting(default=2.0, help="How far mixtures go, relative to the perturbation, above 0.", above=0)
    epsilon: float = setting(
        default=0.031,
        help="Budget of the linf attack, for inputs in [0, 1]; follows the width of other bounds.",
        above=0,
    )
    attack_steps: int = setting(default=10, help="Steps of PGD from a random start.", minimum=1)
    attack_step_size: float = setting(default=0.004, help="In the units of ``epsilon``, above 0.", above=0)
    width: int = setting(default=64, help="See :class:`Discriminator`.", minimum=1)
    before: int = setting(default=1, help="Likewise.", minimum=0)
    after: int = setting(default=3, help="Likewise.", minimum=0)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> Discriminator:
        """Train; see :meth:`Training.fit`. Raises AttackError for a classifier without gradients."""
        clean = self.checked(classifier, inputs)
        # All that is wrong is refused before the attack.
        check_rows(len(clean))
        classes = check_classifier(classifier, clean[:2]).shape[1]
        labels = check_labels("labels", labels, samples=len(clean), classes=classes).to(clean.device)
        channels = [values.shape[1] for values in _activations(classifier, clean[:1], self.layers)]
        adversarial = self._attacked(classifier, clean, labels, classes)
        mixed = bool(self.layers) if self.mixed is None else self.mixed
        other = (clean + self.gamma * (adversarial - clean)).clamp(*self.bounds) if mixed else adversarial

        def loss(rows: Tensor) -> Tensor:
            if mixed:
                cleanness = torch.rand(len(rows)).to(clean)
                x = torch.lerp(other[rows], clean[rows], over_rows(cleanness, clean[rows]))
            else:
                cleanness = torch.cat([torch.ones(len(rows)), torch.zeros(len(rows))]).to(clean)
                x = torch.cat([clean[rows], other[rows]])
            found = discriminator(*_activations(classifier, x, self.layers))
            return nn.functional.binary_cross_entropy_with_logits(found, cleanness)

        with seeded_globals(derive_seed(self.seed, "discriminator")):
            sizes = {"width": self.width, "before": self.before, "after": self.after}
            discriminator = Discriminator(channels, layers=self.layers, **sizes).to(clean.device)
            # Its order and mixtures go on from where its weights were drawn.
            self.run(discriminator, len(clean), loss, seeded=False)
        return discriminator.requires_grad_(False)

    def _attacked(self, classifier: nn.Module, clean: Tensor, labels: Tensor, classes: int) -> Tensor:
        width = self.bounds[1] - self.bounds[0]
        attack = ObjectivePGD(objective="ace", steps=self.attack_steps, step_size=self.attack_step_size * width)
        given: dict[str, Any] = {"bounds": self.bounds, "input_shape": clean.shape[1:], "device": clean.device}
        target = Target(module=classifier, classes=classes, **given)
        generator = stream(self.seed, "adversarial")
        ball = ThreatModel(norm="linf", epsilon=self.epsilon * width, bounds=self.bounds)
        pairs = zip(torch.split(clean, self.batch_size), torch.split(labels, self.batch_size), strict=True)
        found = [run_attack(attack, target, *pair, threat_model=ball, generator=generator) for pair in pairs]
        return torch.cat(found)


def _activations(classifier: nn.Module, x: Tensor, layers: Sequence[str]) -> list[Tensor]:
    with torch.no_grad():
        seen = observe(classifier, x, layers)
    return [seen.layers[name] for name in layers] if layers else [seen.logits]


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())
