"""JAX functions as torch modules, by ``jax.vjp``. Importing this imports no JAX; using it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from robust_ext.adapters.bridge import ForeignFunction, bridged, noted
from robust_ext.adapters.host import required
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.machine import power_of_two
from robust_ext.models.vjp import VJP
from robust_ext.registry.base import AdaptedModel, Adapter, comes_from


class JaxFunction(ForeignFunction):
    """A JAX function, compiled by ``jax.jit`` for batches of 1, 2, 4, ... rows, up to which others are filled.

    Args:
        function: From arrays ``(N, ...)`` to arrays ``(N, ...)``, each row by itself.
        jit: Whether it can be compiled; without it each operation runs by itself, in batches of any size.
        variables: Returns what the function is given as its first argument, read at each call; None for none.
    """

    framework = "JAX"

    def __init__(
        self, function: Callable[..., Any], *, jit: bool = True, variables: Callable[[], Any] | None = None
    ) -> None:
        self.function = function
        self.jit = jit
        self.variables = variables

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.function, self.jit, self.variables)

    @cached_property
    def _forward(self) -> Callable[..., Any]:
        return self._compiled(self._call)

    @cached_property
    def _differentiate(self) -> Callable[..., Any]:
        import jax

        return self._compiled(lambda held, x: jax.vjp(lambda x: self._call(held, x), x))

    @cached_property
    def _pull(self) -> Callable[..., Any]:
        return self._compiled(lambda pullback, cotangent: pullback(cotangent)[0])

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        compiled: Callable[..., Any] = jax.jit(function) if self.jit else function
        return compiled

    def _call(self, held: Any, x: Any) -> Any:
        return self.array_of(self.function(x) if self.variables is None else self.function(held, x))

    def _held(self) -> Any:
        return None if self.variables is None else self.variables()

    def value(self, x: Tensor) -> Tensor:
        """See the base."""
        return jax_tensor(self._forward(self._held(), jax_array(self._filled(x))), x)[: len(x)]

    def with_pullback(self, x: Tensor) -> tuple[Tensor, VJP]:
        """See the base."""
        out, pullback = self._differentiate(self._held(), jax_array(self._filled(x)))
        rows, dtype = len(x), out.dtype

        def pulled(cotangent: Tensor) -> list[Tensor | None]:
            missing = cotangent.new_zeros(len(out) - rows, *cotangent.shape[1:])
            given = jax_array(torch.cat([cotangent, missing])).astype(dtype)
            return [jax_tensor(self._pull(pullback, given), x)[:rows]]

        return jax_tensor(out, x)[:rows], pulled

    def weights(self) -> list[Any]:
        """See the base."""
        import jax

        return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(self._held())]

    def _filled(self, x: Tensor) -> Tensor:
        """Return a batch with its last row repeated, so that few sizes are compiled."""
        if not self.jit:
            return x
        missing = 2 * power_of_two(len(x) - 1) - len(x) if len(x) > 1 else 0
        return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])


def _again(function: Any, jit: bool, variables: Any) -> JaxFunction:
    return JaxFunction(function, jit=jit, variables=variables)


def jax_array(x: Tensor) -> Any:
    """Return a JAX array of the values; a copy, because torch may change its own in place."""
    import jax

    copied = x.detach().clone(memory_format=torch.contiguous_format)
    try:
        return jax.dlpack.from_dlpack(copied)
    except (RuntimeError, ValueError, TypeError, BufferError):
        # A device, or an alignment, that JAX does not share.
        return jax.numpy.array(copied.cpu().numpy())


def jax_tensor(values: Any, like: Tensor) -> Tensor:
    """Return a tensor of a JAX array's values, on the device and in the precision of ``like``."""
    try:
        found: Tensor = from_dlpack(values)
    except (RuntimeError, ValueError, TypeError, BufferError):
        found = torch.from_numpy(np.array(values))
    return found.to(like).clone() if found.data_ptr() == found.to(like).data_ptr() else found.to(like)


def as_jax(module: nn.Module, like: Tensor, *, compiled: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Return a torch module as a function of JAX arrays, whose gradients are the module's.

    Args:
        module: From tensors ``(N, ...)`` to tensors.
        like: A tensor of the device and type that the module takes.
        compiled: The same in JAX, called in place of the module where there are no values, as in ``jax.jit``, and for
            second derivatives.
    """
    import jax

    def call(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return _traced(compiled)(x)
        with torch.no_grad():
            return jax_array(module(jax_tensor(x, like)))

    def forward(x: Any) -> tuple[Any, Any]:
        if isinstance(x, jax.core.Tracer):
            out, pullback = jax.vjp(_traced(compiled), x)
            return out, pullback
        given = jax_tensor(x, like).requires_grad_()
        with torch.enable_grad():
            out = module(given)

        def pulled(cotangent: Any) -> tuple[Any]:
            (gradient,) = torch.autograd.grad(out, given, jax_tensor(cotangent, out), retain_graph=True)
            return (jax_array(gradient),)

        # JAX carries a function from here to the backward pass only inside a tree.
        return jax_array(out), jax.tree_util.Partial(pulled)

    function: Any = jax.custom_vjp(call)
    function.defvjp(forward, lambda pullback, cotangent: pullback(cotangent))
    called: Callable[[Any], Any] = function
    return called


def _traced(compiled: Callable[..., Any] | None) -> Callable[..., Any]:
    if compiled is None:
        raise ModelError(
            "the attack compiles its target or differentiates it twice, which works only where the target is the JAX "
            "model itself; call it outside of jax.jit"
        )
    return compiled


def jax_model(
    function: Callable[..., Any],
    *,
    features: Callable[..., Any] | None = None,
    channels_first: bool = False,
    jit: bool = True,
) -> nn.Module:
    """Return a JAX function as a module of eval mode, whose gradients are those of ``jax.vjp``.

    Args:
        function: From float32 inputs ``(N, ...)`` to logits ``(N, K)``, each row by itself, with its parameters inside
            (a closure or a partial). A function that ``jax.jit`` made is a model without this call.
        features: A function from inputs to features ``(N, F)``; ``function`` is then the head, from features to
            logits. The binarization test reads these features; without them, the logits.
        channels_first: Whether inputs are ``(N, C, H, W)``, where the function takes ``(N, H, W, C)``. By default
            inputs are what the function takes.
        jit: Whether the function can be compiled, which one cannot whose Python code looks at values.

    Raises:
        InvalidArgumentError: A function cannot be called.
        MissingDependencyError: JAX is not installed.

    Example:
        >>> import jax.numpy as jnp
        >>> weight = jnp.ones((3, 2))
        >>> x = torch.ones(1, 3, requires_grad=True)
        >>> logits = jax_model(lambda x: x @ weight)(x)
        >>> logits, torch.autograd.grad(logits.sum(), x)
        (tensor([[3., 3.]], grad_fn=<_AttachedBackward>), (tensor([[2., 2., 2.]]),))
    """
    required("jax", "jax", title="JAX", install='"robust-ext[jax]"')
    for name, one in (("function", function), ("features", features)):
        if one is not None and not callable(one):
            raise InvalidArgumentError(name, type(one).__name__, "a JAX function of a batch of inputs")
    first = None if features is None else JaxFunction(features, jit=jit)
    return bridged(JaxFunction(function, jit=jit), first, channels_first=channels_first)


class JaxAdapter(Adapter):
    """Functions that ``jax.jit`` returned; others enter by :func:`jax_model`."""

    name = "jax"

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a compiled function."""
        if not comes_from(model, "jaxlib") or not callable(model):
            return None
        return AdaptedModel(module=noted(jax_model(model), library=self.name), bounds=None)


ADAPTER = JaxAdapter()
