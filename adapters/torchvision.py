"""Torchvision's classifiers by name, with the normalisation and size that their weights state."""

from __future__ import annotations

from typing import Any

from robust_ext.adapters.host import ModelAdapter, normalized
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean
from robust_ext.registry.base import AdaptedModel

# Their own initialisation takes half a minute, and warns that it will change.
_SLOW_TO_INITIALISE = ("googlenet", "inception_v3")


class TorchvisionAdapter(ModelAdapter):
    """Image classifiers."""

    name = "torchvision"
    title = "torchvision"
    modules = ("torchvision.models",)
    install = "torchvision"

    def names(self) -> list[str]:
        """See the base."""
        from torchvision import models

        found: list[str] = models.list_models(module=models)
        return found

    def build(self, name: str, settings: dict[str, Any]) -> AdaptedModel:
        """Make the network, with ``weights`` (``pretrained=True``: the default ones), else random ones."""
        from torchvision import models

        self.check_listed(name, self.names())
        if settings.pop("pretrained", False):
            settings.setdefault("weights", "DEFAULT")
        weights = settings.get("weights")
        if weights is None and name in _SLOW_TO_INITIALISE:
            settings.setdefault("init_weights", False)
        known = models.get_model_weights(name)
        wanted = "DEFAULT" if weights is None else str(weights).rpartition(".")[2]
        if wanted not in known.__members__:
            expected = f"one of {', '.join(known.__members__)}{did_you_mean(wanted, known.__members__)}"
            raise InvalidArgumentError("model", f"torchvision:{name}(weights={weights!r})", expected)
        with self.making(name, fetched=None if weights is None else f"weights={weights!r}"):
            network = models.get_model(name, **settings)
            stated = known[wanted].transforms()
        size = int(stated.crop_size[0])
        return normalized(network, mean=stated.mean, std=stated.std, input_shape=(3, size, size))


ADAPTER = TorchvisionAdapter()
