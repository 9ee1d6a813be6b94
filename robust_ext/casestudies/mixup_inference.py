"""Mixup inference (Pang et al. 2020): predictions are averaged over mixes of the input with images of other classes.

Its authors attacked the network beneath, as if nothing were mixed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.measuring import accuracy, attacked, loss_gradients
from robust_ext.casestudies.mixing import BareFeatures, MeanSoftmax, MixedFeatures
from robust_ext.casestudies.networks import normalised_features
from robust_ext.casestudies.recipes import ThroughOtherLogits
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network
from robust_ext.models.eot import EoT

# The input's weight in a mix, as published, and how many mixes there are, of which the paper averages 15.
_WEIGHT, _MIXES = 0.6, 5
# Images of each class that are kept to be mixed in.
_POOL = 20
# Draws that robust accuracy is judged by.
_DRAWS = 20
# How much more accuracy mixing shows under the weak recipe than the bare network, from which the mechanism is present.
_HIDDEN = 0.1


@settings_class
class WithoutMixing(ThroughOtherLogits):
    """Any attack on a target that mixes, run on the network beneath, as if nothing were mixed in.

    Example:
        >>> WithoutMixing(attack=ObjectivePGD(steps=50)).name
        'PGD-ACE without the mixing'
    """

    @property
    def words(self) -> str:
        """See the base."""
        return "without the mixing"

    def other(self, part: nn.Module) -> nn.Module | None:
        """See the base."""
        return BareFeatures(part.features) if isinstance(part, MixedFeatures) else None

    def _exchanged(self, module: nn.Module) -> nn.Module | None:
        made = super()._exchanged(module)
        if made is not None:
            # What is adversarial to the network alone is none of the target's adversarial points.
            vars(made)["_forward_hooks"] = OrderedDict()
        return made


class MixupInference(CaseStudy):
    """A small network with batch normalisation, trained on mixes, and a mean over 5 mixes instead of 15.

    The model is random, and robust accuracy is judged by the mean softmax over 20 fixed draws of it; attacks meet
    fresh draws at each query. In the binarization test the images that are mixed in are fixed for each predicted
    class, chosen once among those of other classes, so that a planted point stays what it is; attacks still have to
    follow the gradient through the mixing.
    """

    title = "Mixup inference"
    source = "Pang, Xu and Zhu, Mixup Inference: Better Exploiting Mixup to Defend Adversarial Attacks (2020)"
    epsilons = {"digits": 0.2, "mnist": 0.2, "cifar10": 8 / 255}  # noqa: RUF012
    published = Published(
        weak_score="< .95",
        right_score="< .95",
        source="Zimmermann et al. 2022, figure 2; their improved recipe does not reach .95",
    )
    causes = ("transfer_wins", "falls_behind")
    settings = {"readout": "mixing"}  # noqa: RUF012
    notes = (
        "The paper's test trains its readout on mixes with test images and uses it on mixes with inner and boundary "
        "points of the sample itself, mixes in a single channel of its partners, accepts imperfect readouts, and does "
        "not look at the clean sample; so neither score says much. With one pool and all channels, and with clean, "
        "inner and planted points on their sides, the authors' attack fails and one through the mixing passes."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        features, last = normalised_features(shape), nn.Linear(64, classes)
        pool = torch.zeros(classes, _POOL, *shape)
        return nn.Sequential(MixedFeatures(features, last, pool, mixes=_MIXES, weight=_WEIGHT), MeanSoftmax(last))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """Mixup of images, half of them moved by a step of FGSM (in the paper by PGD)."""
        mixing = _mixing(module)
        network = nn.Sequential(mixing.features, mixing.last)
        for label, images in enumerate(mixing.pool):
            own = inputs[labels == label]
            images.copy_(own[torch.arange(len(images)) % len(own)])
        targets = nn.functional.one_hot(labels, len(mixing.pool)).to(inputs)
        epsilon = self.epsilons["cifar10" if inputs.shape[1] == 3 else "digits"]

        def loss(index: Tensor) -> Tensor:
            x, y = inputs[index], targets[index]
            half = x[: len(x) // 2]
            low, high = (half - epsilon).clamp_min(0), (half + epsilon).clamp_max(1)
            moved = (low + (high - low) * torch.rand_like(half)).requires_grad_(True)
            value = nn.functional.cross_entropy(network(moved), y[: len(half)])
            (gradient,) = torch.autograd.grad(value, moved)
            moved = (moved.detach() + 1.25 * epsilon * gradient.sign()).clamp(low, high)
            x = torch.cat([moved, x[len(half) :]])
            # The distribution Beta(1, 1) of the paper is the uniform one.
            order, weight = torch.randperm(len(x)), torch.rand(len(x), 1)
            wide = weight[:, :, None, None]
            mixed = wide * x + (1 - wide) * x[order]
            return nn.functional.cross_entropy(network(mixed), weight * y + (1 - weight) * y[order])

        train_network(network, len(inputs), loss, epochs=max(12, 50_000 // len(inputs)), seed=seed)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """See :meth:`CaseStudy.measure`."""
        bare = nn.Sequential(BareFeatures(_mixing(module).features), module.get_submodule("1"))
        points = attacked(module, WithoutMixing(attack=_WEAK), inputs, labels, threat_model, seed=seed)
        with seeded_globals(derive_seed(seed, self.title, "mechanism")):
            first, second = (loss_gradients(module, inputs, labels) for _ in range(2))
            with torch.no_grad():
                agree = float((module(inputs).argmax(1) == module(inputs).argmax(1)).double().mean())
                mixed, alone = (accuracy(one, points, labels) for one in (module, bare))
        between = nn.functional.cosine_similarity(first, loss_gradients(bare, inputs, labels)).mean()
        return Measurement(
            values={
                "accuracy of the bare network under the authors' recipe": alone,
                "accuracy with mixing": mixed,
                "labels that agree over two calls": agree,
                "cosine of gradients of two calls": float(nn.functional.cosine_similarity(first, second).mean()),
                "cosine of gradients with mixing and without": float(between),
            },
            present=mixed - alone >= _HIDDEN and agree < 1,
            words="Under the authors' recipe accuracy with mixing is higher than that of the bare network by .1 or "
            "more, and labels differ from call to call.",
        )

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """See :meth:`CaseStudy.weak`."""
        return Recipe(
            attack=WithoutMixing(attack=_WEAK),
            words="PGD on cross-entropy, 50 steps of epsilon / 8, on the network alone, the mixing ignored.",
        )

    def right(self, threat_model: ThreatModel) -> Recipe:
        """See :meth:`CaseStudy.right`."""
        return Recipe(
            attack="robust_ext:APGD(steps=200, restarts=5, loss='margin')",
            words="APGD on the difference of logits through the mixing, 200 steps from each of five starts; every "
            "query is a mean over fresh mixes.",
        )

    def parts(self, module: nn.Module) -> object:
        """Features of mixes with images that are fixed for each class, and the mean softmax."""
        return _mixing(module).fixed(0), module.get_submodule("1")

    def judged(self, module: nn.Module, *, seed: int) -> nn.Module:
        """The mean softmax over fixed draws, 20 calls with 5 mixes each."""
        return EoT(module, draws=_DRAWS, loss="softmax", gradient="softmax", seed=seed, fixed=True)


_WEAK = ObjectivePGD(steps=50, rel_step_size=1 / 8)


def _mixing(module: nn.Module) -> MixedFeatures:
    found = module.get_submodule("0")
    assert isinstance(found, MixedFeatures)
    return found
