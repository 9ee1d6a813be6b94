"""Any classifier in two halves: by its last linear layer, by the operations behind its features, or at the logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.devices import tolerance_of
from robust_ext.core.errors import RobustExtError, SplitError, warn
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.models.bpda import BPDA
from robust_ext.models.features.linear import TOLERANCE, LastColumns, Split, as_parts, check_features, split_linear
from robust_ext.models.features.observed import INSIDE, LayerInput, Observed, layer_names
from robust_ext.models.features.recording import Place, Recording, head_places, layer_places
from robust_ext.models.features.tail import Tail

logger = logging.getLogger(__name__)

# Of a map with positions, more numbers than this are averaged over the positions: hundreds of points are kept a sample.
LARGEST_MAP = 4096


class _NoGradientError(SplitError):
    """Nothing comes back from the features."""


def split(
    model: nn.Module | tuple[Any, Any], inputs: Tensor, *, layer: str | None = None, tolerance: float = TOLERANCE
) -> Split:
    """Split a classifier, or take a pair ``(features, readout)``, verified on a few ``inputs``, float32 ``(n, ...)``.

    The logits' inputs are found: what enters the linear layer that makes the logits, or the last operations with
    weights (several heads, a convolution, a product, distances), whose followers are run again as the readout; they
    are flattened, or averaged over positions where the logits read no more of them, or where they are more than
    ``LARGEST_MAP`` numbers; then the logits are features too. Where nothing is found, or no gradient comes back from it
    while one does from the logits, the logits are the features. They are found through a BPDA of layers or operations.

    Args:
        model: A classifier in eval mode, or a pair, whose features may be of any shape ``(n, *F)``.
        inputs: On the model's device.
        layer: Name of a layer, as in ``model.named_modules()``, whose input is taken instead; with commas several.
        tolerance: Of the parts' logits from the model's, relative to the largest; more in lower precision.

    Raises:
        SplitError: The logits do not follow from the layer, or a pair's features are no rows.
    """
    pair = as_parts(model)
    if pair is not None:
        whole = nn.Sequential(*pair)
        whole.training = any(part.training for part in pair)
        check_classifier(whole, inputs)
        return Split(*pair, shape=tuple(check_features(pair[0], inputs).shape[1:]), kind="pair")
    network: Any = model
    if isinstance(network, BPDA) and network.through is not None:
        named = None if layer is None else ",".join(name.removeprefix(INSIDE) for name in layer_names(layer))
        parts = split(network.through, inputs, layer=named, tolerance=tolerance)
        inside = parts.features
        return replace(parts, features=inside.seen_through(network) if isinstance(inside, Observed) else network)
    try:
        return _with_gradient(split_linear(network, inputs, layer=layer, tolerance=tolerance), network, inputs)
    except SplitError as error:
        if layer is not None and isinstance(error, _NoGradientError):
            raise
        logger.debug("not one linear layer: %s", error)
    with seeded_globals(0):
        logits = check_classifier(network, inputs)
    try:
        with _explained():
            return _with_gradient(_replayed(network, inputs, logits, layer, tolerance), network, inputs)
    except SplitError as error:
        if layer is not None:
            raise
        warn(
            f"model: the {logits.shape[1]} logits themselves are its features ({error}); name a layer, or give a pair "
            "(features, readout), for more"
        )
    return Split(network, nn.Identity().eval(), shape=tuple(logits.shape[1:]), kind="logits")


@contextmanager
def _explained() -> Iterator[None]:
    """Operations that cannot be recorded or replayed, as of quantised networks and of other libraries, are no split."""
    try:
        yield
    except RobustExtError:
        raise
    except Exception as error:
        raise SplitError(f"its operations cannot be recorded: {type(error).__name__}: {error}") from error


def _replayed(network: nn.Module, inputs: Tensor, logits: Tensor, layer: str | None, tolerance: float) -> Split:
    """Split where the logits' inputs are, or at layers, with a readout that is run again."""
    recording = Recording(network, inputs[:1])
    if not isinstance(recording.logits, Tensor):
        raise SplitError(f"model: returned {type(recording.logits).__name__} while it was recorded")
    names = None if layer is None else layer_names(layer)
    places = head_places(recording) if names is None else layer_places(recording, names, network)
    tail = Tail(recording, places)
    averaged = [replace(place, cut=replace(place.cut, means=place.positions)) for place in places]
    large = sum(math.prod(place.seen.shape[1:]) for place in places) > LARGEST_MAP
    readout: nn.Module = tail
    beside = False
    if any(place.positions for place in places):
        pooled = Tail(recording, averaged)
        if _reads_averages(tail, pooled, averaged):
            places, readout = averaged, pooled
        elif large:
            places, readout, beside = averaged, LastColumns(logits.shape[1]), True
    features = _observed(network, places, names, beside)
    found = check_features(features, inputs)
    with torch.no_grad(), seeded_globals(0):
        output: Tensor = readout(found)
    _check_replay(output, logits, tolerance_of(network, logits, *(place.seen for place in places), single=tolerance))
    named = [place.cut.layer for place in places]
    shown = ",".join(name for name in named if name is not None) if None not in named else ""
    return Split(features, readout, shown, tuple(found.shape[1:]), "beside" if beside else "replayed")


def _with_gradient(parts: Split, network: nn.Module, inputs: Tensor) -> Split:
    """The parts; SplitError where a gradient comes back from the logits, and none from the features."""
    if _cuts_graph(parts.features, inputs) and not _cuts_graph(network, inputs):
        raise _NoGradientError(
            f"layer {parts.layer!r}: lies inside of a module or function with a backward pass of its own, so that no "
            "gradient comes back from it; put BPDA(model, layer=...) around the whole model, or attack the model with "
            "AdaptedAttack(bpda=...)"
        )
    return parts


def _cuts_graph(module: nn.Module, inputs: Tensor) -> bool:
    """Return whether no gradient comes back to an input, where nothing is raised."""
    x = inputs[:1].detach().clone().requires_grad_()
    try:
        with torch.enable_grad(), frozen(module), seeded_globals(0):
            out: Tensor = module(x.clone())
            if not out.requires_grad:
                return True
            (gradient,) = torch.autograd.grad(out.sum(), x, allow_unused=True)
    except Exception:
        # Foreign code that runs without gradients need not run with them.
        return False
    return gradient is None


def _observed(network: nn.Module, places: Sequence[Place], names: list[str] | None, beside: bool) -> Observed:
    if names is not None and len(names) == 1 and not places[0].cut.means and not beside:
        return LayerInput(network, names[0])
    return Observed(network, [place.cut for place in places], logits=beside)


def _reads_averages(tail: Tail, pooled: Tail, places: Sequence[Place]) -> bool:
    """Return whether the logits depend on averages over positions alone, for large random features."""
    drawn = tail.random(torch.device("cpu"))
    sizes = [math.prod(place.seen.shape[1:]) for place in places]
    rows = [
        part.view(3, *place.seen.shape[1:]) for part, place in zip(torch.split(drawn, sizes, 1), places, strict=True)
    ]
    means = torch.cat([place.cut.columns(part) for part, place in zip(rows, places, strict=True)], 1)
    device = places[0].seen.device
    with torch.no_grad():
        expected, got = tail(drawn.to(device)), pooled(means.to(device))
    return torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def _check_replay(output: Tensor, logits: Tensor, tolerance: float) -> None:
    """SplitError where a readout's output differs from the logits, by their size or by how they vary over inputs."""
    if output.shape != logits.shape:
        raise SplitError(f"model: run again, its head returned shape {tuple(output.shape)} of {tuple(logits.shape)}")
    scale = float(logits.abs().max())
    varies = float((logits - logits[:1]).abs().max())
    difference = float((output.to(logits) - logits).abs().max())
    # Rounding; of logits that hardly vary, as with random weights, a part of how they do.
    if difference > min(tolerance * scale, max(varies / 8, tolerance / 10 * scale)) + 1e-12:
        raise SplitError(
            f"model: run again behind its features, its head returned logits that differ by up to {difference:.3g} "
            f"(the largest is {scale:.3g}), so these do not follow from the features alone (code that is random "
            "or depends on data)"
        )
