"""Attributes that modules change themselves, such as counts of their own passes."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

from torch import nn


@functools.lru_cache(maxsize=1024)
def assigns(kind: Any, name: str) -> bool:
    """Whether a method of the class, beside those that make it, assigns this attribute of ``self`` or its class."""
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            continue
        for key, value in vars(owner).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            # What makes a module sets it up, and keeps no books.
            making = key in ("__init__", "__new__", "__post_init__", "__setstate__")
            if not making and isinstance(function, FunctionType) and _stores(function.__code__, name):
                return True
    return False


def _stores(code: CodeType, name: str) -> bool:
    if not code.co_argcount:
        return False
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and step.argval == name and before is not None:
            loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            # An augmented assignment has the value on top of its owner, which is self in all but odd code.
            if loaded == code.co_varnames[0] or before.opname in ("SWAP", "ROT_TWO"):
                return True
        before = step
    return False
