"""Any classifier in two halves: by its last linear layer, by the operations behind its features, or at the logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.devices import tolerance_of
from robust_ext.core.errors import RobustExtError, SplitError, warn
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.models.black_box import BlackBox, black_box_in
from robust_ext.models.bpda import BPDA
from robust_ext.models.features.observed import INSIDE, LayerInput, Observed, layer_names
from robust_ext.models.features.recording import Place, Recording, head_places, layer_places
from robust_ext.models.features.tail import LastColumns, Split, Tail, as_parts

logger = logging.getLogger(__name__)

# Of the largest logit, in single precision; in coarser ones more.
TOLERANCE = 1e-4
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
        return Split(*pair, shape=tuple(_features(pair[0], inputs).shape[1:]), kind="pair")
    network: Any = model
    blind = black_box_in(network) if isinstance(network, nn.Module) else None
    if blind is not None:
        return _scores_of(network, blind, inputs)
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
        return _with_gradient(_replayed(network, inputs, logits, layer, tolerance), network, inputs)
    except Exception as error:
        if isinstance(error, RobustExtError) and not isinstance(error, SplitError):
            raise
        # Operations of quantised networks and of other libraries need not be recordable.
        shown = f"its operations cannot be recorded: {type(error).__name__}: {error}"
        why = error if isinstance(error, SplitError) else shown
        if layer is not None:
            raise SplitError(str(why)) from error
        warn(
            f"model: the {logits.shape[1]} logits themselves are its features ({why}); name a layer, or give a pair "
            "(features, readout), for more"
        )
    return Split(network, nn.Identity().eval(), shape=tuple(logits.shape[1:]), kind="logits")


def _scores_of(network: nn.Module, inside: BlackBox, inputs: Tensor) -> Split:
    """Return a black box split at its scores; SplitError where it has none."""
    if inside.labels_only:
        raise SplitError(
            "model: it returns labels alone, in which nothing can be planted: around an input they are all the same, "
            "and no readout of them tells a planted point from others. Pass the model's scores, such as probabilities, "
            "or measure robust accuracy without this test"
        )
    with seeded_globals(0):
        classes = check_classifier(network, inputs).shape[1]
    warn(
        f"model: a black box, so examples are planted in its {classes} scores. A pass shows that the attack finds what "
        "these scores show at random points of the ball. It does not show that it finds regions which no random point "
        "lies in or near, as leaves of trees may be"
    )
    return Split(network, nn.Identity().eval(), shape=(classes,), kind="logits")


def split_linear(model: nn.Module, inputs: Tensor, *, layer: str | None = None, tolerance: float = TOLERANCE) -> Split:
    """Split a classifier whose logits are the outputs of an ``nn.Linear``, verified on ``inputs`` ``(n, ...)``.

    It is found where ``layer`` is left out; before its name, with commas, others may be given, whose inputs are
    features too. SplitError: there is none, or something follows it.
    """
    # A random model draws the same each time.
    with seeded_globals(0):
        logits = check_classifier(model, inputs)
    parts = dict(model.named_modules())
    linear = {name: part for name, part in parts.items() if isinstance(part, nn.Linear)}
    *others, last = layer_names(_last_linear(model, linear, inputs, logits, tolerance) if layer is None else layer)
    layer = ",".join([*others, last])
    if last not in linear:
        known, which = ", ".join(list(linear)[-5:]) or "none", " as the last one" if others else ""
        raise SplitError(
            f"layer: got {layer!r}, expected the name of an nn.Linear of the model{which} (the last ones: {known})"
        )
    for name in others:
        if name not in parts:
            raise SplitError(f"layer: got {name!r}, expected the name of a module of the model, see named_modules()")
    own = linear[last]
    single = own.weight.dtype in (torch.float32, torch.float64)
    readout = LastColumns(own.in_features, own) if others or not single else own
    seen = LayerInput(model, layer)
    features = _features(seen, inputs)
    if not others and features.shape[1] != own.in_features:
        raise SplitError(
            f"layer {layer!r}: reads features at several positions, of which the logits are made afterwards"
        )
    with torch.no_grad():
        output: Tensor = readout(features)
    if output.shape != logits.shape:
        raise SplitError(
            f"layer {layer!r}: got outputs of shape {tuple(output.shape)}, expected the model's logits of shape "
            f"{tuple(logits.shape)}; name the last linear layer"
        )
    difference = float((output - logits).abs().max())
    limit = tolerance_of(model, output, logits, single=tolerance) * (1 + float(logits.abs().max()))
    if difference > limit or not _makes_logits(model, own, inputs, logits):
        raise SplitError(
            f"layer {layer!r}: the logits differ from the model's by up to {difference:.3g}, so something follows that "
            "layer; fold it into the layer's weights, or give a pair (features, readout)"
        )
    return Split(seen, readout, layer, tuple(features.shape[1:]))


def _features(part: nn.Module, inputs: Tensor) -> Tensor:
    """Features of ``inputs`` ``(n, ...)``; SplitError where they are no tensor of n rows."""
    with torch.no_grad(), seeded_globals(0):
        features: Tensor = part(inputs)
    if not isinstance(features, Tensor):
        raise SplitError(f"features: got {type(features).__name__}, expected a tensor (n, F)")
    rows = inputs.shape[0]
    if features.dim() < 2 or features.shape[0] != rows:
        shape = tuple(features.shape)
        more = "or more dimensions for a readout that takes them"
        raise SplitError(f"features: got shape {shape} for {rows} inputs, expected ({rows}, F), {more}")
    return features


def _last_linear(
    model: nn.Module, linear: dict[str, nn.Linear], inputs: Tensor, logits: Tensor, tolerance: float
) -> str:
    """Name of the linear layer whose output is the model's."""
    outputs: list[tuple[str, Tensor]] = []
    with ExitStack() as stack, torch.no_grad(), seeded_globals(0):
        for name, part in linear.items():
            hook = part.register_forward_hook(lambda *call, name=name: outputs.append((name, call[2].detach())))
            stack.enter_context(hook)
        model(inputs)
    if not outputs:
        raise SplitError(
            "model: no nn.Linear takes part in a forward pass, so there is no linear readout to replace; give a pair "
            "(features, readout)"
        )
    scale = 1 + float(logits.abs().max())
    for name, output in reversed(outputs):
        limit = tolerance_of(model, output, single=tolerance) * scale
        if output.shape == logits.shape and float((output - logits).abs().max()) <= limit:
            return name
    raise SplitError(
        f"model: the last linear layer {outputs[-1][0]!r} does not produce the logits (something follows it); name the "
        "layer, fold what follows into its weights, or give a pair (features, readout)"
    )


def _makes_logits(model: nn.Module, linear: nn.Linear, inputs: Tensor, logits: Tensor) -> bool:
    """Return whether a model returns what its linear layer does, also where that is something else, and large.

    With few inputs and random weights, logits hardly vary: a log-softmax or the average with another head would pass.
    """
    signs = 1 - 2 * (torch.arange(logits.numel(), device=logits.device).view_as(logits) * 7 % 3 % 2)
    put = (10 * (1 + logits.abs().max()) * signs).to(logits.dtype)
    hook = linear.register_forward_hook(lambda _module, _args, output: put.to(output.dtype).view_as(output))
    with torch.no_grad(), seeded_globals(0), hook:
        out: Tensor = model(inputs)
    slack = tolerance_of(model, logits, single=TOLERANCE)
    return out.shape == put.shape and torch.allclose(out.to(put), put, rtol=slack)


def _replayed(network: nn.Module, inputs: Tensor, logits: Tensor, layer: str | None, tolerance: float) -> Split:
    """Split where the logits' inputs are, or at layers, with a readout that is run again."""
    recording = Recording(network, inputs[:1])
    if not isinstance(recording.logits, Tensor):
        raise SplitError(f"model: returned {type(recording.logits).__name__} while it was recorded")
    names = [] if layer is None else layer_names(layer)
    places = layer_places(recording, names, network) if names else head_places(recording)
    readout: nn.Module = Tail(recording, places)
    beside = False
    if any(place.positions for place in places):
        averaged = [replace(place, cut=replace(place.cut, means=place.positions)) for place in places]
        pooled = Tail(recording, averaged)
        if _reads_averages(readout, pooled, averaged):
            places, readout = averaged, pooled
        elif sum(math.prod(place.seen.shape[1:]) for place in places) > LARGEST_MAP:
            places, readout, beside = averaged, LastColumns(logits.shape[1]), True
    features: Observed = Observed(network, [place.cut for place in places], logits=beside)
    if len(names) == 1 and not places[0].cut.means and not beside:
        features = LayerInput(network, names[0])
    found = _features(features, inputs)
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
            return not out.requires_grad or torch.autograd.grad(out.sum(), x, allow_unused=True)[0] is None
    except Exception:
        # Foreign code that runs without gradients need not run with them.
        return False


def _reads_averages(tail: nn.Module, pooled: Tail, places: Sequence[Place]) -> bool:
    """Return whether the logits depend on averages over positions alone, for large random features."""
    shapes = [place.seen.shape[1:] for place in places]
    device = places[0].seen.device
    drawn = 10 * torch.randn(3, sum(map(math.prod, shapes)), generator=torch.Generator().manual_seed(0))
    pieces = zip(torch.split(drawn, list(map(math.prod, shapes)), 1), shapes, places, strict=True)
    means = torch.cat([place.cut.columns(part.view(3, *shape)) for part, shape, place in pieces], 1)
    with torch.no_grad():
        expected, got = tail(drawn.to(device)), pooled(means.to(device))
    return torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def _check_replay(output: Tensor, logits: Tensor, tolerance: float) -> None:
    """SplitError where a readout's output differs from the logits, by their size or by how they vary over inputs."""
    if output.shape != logits.shape:
        raise SplitError(f"model: run again, its head returned shape {tuple(output.shape)} of {tuple(logits.shape)}")
    scale, varies = float(logits.abs().max()), float((logits - logits[:1]).abs().max())
    difference = float((output.to(logits) - logits).abs().max())
    # Rounding; of logits that hardly vary, as with random weights, a part of how they do.
    if difference > min(tolerance * scale, max(varies / 8, tolerance / 10 * scale)) + 1e-12:
        raise SplitError(
            f"model: run again behind its features, its head returned logits that differ by up to {difference:.3g} "
            f"(the largest is {scale:.3g}), so these do not follow from the features alone (code that is random "
            "or depends on data)"
        )
