"""Trained parts of defenses, and their safetensors files: settings as text, weights as tensors, nothing pickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
from torch import nn

from robust_ext.core.errors import DataError
from robust_ext.core.files import replace_file

_KEY = "defense_part"

Self = TypeVar("Self", bound="TrainedPart")


class TrainedPart(nn.Module):
    """A network, or tensors, that a defense has trained; its ``settings`` (JSON values) make one of the same sizes."""

    settings: dict[str, Any]

    @classmethod
    def untrained(cls: type[Self], **settings: Any) -> Self:
        """A part whose weights are still to be loaded."""
        return cls(**settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and weights to a safetensors file, in a folder that exists."""
        about = {"kind": type(self).__name__, "settings": self.settings}
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        replace_file(Path(path), safetensors.torch.save(state, metadata={_KEY: json.dumps(about)}))

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote: on the CPU, in eval mode, frozen; raise DataError for other files."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_KEY])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["kind"] != cls.__name__:
                raise ValueError(f"it holds a {about['kind']}")
            part = cls.untrained(**about["settings"])
            part.load_state_dict(state)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
            raise DataError(f"{path}: no file written by {cls.__name__}.save ({error})") from error
        return part.eval().requires_grad_(False)
