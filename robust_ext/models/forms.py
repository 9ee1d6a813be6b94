"""Networks in another form or precision: compiled, scripted, exported, quantised, all evaluated like any other."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from robust_ext.core.errors import ModelError, warn
from robust_ext.models.wrapping import Wrapped

_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
_INTEGERS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


def is_quantised(module: nn.Module) -> bool:
    """Return whether a network computes with integers in places, where no gradient flows."""
    return any(_of_integers(part) for part in module.modules())


def is_dynamic(module: nn.Module) -> bool:
    """Return whether a layer measures the scale of its inputs in each call, of all rows together."""
    return type(module).__module__.startswith(_PACKAGES) and ".dynamic" in type(module).__module__


class RowsApart(nn.Module):
    """A layer that is called with one row after another, so that none has a part in the scale of others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, as no module of its own: it is called once a row, and where networks are split layers are once.
        self._layer = (layer,)
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``(N, ...)``."""
        (layer,) = self._layer
        return torch.cat([layer(row) for row in torch.split(x, 1)]) if len(x) > 1 else layer(x)


def float_twin(module: nn.Module) -> nn.Module | None:
    """Return a quantised network as one of float32 with the same rounded weights; None where nothing is quantised.

    Only activations are not rounded, so that gradients flow. Linear and convolutional layers of ``torch.ao``, their
    fusions with a ReLU, and graphs of ``torch.fx`` are taken over; it shares all other layers.
    """
    found = _in_float(module)
    return None if found is module else found


def _in_float(module: nn.Module) -> nn.Module:
    if isinstance(module, RowsApart):
        return _in_float(*module._layer)
    if type(module).__module__.startswith(_PACKAGES):
        return _float_layer(module)
    if isinstance(module, torch.jit.ScriptModule):
        return module
    changed = {name: twin for name, part in module.named_children() if (twin := _in_float(part)) is not part}
    graph = _float_graph(module) if isinstance(module, fx.GraphModule) else None
    if not changed and graph is None:
        return module
    other = fx.GraphModule(module, graph) if graph is not None else copy.copy(module)
    other._modules = {**module._modules, **changed}
    return other.eval()


def _float_layer(layer: Any) -> nn.Module:
    """A layer of float32 with the weights of a quantised one; the layer itself where it is of no known kind."""
    name = type(layer).__name__
    if name in ("Quantize", "DeQuantize"):
        return nn.Identity().eval()
    kind: Any = getattr(nn, name.replace("ReLU", ""), None)
    if kind is None or not callable(getattr(layer, "weight", None)):
        return layer  # type: ignore[no-any-return]
    shape = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    names = shape if hasattr(layer, "kernel_size") else ("in_features", "out_features")
    bias = layer.bias()
    made = kind(**{key: getattr(layer, key) for key in names}, bias=bias is not None)
    with torch.no_grad():
        made.weight.copy_(layer.weight().dequantize())
        if bias is not None:
            made.bias.copy_(bias)
    made.requires_grad_(False)
    return (nn.Sequential(made, nn.ReLU()) if "ReLU" in name else made).eval()


def _float_graph(module: fx.GraphModule) -> fx.Graph | None:
    """A graph that does not round activations; None where it does not."""
    graph = copy.deepcopy(module.graph)
    rounding = [node for node in graph.nodes if _is_rounding(node)]
    for node in reversed(rounding):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return graph if rounding else None


def _is_rounding(node: fx.Node) -> bool:
    """Return whether a node makes integers of activations, or floats of these; weights stay rounded."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.startswith("quantize_per") or (node.op == "call_method" and name == "dequantize")


def _of_integers(part: nn.Module) -> bool:
    if isinstance(part, RowsApart) or type(part).__module__.startswith(_PACKAGES):
        return True
    if isinstance(part, fx.GraphModule):
        return any("quantize" in str(node.target) for node in part.graph.nodes)
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return any(one.dtype in _INTEGERS and one.dim() > 1 for one in tensors)


class InPrecision(Wrapped):
    """A network in its own precision between inputs and outputs in float32, in which threat models and attacks are.

    Gradients flow through both casts. An attack meets the network that is deployed, roundings included.

    Args:
        module: The network.
        precision: The coarsest type it computes in, which tolerances follow.
        dtype: Type that its inputs are cast to; None where it takes float32.
        autocast: Type of the ``torch.autocast`` block in which it runs, as where it was given inside one; or None.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        precision: torch.dtype,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(module)
        self.precision, self.dtype, self.autocast = precision, dtype, autocast

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, float32, of inputs ``(N, ...)``; both of other types stay where they are no floats."""
        if self.dtype is not None and x.is_floating_point():
            x = x.to(self.dtype)
        block: AbstractContextManager[object] = nullcontext()
        if self.autocast is not None:
            block = torch.autocast(x.device.type, dtype=self.autocast)
        with block:
            out: Tensor = self.module(x)
        return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out

    def extra_repr(self) -> str:
        """The types."""
        return f"precision={self.precision}, dtype={self.dtype}, autocast={self.autocast}"


def weights_type(module: nn.Module) -> torch.dtype | None:
    """Type of the first floating point parameter or buffer; None without one."""
    tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point())
    return next((tensor.dtype for tensor in tensors), None)


def ambient_autocast(device: str) -> torch.dtype | None:
    """The type of the ``torch.autocast`` block for this kind of device around the call; None outside of one."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class Scripted(Wrapped):
    """A network of ``torch.jit``, whose own modules take no hooks, inside one that does."""

    def forward(self, x: Tensor) -> Any:
        """Return the network's output for ``(N, ...)``."""
        return self.module(x)


class Exported(Wrapped):
    """A network of ``torch.export``, whose mode was decided when it was exported; ``train`` and ``eval`` keep it.

    Raises:
        ModelError: It was exported in train mode.
    """

    module: fx.GraphModule

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        trained = []
        for node in module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            names = () if schema is None else (argument.name for argument in schema.arguments)
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            # An operation that runs as in train mode.
            if schema is not None and (given.get("train") is True or given.get("training") is True):
                trained.append(str(node.target))
        if trained:
            raise ModelError(
                f"model: was exported in train mode ({', '.join(dict.fromkeys(trained))}), where outputs depend on the "
                "batch or on chance, and keeps that mode; call model.eval() before torch.export.export"
            )
        self.train(False)

    def forward(self, x: Tensor) -> Any:
        """Return the network's output for ``(N, ...)``; ModelError for batch sizes that were not exported."""
        try:
            return self.module(x)
        except AssertionError as error:
            raise ModelError(
                f"model: {error}, as it was exported for batches of one size; give torch.export.export "
                "dynamic_shapes=({0: torch.export.Dim.AUTO},)"
            ) from error

    def train(self, mode: bool = True) -> Exported:
        """Its flags are those of eval mode, regardless of the mode: the graph holds no other."""
        del mode
        for part in (self, *self.module.modules()):
            part.training = False
        return self


def evaluable(module: nn.Module) -> nn.Module:
    """Return the network with original modules for compiled parts; exported and scripted parts take modes and hooks.

    Linear layers that are quantised dynamically get the rows one by one: their scales come from the batch.

    The original of what ``torch.compile`` made is taken: it returns the same, sees hooks, and compiles nothing for each
    of the many shapes that attacks query. The module itself where there is nothing of this; weights are shared.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return Scripted(module)
    found = _plain(module, {})
    if found is not module and not isinstance(found, Exported):
        holds = "compiled or exported parts; its originals are evaluated"
        if any(isinstance(part, RowsApart) for part in found.modules()):
            holds = "dynamically quantised layers, whose scales come from the batch; they are given one row at a time"
        warn(f"model: {type(module).__name__} holds {holds}")
    return found


def program_module(model: object) -> nn.Module | None:
    """The network of a program that ``torch.export.export`` returned; None for anything else."""
    if type(model).__name__ != "ExportedProgram" or not type(model).__module__.startswith("torch.export"):
        return None
    program: Any = model
    found: nn.Module = program.module()
    return found


def _plain(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    original = getattr(module, "_orig_mod", None)
    made = module
    if isinstance(original, nn.Module) and type(module).__module__.startswith("torch._dynamo"):
        made = _plain(original, known)
    elif isinstance(module, fx.GraphModule) and "eval" in vars(module):
        made = Exported(module)
    elif is_dynamic(module) and hasattr(module, "in_features"):
        made = RowsApart(module)
    elif not isinstance(module, (torch.jit.ScriptModule, fx.GraphModule, Exported, RowsApart)):
        parts = {name: _plain(part, known) for name, part in module.named_children()}
        changed = {name: part for name, part in parts.items() if part is not module._modules[name]}
        if changed or getattr(module, "_compiled_call_impl", None) is not None:
            # A copy of this object alone, which leaves out what module.compile() made; its weights are the module's.
            made = copy.copy(module)
            made._modules = {**module._modules, **changed}
    known[id(module)] = made
    return made
