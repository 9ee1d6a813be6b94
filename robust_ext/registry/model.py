"""The conversion of objects and names to modules."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.models.forms import evaluable, program_module
from robust_ext.registry.base import AdaptedModel, adapters


def as_module(model: object, *, argument: str = "model") -> AdaptedModel:
    """Turn a model into a module from inputs to logits, with the bounds that it declares.

    Args:
        model: An ``nn.Module`` (returned as it is, without bounds; of a compiled one its original), a program of
            ``torch.export``, or a model of an adapted library: a Foolbox model, an ART classifier, a Keras 3 model, a
            ``tf.Module``, a function that ``jax.jit`` made, a fitted classifier of scikit-learn, XGBoost or LightGBM.
            Their preprocessing becomes part of the module. Or a model of a library by its name and settings,
            ``"timm:resnet18(num_classes=10)"``, in eval mode; where its weights are random, the same name has the same
            weights each time. What this function returned is returned again.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: ``model`` is something else, or the library does not have it.
        MissingDependencyError: The library of a name is not installed.
        DataError: The library raised while it made the model.
        ModelError: The library's model cannot be expressed as a module; the text gives the reason.

    Example:
        >>> from torch import nn
        >>> as_module(nn.Linear(3, 2))
        AdaptedModel(module=Linear(in_features=3, out_features=2, bias=True), bounds=None, input_shape=None)
        >>> as_module(as_module(nn.Linear(3, 2))).module
        Linear(in_features=3, out_features=2, bias=True)
    """
    if isinstance(model, AdaptedModel):
        return model
    if isinstance(model, str):
        return _named(model, argument)
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        expected = "one module from inputs to logits: of an ensemble, one whose forward averages its members' logits"
        raise InvalidArgumentError(argument, f"{type(model).__name__} of {len(model)}", expected)
    module = model if isinstance(model, nn.Module) else program_module(model)
    if module is not None:
        return AdaptedModel(module=evaluable(module), bounds=None)
    for adapter in adapters().values():
        adapted = adapter.adapt_model(model)
        if adapted is not None:
            return replace(adapted, module=evaluable(adapted.module))
    libraries = ", ".join(sorted(adapters())) or "none installed"
    expected = f"a torch.nn.Module, a model of an adapted library ({libraries}), or the name of one as text"
    if callable(model):
        expected += (
            "; a function of JAX arrays is one by robust_ext.adapters.jax.jax_model(function), one of numpy arrays by "
            "robust_ext.black_box(function, returns=...)"
        )
    raise InvalidArgumentError(argument, type(model).__name__, expected)


def _named(text: str, argument: str) -> AdaptedModel:
    spec = parse_call(text, argument=argument, any_name=True)
    adapter = adapters().get(spec.scope)
    if adapter is None:
        expected = f"library:name of an adapted library ({', '.join(sorted(adapters()))}), or a torch.nn.Module"
        raise InvalidArgumentError(argument, text, f"{expected}{did_you_mean(spec.scope, adapters())}")
    with seeded_globals(derive_seed(0, "weights of a named model")):
        return adapter.build_model(spec.name, spec.arguments)
