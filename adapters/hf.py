"""Image classifiers of transformers: a type with random weights, or what a folder or the hub's cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.host import BOUNDS, ModelAdapter, normalized
from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.specification import did_you_mean
from robust_ext.models.outputs import LogitsOf
from robust_ext.models.wrapping import Wrapped
from robust_ext.registry.base import AdaptedModel

_PROCESSORS, _CLASSES = (f"transformers.models.auto.{name}_auto" for name in ("image_processing", "modeling"))
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


class HuggingFaceAdapter(ModelAdapter):
    """The types that are made with random weights; folders and models on the hub have names of their own."""

    name = "hf"
    title = "transformers"
    modules = ("transformers", _PROCESSORS, _CLASSES)
    install = '"robust-ext[models]"'

    def names(self) -> list[str]:
        """See the base."""
        return list(_classes())

    def build(self, name: str, settings: dict[str, Any]) -> AdaptedModel:
        """Make a type with random weights and these settings, or load a model from a folder or the hub."""
        if "trust_remote_code" in settings:
            expected = "no code of the hub to run; load such a model yourself and give it as file.py:object"
            raise InvalidArgumentError("model", f"hf:{name}(trust_remote_code=...)", expected)
        make = self._random if name in _classes() else self._pretrained
        network, processor = make(name, settings)
        with self.making(name):
            if network.main_input_name != "pixel_values":
                raise ModelError(f"model: hf:{name} takes {network.main_input_name}, not images; name another type")
            module: nn.Module = LogitsOf(network, "logits")
            shape = _input_shape(network.config, processor)
            if processor is None:
                return AdaptedModel(module=module.eval(), bounds=BOUNDS, input_shape=shape)
            mean, std, flipped = normalisation(processor)
            return normalized(ReversedChannels(module) if flipped else module, mean=mean, std=std, input_shape=shape)

    def _random(self, name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        import transformers

        default = transformers.AutoConfig.for_model(name)
        known = [key for key in dir(default) if not key.startswith("_")]
        for key in settings:
            if key not in known:
                expected = f"settings of {type(default).__name__}{did_you_mean(key, known)}"
                raise InvalidArgumentError("model", f"hf:{name}({key}=...)", expected)
        classes = _classes()[name]
        with self.making(name):
            network_class = getattr(transformers, classes if isinstance(classes, str) else classes[0])
            return network_class(transformers.AutoConfig.for_model(name, **settings)), default_processor(name)

    def _pretrained(self, name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        import transformers

        folder = _folder(name)
        if folder is None and "/" not in name:
            near = did_you_mean(name, self.names()) or f", as {self.names()[0]}"
            expected = f"a type of transformers{near}; or a folder, or a name on the hub, as in hf:microsoft/resnet-18"
            raise InvalidArgumentError("model", f"hf:{name}", expected)
        place = name if folder is None else folder
        shared = ("revision", "cache_dir", "local_files_only", "token")
        where = {key: settings[key] for key in shared if key in settings}
        with self.making(name, _FETCHED):
            network, loaded = transformers.AutoModelForImageClassification.from_pretrained(
                place, output_loading_info=True, **{"dtype": "float32", **settings}
            )
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise DataError(
                f"model: hf:{name} has no weights for {missing[0]} and {len(missing) - 1} others, which would be "
                "random; name a model that was trained to classify images"
            )
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(place, **where)
        except (OSError, ValueError):
            # The weights came without one: that of the type.
            processor = default_processor(network.config.model_type)
        return network, processor


def _classes() -> Mapping[str, Any]:
    found: Mapping[str, Any] = import_module(_CLASSES).MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return found


def _folder(name: str) -> str | None:
    try:
        path = Path(name).expanduser()
        return str(path) if path.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        # Too long, with a zero in it, or of a user that there is not.
        return None


def default_processor(kind: str) -> Any:
    """Return the image processor of a type with its defaults; None without one."""
    import transformers
    from transformers.utils import is_torchvision_available

    backends = import_module(_PROCESSORS).IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    order = ("torchvision", "pil") if is_torchvision_available() else ("pil",)
    found = next((backends[key] for key in order if key in backends), None)
    return None if found is None else getattr(transformers, found)()


def normalisation(processor: Any) -> tuple[list[float], list[float], bool]:
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


ADAPTER = HuggingFaceAdapter()
