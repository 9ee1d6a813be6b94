"""timm's classifiers by name, with the normalisation and size that their configurations state."""

from __future__ import annotations

from typing import Any

from robust_ext.adapters.host import ModelAdapter, normalized
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry.base import AdaptedModel


class TimmAdapter(ModelAdapter):
    """Architectures; a dot and the tag of pretrained weights may follow one."""

    name = "timm"
    title = "timm"
    modules = ("timm", "timm.data")
    install = '"robust-ext[models]"'

    def names(self) -> list[str]:
        """See the base."""
        import timm

        found: list[str] = timm.list_models()
        return found

    def build(self, name: str, settings: dict[str, Any]) -> AdaptedModel:
        """Make the network, with pretrained weights for ``pretrained=True``, else random ones."""
        import timm
        from timm.data import resolve_model_data_config

        if not timm.is_model(name):
            self.check_listed(name, self.names())
        if "checkpoint_path" in settings:
            expected = "a state dict by --weights, which is read without running what it holds"
            raise InvalidArgumentError("model", f"timm:{name}(checkpoint_path=...)", expected)
        with self.making(name, fetched="pretrained=True" if settings.get("pretrained") else None):
            network = timm.create_model(name, **settings)
            stated = resolve_model_data_config(network)
        channels, *size = stated["input_size"]
        channels, size = settings.get("in_chans", channels), settings.get("img_size", size)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return normalized(network, mean=stated["mean"], std=stated["std"], input_shape=(channels, height, width))


ADAPTER = TimmAdapter()
