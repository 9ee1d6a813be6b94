"""Image classifiers of transformers: a type with random weights, or what a folder or the hub's cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from robust_ext.adapters.zoo import BOUNDS, making, normalized
from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.specification import did_you_mean
from robust_ext.models.outputs import LogitsOf
from robust_ext.models.wrapping import Wrapped
from robust_ext.registry.base import AdaptedModel

_FETCHED = (
    "it has to be a folder, or a model in transformers' own cache, or within reach of a network for it to fetch; a "
    "type, as in hf:vit(num_labels=10), is made offline, with random weights; HF_HUB_OFFLINE=1 keeps it to its cache"
)


class ReversedChannels(Wrapped):
    """A module of inputs ``(N, C, H, W)`` whose channels are in reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output at the reversed channels."""
        out: Tensor = self.module(x.flip(1))
        return out


def names() -> list[str]:
    """Return the types that are made with random weights."""
    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def build(name: str, settings: dict[str, Any]) -> AdaptedModel:
    """Make a type with random weights and these settings, or load a model from a folder or the hub."""
    if "trust_remote_code" in settings:
        expected = "no code of the hub to run; load such a model yourself and give it as file.py:object"
        raise InvalidArgumentError("model", f"hf:{name}(trust_remote_code=...)", expected)
    network, processor = _random(name, settings) if name in names() else _pretrained(name, settings)
    with making(f"hf:{name}"):
        return _adapted(name, network, processor)


def _adapted(name: str, network: Any, processor: Any) -> AdaptedModel:
    if network.main_input_name != "pixel_values":
        raise ModelError(f"model: hf:{name} takes {network.main_input_name}, not images; name another type")
    module: nn.Module = LogitsOf(network, "logits")
    shape = _input_shape(network.config, processor)
    if processor is None:
        return AdaptedModel(module=module.eval(), bounds=BOUNDS, input_shape=shape)
    mean, std, flipped = _normalisation(processor)
    return normalized(ReversedChannels(module) if flipped else module, mean=mean, std=std, input_shape=shape)


def _random(name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    default = transformers.AutoConfig.for_model(name)
    known = [key for key in dir(default) if not key.startswith("_")]
    for key in settings:
        if key not in known:
            expected = f"settings of {type(default).__name__}{did_you_mean(key, known)}"
            raise InvalidArgumentError("model", f"hf:{name}({key}=...)", expected)
    classes = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[name]
    with making(f"hf:{name}"):
        network_class = getattr(transformers, classes if isinstance(classes, str) else classes[0])
        network = network_class(transformers.AutoConfig.for_model(name, **settings))
        return network, _default_processor(name)


def _pretrained(name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    folder = _folder(name)
    if folder is None and "/" not in name:
        near = did_you_mean(name, names()) or f", as {names()[0]}"
        expected = f"a type of transformers{near}; or a folder, or a name on the hub, as in hf:microsoft/resnet-18"
        raise InvalidArgumentError("model", f"hf:{name}", expected)
    place = name if folder is None else folder
    where = {key: settings[key] for key in ("revision", "cache_dir", "local_files_only", "token") if key in settings}
    with making(f"hf:{name}", hint=_FETCHED):
        network, loaded = transformers.AutoModelForImageClassification.from_pretrained(
            place, output_loading_info=True, **{"dtype": "float32", **settings}
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise DataError(
            f"model: hf:{name} has no weights for {missing[0]} and {len(missing) - 1} others, which would be random; "
            "name a model that was trained to classify images"
        )
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(place, **where)
    except (OSError, ValueError):
        # The weights came without one: that of the type.
        processor = _default_processor(network.config.model_type)
    return network, processor


def _folder(name: str) -> str | None:
    try:
        path = Path(name).expanduser()
        return str(path) if path.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        # Too long, with a zero in it, or of a user that there is not.
        return None


def _default_processor(kind: str) -> Any:
    """Return the image processor of a type with its defaults; None without one."""
    backends = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
    if not backends:
        return None
    order = ("torchvision", "pil") if is_torchvision_available() else ("pil",)
    found = next((backends[key] for key in order if key in backends), None)
    return None if found is None else getattr(transformers, found)()


def _normalisation(processor: Any) -> tuple[list[float], list[float], bool]:
    """Return a processor's mean and standard deviation, measured on images of one colour.

    Rescaling, and normalising twice as EfficientNet's does, are in them. The third is whether channels are reversed.
    """

    def processed(*colour: int) -> Tensor:
        image = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 16, 16).contiguous()
        out = processor(image, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
        values: Tensor = out[0, :, 8, 8].double()
        return values

    black, white, red = processed(0, 0, 0), processed(255, 255, 255), processed(255, 0, 0)
    flipped = bool(red[2] != black[2])
    scale = white - black
    mean, std = (0.0 - black / scale).tolist(), (1 / scale).tolist()
    return (mean[::-1], std[::-1], True) if flipped else (mean, std, False)


def _input_shape(config: Any, processor: Any) -> tuple[int, ...]:
    """Return the shape of an input, from the configuration or else from the processor."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None and processor is not None:
        cropped = getattr(processor, "crop_size", None) or processor.size
        size = cropped["height"] or cropped["shortest_edge"]
    height, width = size if isinstance(size, (list, tuple)) else (size or 224, size or 224)
    return (getattr(vision, "num_channels", None) or 3, int(height), int(width))
