"""The small network that IMF and AID-purifier ask how clean an input is.

Source: Hwang et al., "AID-Purifier: A Light Auxiliary Network for Boosting Adversarial Defense" (2021).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.files import replace_file
from robust_ext.core.validation import check_integer


class Discriminator(nn.Module):
    """Tells the activations of clean inputs from those of adversarial ones.

    Each activation is averaged over all places, goes through an encoder of its own, and all meet in layers of half the
    width each (Hwang et al. 2021, with their depths). The defaults of the widths are smaller than the authors' 1024.

    Args:
        channels: Of each activation, at least one.
        layers: Names of the layers of a classifier that make them; empty for its logits.
        width: Of the encoders.
        before: How many layers an encoder has after its first one.
        after: How many layers follow the encoders.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> discriminator = Discriminator([4, 10])
        >>> discriminator(torch.rand(3, 4, 8, 8), torch.rand(3, 10)).shape
        torch.Size([3])
    """

    def __init__(
        self, channels: Sequence[int], *, layers: Sequence[str] = (), width: int = 64, before: int = 1, after: int = 3
    ) -> None:
        super().__init__()
        self.channels = tuple(check_integer("channels", count, minimum=1) for count in channels)
        self.layers = tuple(layers)
        if not self.channels or isinstance(layers, str) or len(self.layers) not in (0, len(self.channels)):
            raise InvalidArgumentError(
                "channels", f"{channels} with layers {layers}", "at least one number, and one for each of the layers"
            )
        self.width = check_integer("width", width, minimum=1)
        self.before = check_integer("before", before, minimum=0)
        self.after = check_integer("after", after, minimum=0)
        self.encoders = nn.ModuleList(
            nn.Sequential(_block(count, width), *(_block(width, width) for _ in range(before)))
            for count in self.channels
        )
        sizes = [max(width * len(self.channels) // 2**number, 1) for number in range(after + 1)]
        self.common = nn.Sequential(*map(_block, sizes, sizes[1:]))
        self.readout = nn.Linear(sizes[-1], 1)
        self.eval()

    @property
    def settings(self) -> dict[str, Any]:
        """What makes a discriminator of the same sizes, JSON values."""
        names = ("channels", "layers", "width", "before", "after")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}

    def forward(self, *activations: Tensor) -> Tensor:
        """How clean the inputs look, ``(N,)``: the logit of the probability that they are.

        Args:
            activations: ``(N, channels, ...)`` each, in the order of ``channels``.

        Raises:
            ModelError: They are not as many, or have other channels.
        """
        shapes = [tuple(values.shape) for values in activations]
        if [shape[1:2] for shape in shapes] != [(count,) for count in self.channels]:
            raise ModelError(f"discriminator: got activations {shapes}, expected (N, channels, ...) of {self.channels}")
        pooled = [values.flatten(2).mean(2) if values.dim() > 2 else values for values in activations]
        encoded = [encoder(values) for encoder, values in zip(self.encoders, pooled, strict=True)]
        out: Tensor = self.readout(self.common(torch.cat(encoded, 1)))
        return out.squeeze(1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write sizes and weights to a safetensors file."""
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        replace_file(Path(path), safetensors.torch.save(state, metadata={"discriminator": json.dumps(self.settings)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Discriminator:
        """Read what :meth:`save` wrote; on the CPU, in eval mode.

        Raises:
            DataError: The file cannot be read, or holds something else.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                settings = json.loads((file.metadata() or {})["discriminator"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            settings["layers"] = tuple(settings["layers"])
            made = cls(settings.pop("channels"), **settings)
            made.load_state_dict(state)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
            raise DataError(f"{path}: no file written by Discriminator.save ({error})") from error
        return made.requires_grad_(False)


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())
