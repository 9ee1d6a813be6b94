"""KD-BU: kernel density in feature space and uncertainty under dropout.

Feinman, Curtin, Shintre, Gardner, "Detecting Adversarial Samples from Artifacts" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, SplitError, warn
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_labels
from robust_ext.detectors._features.layers import check_name, hidden_layer
from robust_ext.detectors._features.references import ReferenceDetector
from robust_ext.detectors.observation import Observation, repeatable
from robust_ext.models.features import LayerInput, split_linear

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropout_layers(network: nn.Module) -> list[nn.Module]:
    """The dropout modules of a network that drop anything; dropout within other modules or functions is not seen."""
    return [part for part in network.modules() if isinstance(part, _DROPOUTS) and part.p > 0]


@contextmanager
def dropping(network: nn.Module) -> Iterator[None]:
    """Switch dropout modules, and nothing else, to train mode, and back to what they were."""
    before = [(part, part.training) for part in dropout_layers(network)]
    try:
        for part, _ in before:
            part.training = True
        yield
    finally:
        for part, training in before:
            part.training = training


def dropout_variance(network: nn.Module, x: Tensor, *, passes: int) -> Tensor:
    """Variance of the predicted probabilities over passes with dropout, averaged over classes, ``(N,)``.

    It has gradients. Masks come from torch's global generator. Inputs ``(N, ...)`` are treated one after the other, all
    passes (at least 2) of one as a batch, so under one seed the result does not depend on how a data set is cut into
    batches. Where gradients need several inputs, each is repeated on the way back with the same masks, so that memory
    stays that of one. Without dropout modules it is exactly 0.
    """
    if not len(x) or not dropout_layers(network):
        return x.new_zeros(len(x))
    several = len(x) > 1 and torch.is_grad_enabled() and x.requires_grad
    return torch.cat([repeatable(several, _variance, network, row, passes) for row in torch.split(x, 1)])


def _variance(network: nn.Module, row: Tensor, passes: int) -> Tensor:
    # Inside, so that a pass that is repeated on the way back drops as well.
    with dropping(network):
        logits = _shared_beginning(network, row, passes)
        if logits is None:
            logits = network(row.repeat(passes, *[1] * (row.dim() - 1)))
    return logits.softmax(1).var(0, correction=0).mean()[None]


def _shared_beginning(network: nn.Module, row: Tensor, passes: int) -> Tensor | None:
    """Logits of all passes, with one pass through what lies before the first dropout, where all of them agree.

    None for networks that cannot have their batch grow on the way.
    """

    def grow(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        return (x.expand(passes, *x.shape[1:]) if len(x) == 1 else x, *args[1:])

    before = torch.get_rng_state()
    with ExitStack() as stack:
        for part in dropout_layers(network):
            stack.enter_context(part.register_forward_pre_hook(grow))
        try:
            logits: Tensor = network(row)
            if logits.dim() == 2 and len(logits) == passes:
                return logits
        except RuntimeError:
            pass
    # The masks are to be those of the passes that are made instead.
    torch.set_rng_state(before)
    return None


@module_class
class KDBUDetector(ReferenceDetector):
    """Logistic regression on a kernel density and a dropout variance (Feinman et al. 2017).

    Two features: the log density of a hidden layer under a Gaussian kernel density of training data of the predicted
    class, and the variance of the predicted probabilities over passes with dropout, averaged over classes. Both are
    standardised. The score is the regression's log-odds: above 0 where an input is likelier adversarial.

    Only dropout modules are switched on for these passes, never batch normalisation. A network without dropout modules
    has a variance of 0 for every input, so that the density decides alone; :meth:`fit` logs a warning then. Half of
    the clean rows become references where none are given.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(300))
        >>> detector = KDBUDetector(digits_network(), bandwidth=1.2)
        >>> detector.fit(clean, 1 - clean)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mnist": {"bandwidth": 1.2}, "cifar10": {"bandwidth": 0.26}}
    scaling = "standard"

    layer: str | None = setting(
        default=None,
        help="Name of the layer whose output is the hidden layer. Left out, it is what enters the last linear layer, "
        "at the cost of one more forward pass.",
        check=check_name,
    )
    bandwidth: float = setting(default=1.2, help="Bandwidth of the kernel: 1.2 for MNIST, 0.26 for CIFAR-10.", above=0)
    passes: int = setting(default=50, help="With dropout, at least 2.", minimum=2)
    chunk: int = setting(default=4096, help="References compared at once.", minimum=1)
    references: Tensor = buffer("Hidden layers of the training data, ``(R, F)``; empty until fitted.")
    reference_labels: Tensor = buffer("Their classes, int64 ``(R,)``, in increasing order.", dtype=torch.int64)

    def __post_init__(self) -> None:
        super().__post_init__()
        linear = [name for name, part in self.classifier.named_modules() if isinstance(part, nn.Linear)]
        if self.layer is None and not linear:
            raise InvalidArgumentError("layer", None, "the name of a layer, as the classifier has no nn.Linear")
        self.layers = () if self.layer is None else (self.layer,)
        self.readout = linear[-1] if self.layer is None else None
        self.random = bool(dropout_layers(self.classifier))

    @classmethod
    def training_settings(
        cls, classifier: nn.Module, clean: Tensor, constants: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The layer before the logits, unless one is given; InvalidArgumentError where it is not found."""
        if given.get("layer") is None:
            try:
                given = {**given, "layer": hidden_layer(classifier, clean[:2].to(module_device(classifier)))}
            except SplitError as error:
                expected = f"the name of the layer before the logits, as it was not found ({error})"
                raise InvalidArgumentError("layer", None, expected) from error
        return {**constants, **given}

    def take_references(self, inputs: Tensor, labels: Tensor | None, *, batch_size: int, seed: int) -> None:
        """Keep the hidden layers of the references, by class."""
        if not self.random:
            warn(
                "detector KDBUDetector: the classifier has no dropout modules, so that its uncertainty is 0 for every "
                "input; the kernel density decides alone"
            )
        if self.readout is not None:
            split_linear(self.classifier, inputs[:2].to(module_device(self.classifier)), layer=self.readout)
        passes = self.over_batches(inputs, lambda one: (self._hidden(one), one.predicted, one.logits), batch_size)
        hidden, found = (torch.cat([each[part] for each in passes]) for part in (0, 1))
        classes = passes[0][2].shape[1]
        if labels is not None:
            found = check_labels("labels", labels, samples=len(found), classes=classes).to(found.device)
        counts = torch.bincount(found, minlength=classes)
        if not bool(counts.all()):
            empty = ", ".join(map(str, (counts == 0).nonzero().flatten().tolist()))
            raise DataError(f"references: none of class {empty}; give more clean inputs, of every class")
        self.reference_labels, order = found.sort(stable=True)
        self.references = hidden[order]

    def features_of(self, observed: Observation) -> Tensor:
        """Log density and dropout variance of a forward pass, ``(N, 2)``, with gradients; further passes are made."""
        variance = dropout_variance(self.classifier, observed.inputs, passes=self.passes)
        return torch.stack([self.density_of(observed), variance], 1)

    def density_of(self, observed: Observation) -> Tensor:
        """Log density of the hidden layer among references of the predicted class, ``(N,)``, with gradients."""
        self.check_fitted(self.references.numel())
        hidden = self._hidden(observed)
        groups = torch.split(self.references, torch.bincount(self.reference_labels).tolist())
        sizes = (self.references.shape[1], len(groups))
        self.check_same(sizes, (hidden.shape[1], observed.logits.shape[1]), "units and classes")
        predicted = observed.predicted
        densities = hidden.new_zeros(len(hidden))
        for label in sorted(set(predicted.tolist())):
            rows = (predicted == label).nonzero().squeeze(1)
            found = log_density(hidden[rows], groups[label], bandwidth=self.bandwidth, chunk=self.chunk)
            densities = densities.index_put((rows,), found)
        return densities

    def _hidden(self, observed: Observation) -> Tensor:
        if self.readout is None:
            return observed.units(self.layers[0], pool=False)
        hidden: Tensor = LayerInput(self.classifier, self.readout)(observed.inputs)
        return hidden.flatten(1)


def log_density(points: Tensor, references: Tensor, *, bandwidth: float, chunk: int = 4096) -> Tensor:
    """Logarithm of the Gaussian kernel density at points ``(N, F)``, ``(N,)``, with gradients for the points.

    It is the mean over references r, ``(R, F)``, of the normal density at the point with mean r and covariance
    ``bandwidth^2 I``. Distances are taken directly, not through inner products, which would cancel at small bandwidths;
    memory is N x chunk, on the way back too.
    """
    parts = torch.split(references, chunk)
    several = len(parts) > 1 and torch.is_grad_enabled() and points.requires_grad
    sums = [repeatable(several, _log_kernels, points, part, bandwidth) for part in parts]
    constant = math.log(len(references)) + references.shape[1] / 2 * math.log(2 * math.pi * bandwidth**2)
    return _log_sum_exp(torch.stack(sums, 1)) - constant


def _log_kernels(points: Tensor, references: Tensor, bandwidth: float) -> Tensor:
    distances = torch.cdist(points, references, compute_mode="donot_use_mm_for_euclid_dist")
    return _log_sum_exp(-(distances / bandwidth).square() / 2)


def _log_sum_exp(values: Tensor) -> Tensor:
    """Over dimension 1; torch's own divides on the way back by what may have been rounded off, far from 0."""
    largest = values.detach().amax(1, keepdim=True)
    return (values - largest).exp().sum(1).log() + largest.squeeze(1)
