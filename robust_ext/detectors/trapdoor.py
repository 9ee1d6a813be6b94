"""Trapdoor: how much an input looks, inside the network, like the trigger that was planted for its class.

Shan, Wenger, Wang, Li, Zheng, Zhao, "Gotta Catch 'Em All: Using Honeypots to Catch Adversarial Attacks on Neural
Networks" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_inputs
from robust_ext.detectors._features.layers import check_name
from robust_ext.detectors.base import Detector, check_clean
from robust_ext.detectors.observation import Observation, observe
from robust_ext.detectors.training import ANY
from robust_ext.detectors.triggers import Triggers


@module_class
class TrapdoorDetector(Detector):
    """Cosine similarity to the trapdoor signature of the predicted class (Shan et al. 2020).

    It watches a network that was trained to react to triggers, see :func:`robust_ext.detectors.triggers.train_epoch`.
    A class's signature is the mean activation over inputs that carry its trigger. Attacks on such a
    network tend to find the triggers' shortcuts, and so look like the signatures. The authors set one threshold a
    class: ``detector.calibrate(clean_inputs, per_class=True)``.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> from robust_ext.detectors.triggers import make_triggers
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
        help="Share of the neurons that is compared. Below 1 they are drawn anew for each input at each call (section "
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
        """Take the signatures of all classes.

        Args:
            inputs: Clean training inputs ``(N, ...)``, floating point, of any classes.
            triggers: Those that the network was trained with.
            batch_size: Inputs in one pass.

        Returns:
            For each class, the share of the inputs that its trigger makes the network assign to it, ``(K,)``: near 1
            after a training that worked.

        Raises:
            InvalidArgumentError: There are no inputs, or not one trigger a class.
            ModelError: Activations are not finite.
        """
        inputs = check_inputs("inputs", inputs, bounds=ANY)
        check_clean(inputs, batch_size)
        found = [self._signature(inputs, triggers, label, batch_size) for label in range(len(triggers))]
        means, successes = zip(*found, strict=True)
        signatures = torch.stack(means).float()
        if not bool(torch.isfinite(signatures).all()):
            raise self.error("activations of the triggered inputs are not finite")
        self.signatures = signatures
        return torch.stack(successes)

    def score_of(self, observed: Observation) -> Tensor:
        """The cosine similarity, in [-1, 1], ``(N,)``."""
        self.check_fitted(self.signatures.numel(), on="training_inputs, triggers")
        activations = self._activations(observed)
        met = (observed.logits.shape[1], activations.shape[1])
        self.check_same(tuple(self.signatures.shape), met, "classes and activations")
        signatures = self.signatures[observed.predicted]
        if self.random:
            kept = self._drawn(*activations.shape).to(activations.device)
            activations, signatures = activations.gather(1, kept), signatures.gather(1, kept)
        return nn.functional.cosine_similarity(activations, signatures, dim=1)

    def _drawn(self, rows: int, neurons: int) -> Tensor:
        """Neurons to compare, ``(rows, kept)``; the same for a row however a data set is cut into batches."""
        kept = max(1, round(self.neurons * neurons))
        drawn = [torch.randperm(neurons)[:kept] for _ in range(rows)]
        return torch.stack(drawn) if drawn else torch.empty(0, kept, dtype=torch.int64)

    def _activations(self, observed: Observation) -> Tensor:
        return observed.units(self.layers[0], pool=self.pool)

    def _signature(self, inputs: Tensor, triggers: Triggers, label: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Mean activation under the trigger of one class, float64, and the share of inputs that are assigned to it."""
        device = module_device(self.classifier)
        total, successes = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)
        with torch.no_grad():
            for batch in torch.split(inputs, batch_size):
                triggered = triggers.inject(batch, torch.full((len(batch),), label)).to(device)
                observed = observe(self.classifier, triggered, self.layers)
                classes = observed.logits.shape[1]
                if classes != len(triggers):
                    expected = f"one a class, of which there are {classes}"
                    raise InvalidArgumentError("triggers", f"{len(triggers)} triggers", expected)
                total = total + self._activations(observed).double().sum(0)
                successes += (observed.predicted == label).sum()
        return total / len(inputs), successes / len(inputs)
