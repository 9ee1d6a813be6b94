"""How values that are taken from a tensor, and assigned to a part of it, are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.affine_rules import affine_call
from robust_ext.attacks.linear_region.network.calls import Call
from robust_ext.attacks.linear_region.network.tape import Tape


def _assign(tape: Tape, call: Call) -> Any:
    """``x[index] = value``, and ``x.copy_(value)``: the new values of ``x`` as a function of the old ones."""
    base, *others = call.args
    index, value = (..., others[0]) if call.name == "copy" else others
    # Of what is replaced as a whole, such as an empty buffer, no old value matters.
    old = torch.zeros_like(base) if call.name == "copy" else base
    if isinstance(value, Tensor) and tape.changed_through(value, base):
        taken = base[index]
        same = (taken.data_ptr(), taken.shape, taken.stride()) == (value.data_ptr(), value.shape, value.stride())
        if same:
            tape.bind(base, tape.number_before(base))
    after = affine_call(tape, Call(call.name, _assigned, (old, index, value), {}))
    out = call.run()
    tape.bind(base, tape.number(after))
    return out


def _assigned(base: Tensor, index: Any, value: Any) -> Tensor:
    out = base.clone()
    out[index] = value
    return out


def _taken(tape: Tape, call: Call) -> Any:
    out = affine_call(tape, call)
    tape.bind_view(out, call.input)
    return out


RULES: dict[str, Callable[[Tape, Call], Any]] = {"__setitem__": _assign, "copy": _assign, "__getitem__": _taken}
