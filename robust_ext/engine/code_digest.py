"""Digests of code: what attacks, models, detectors and defenses consist of beside weights.

What is defined in files counts by their contents and those of all files they import, see
:mod:`robust_ext.core.source_files`; what is defined in a script, a notebook or an interpreter by its compiled code.
Values that the code holds count in both cases, see :mod:`robust_ext.engine.code_walk`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.source_files import SourceFiles
from robust_ext.core.specification import parse_call
from robust_ext.engine.code_walk import Code, CodeWalk, hashed


def module_code(*modules: nn.Module) -> Code:
    """Digests of the code of modules and of those in them, by file or by name; without weights."""
    walk = CodeWalk()
    for module in modules:
        walk.add_module(module)
    return walk.code


def attack_code(attack: Attack) -> Code:
    """The same of an attack and all that it is made of; of one that a text names, :func:`text_code` of the text."""
    if attack.code_text is not None:
        return text_code(attack.code_text)
    if isinstance(attack, AdaptedAttack):
        # The attack inside may be named by a text too.
        return {**attack_code(attack.attack), "adapted": hashed(repr(attack.adaptation))}
    walk = CodeWalk()
    walk.add("values", attack)
    return walk.code


def object_code(value: object) -> Code:
    """The same of any object with its settings."""
    walk = CodeWalk()
    walk.add("values", value)
    return walk.code


def text_code(text: str, *, argument: str = "attack") -> Code:
    """The code that ``file.py:name(...)`` or ``package.module:name(...)`` names, without importing any of it.

    Raises:
        InvalidArgumentError: The text has another form, or there is no such file or module.
    """
    spec = parse_call(text, argument=argument)
    files = SourceFiles()
    if spec.scope.endswith(".py"):
        path = Path(spec.scope).expanduser().resolve()
        if not path.is_file():
            raise InvalidArgumentError(argument, spec.scope, f"an existing Python file; there is none at {path}")
        files.add_file(path)
    elif not files.add_module(spec.scope, folder=Path.cwd()):
        expected = f"an importable module (there is no {spec.scope}), or a file written as path/to/file.py:name"
        raise InvalidArgumentError(argument, text, expected)
    return {**dict(sorted(files.digests.items())), "values": hashed(f"{spec.name} {sorted(spec.arguments.items())!r}")}


def text_digest(text: str, *, argument: str = "attack") -> str:
    """One fingerprint of :func:`text_code`."""
    return code_digest(text_code(text, argument=argument))


def code_digest(code: Mapping[str, str]) -> str:
    """One fingerprint of digests by name."""
    return hashed(json.dumps(code, sort_keys=True))
