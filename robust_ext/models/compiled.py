"""Compiled, scripted and exported networks in a form that is evaluated like any other."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from robust_ext.core.errors import ModelError, warn
from robust_ext.models.precision import RowsApart, is_dynamic
from robust_ext.models.wrapping import Wrapped


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
        trained = [str(node.target) for node in module.graph.nodes if _trains(node)]
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
    """A network without what was compiled, with exported and scripted parts that take modes and hooks.

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
    made: nn.Module
    if isinstance(original, nn.Module) and type(module).__module__.startswith("torch._dynamo"):
        made = _plain(original, known)
    elif isinstance(module, fx.GraphModule) and "eval" in vars(module):
        made = Exported(module)
    elif is_dynamic(module) and hasattr(module, "in_features"):
        made = RowsApart(module)
    elif isinstance(module, (torch.jit.ScriptModule, fx.GraphModule, Exported, RowsApart)):
        made = module
    else:
        made = _with_plain_parts(module, known)
    known[id(module)] = made
    return made


def _with_plain_parts(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    parts = {name: _plain(part, known) for name, part in module.named_children()}
    changed = {name: part for name, part in parts.items() if part is not module._modules[name]}
    if not changed and getattr(module, "_compiled_call_impl", None) is None:
        return module
    # A copy of this object alone, which leaves out what module.compile() made; its weights are the module's.
    made = copy.copy(module)
    made._modules = {**module._modules, **changed}
    return made


def _trains(node: fx.Node) -> bool:
    """Return whether an operation of a graph runs as in train mode."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    return given.get("train") is True or given.get("training") is True
