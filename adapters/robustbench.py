"""RobustBench's models by name: they normalise by themselves, and are loaded as RobustBench loads them."""

from __future__ import annotations

from typing import Any

from robust_ext.adapters.host import BOUNDS, ModelAdapter
from robust_ext.core.specification import check_keywords
from robust_ext.core.validation import check_choice
from robust_ext.registry.base import AdaptedModel

_SIZES = {"cifar10": 32, "cifar100": 32, "imagenet": 224}
_HINT = "its weights have to be in model_dir, or within reach of a network for it to fetch them"


class RobustBenchAdapter(ModelAdapter):
    """The names for all data sets and threat models."""

    name = "robustbench"
    title = "RobustBench"
    modules = ("robustbench.model_zoo", "robustbench.utils")
    install = "git+https://github.com/RobustBench/robustbench.git"

    def names(self) -> list[str]:
        """See the base."""
        return sorted({name for models in _zoo().values() for named in models.values() for name in named})

    def build(self, name: str, settings: dict[str, Any]) -> AdaptedModel:
        """Load the model of a ``dataset`` and ``threat_model`` from ``model_dir``, to which RobustBench downloads."""
        from robustbench.utils import load_model

        check_keywords(load_model, {"model_name": name, **settings}, argument="model", label=f"robustbench:{name}")
        zoo = _zoo()
        dataset = check_choice("dataset", settings.get("dataset", "cifar10"), sorted(zoo))
        threat_model = check_choice("threat_model", settings.get("threat_model", "Linf"), sorted(zoo[dataset]))
        self.check_listed(name, zoo[dataset][threat_model])
        with self.making(name, _HINT):
            network = load_model(model_name=name, **{**settings, "dataset": dataset, "threat_model": threat_model})
        size = _SIZES[dataset]
        return AdaptedModel(module=network.eval(), bounds=BOUNDS, input_shape=(3, size, size))


def _zoo() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the models by data set and threat model, which are enumerations in RobustBench."""
    from robustbench.model_zoo import model_dicts

    return {
        str(dataset.value): {str(threat.value): dict(named) for threat, named in models.items()}
        for dataset, models in model_dicts.items()
    }


ADAPTER = RobustBenchAdapter()
