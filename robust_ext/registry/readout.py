"""The conversion of names and text to readouts of the binarization test."""

from __future__ import annotations

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared, make_settings
from robust_ext.models.readouts.base import Readout
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.registry.base import named_call, named_object


def as_readout(obj: object, *, C: float | None = None, argument: str = "readout") -> Readout:
    """Turn a name or a text into a :class:`~robust_ext.models.readouts.Readout`.

    Args:
        obj: A name of the catalogue, with or without settings (``"nearest(k=3)"``); text that names your own class,
            ``file.py:Class`` or ``package.module:Class(setting=3)``; or the object itself.
        C: Weight of the losses, for readouts of the catalogue that have this setting; the text overrides it.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: ``obj`` is something else.

    Example:
        >>> as_readout("logistic(C=3)")
        Logistic(C=3.0)
    """
    if isinstance(obj, str) and ":" not in obj.partition("(")[0]:
        name, given = named_call(obj, READOUTS, argument=argument, otherwise="file.py:Class")
        if C is not None and "C" in declared(READOUTS[name]):
            given.setdefault("C", C)
        return make_settings(READOUTS[name], given)
    if isinstance(obj, str):
        found = named_object(obj, accepted="a Readout", argument=argument)
        obj = found() if isinstance(found, type) and issubclass(found, Readout) else found
    if not isinstance(obj, Readout):
        expected = f"one of {', '.join(map(repr, READOUTS))}, file.py:Class, or a Readout"
        raise InvalidArgumentError(argument, f"an object of the class {type(obj).__name__}", expected)
    return obj
