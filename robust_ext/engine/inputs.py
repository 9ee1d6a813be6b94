"""The checked inputs of an evaluation: attacks, a classifier and labelled samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.classifier import check_classifier, check_consistency
from robust_ext.core.criteria import MISCLASSIFICATION, Criterion, MultiLabel, check_criterion
from robust_ext.core.devices import on_device, run_device
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, as_tensor, check_inputs, check_labels
from robust_ext.engine.classifiers import PROBES as PROBES
from robust_ext.engine.classifiers import as_classifier
from robust_ext.engine.code_digest import module_code
from robust_ext.engine.copies import behaviour
from robust_ext.engine.identity import check_ids, inputs_digest, model_digest
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.label_sets import classify_label_sets
from robust_ext.registry.attack import as_attack
from robust_ext.registry.model import as_module

Batches: TypeAlias = Iterable[Sequence[Array]]
"""Pairs ``(inputs, labels)`` of batches, as a DataLoader makes them."""


@dataclass(frozen=True)
class Samples:
    """Checked clean samples."""

    inputs: Tensor  # (N, ...), float32
    labels: Array | None  # As they were given


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """A classifier, labelled samples, and its logits of them."""

    module: nn.Module
    inputs: Tensor  # Clean samples (N, ...), float32, on the module's device
    labels: Tensor  # Their classes, int64 (N,)
    logits: Tensor  # Of them, (N, K)
    ids: Sequence[int]  # Of the samples, which with the seed decide every draw
    threat_model: ThreatModel
    criterion: Criterion = MISCLASSIFICATION

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the inputs."""
        return self.threat_model.bounds

    @property
    def plain(self) -> bool:
        """True if attacks have to change the prediction, and nothing else."""
        return self.criterion == MISCLASSIFICATION

    @cached_property
    def correct(self) -> NDArray[np.bool_]:
        """A mask of samples that are right to begin with, and not adversarial as they are, ``(N,)``."""
        right = self.criterion.correct(self.logits, self.labels)
        found: NDArray[np.bool_] = (right & ~self.criterion.adversarial(self.logits, self.goals)).cpu().numpy()
        return found

    @cached_property
    def goals(self) -> Tensor:
        """Labels for attacks, int64 ``(N,)``: the classes, or the targets if any."""
        return self.criterion.goals(self.labels, logits=self.logits, ids=self.ids)

    @property
    def described(self) -> dict[str, Any]:
        """Digests of the samples, by which results are compared, and of the model where a run folder needs them."""
        found: dict[str, Any] = vars(self).get("digests", {})
        return {**found, **self._samples}

    @cached_property
    def _samples(self) -> dict[str, Any]:
        found = {name: inputs_digest(getattr(self, name), self.ids) for name in ("inputs", "labels")}
        if self.plain:
            return found
        return {**found, "criterion": repr(self.criterion), "goals": inputs_digest(self.goals, self.ids)}

    @cached_property
    def digests(self) -> dict[str, Any]:
        """Digests of the classifier, its code and the samples, and how the classifier behaves."""
        return {
            "model": model_digest(self.module),
            "model_code": module_code(self.module),
            "model_behaviour": behaviour(self.module, self.inputs, self.bounds),
            **self._samples,
        }

    def rows(self, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs of some rows, and what attacks are given as their labels."""
        return self.inputs[rows.start : rows.stop], self.goals[rows.start : rows.stop]

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """Everything with a row for each sample."""
        return self.inputs, self.labels, self.logits

    def blocks(self, size: int) -> list[range]:
        """Rows that are attacked together."""
        return blocks_of(len(self.inputs), size)


def blocks_of(count: int, size: int) -> list[range]:
    """``count`` indices in blocks of ``size``; what is left is the last block."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def prepare_inputs(
    model: object,
    inputs: Array | Batches | Samples,
    labels: Array | None,
    *,
    threat_model: ThreatModel,
    sample_ids: Sequence[int] | None,
    batch_size: int,
    device: str | torch.device | None = None,
    criterion: object = None,
) -> EvaluationInputs:
    """Check a classifier, and samples ``(N, ...)`` with labels int64 ``(N,)``, in forward passes of ``batch_size``.

    Samples are arrays, or batches, see :func:`read_samples`. With a :class:`MultiLabel` criterion labels are
    ``(N, L)``, and the model is made a classifier of sets of them.

    Raises InvalidArgumentError where an argument does not fit, ModelError where the model is no classifier to logits.
    """
    module = bounded_module(model, threat_model, device=device)
    where = run_device(module, device)
    samples = read_samples(inputs, labels, threat_model)
    inputs, labels = samples.inputs, samples.labels
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    ids, judged = check_ids(sample_ids, len(inputs)), check_criterion(criterion)
    if isinstance(judged, MultiLabel):
        module, labels = classify_label_sets(as_classifier(module, inputs.to(where)), labels, inputs.to(where), judged)
    labels = check_labels("labels", labels, samples=len(inputs)).to(where)
    inputs = inputs.to(where)
    module = as_classifier(module, inputs, labels)
    logits = torch.cat([check_classifier(module, batch) for batch in torch.split(inputs, batch_size)])
    check_model(module, inputs[:PROBES], bounds=threat_model.bounds)
    check_labels("labels", labels, samples=len(inputs), classes=logits.shape[1])
    given = EvaluationInputs(
        module=module,
        inputs=inputs,
        labels=labels,
        logits=logits,
        ids=ids,
        threat_model=threat_model,
        criterion=judged,
    )
    _ = given.goals  # Raises where the criterion does not fit; kept with the inputs
    return given


def read_samples(inputs: Array | Batches | Samples, labels: Array | None, threat_model: ThreatModel) -> Samples:
    """Check samples: arrays, or an iterable of batches ``(inputs, labels)``, which is read once, without ``labels``.

    The inputs of batches are written to a temporary file that ends with the tensor that maps it, so that the set need
    not fit into memory. InvalidArgumentError where they are no valid inputs, or the iterable holds something else.
    """
    _check_threat_model(threat_model)
    if isinstance(inputs, Samples):
        return inputs
    if hasattr(inputs, "__array__") or isinstance(inputs, (Mapping, str)) or not _iterable(inputs):
        return Samples(check_samples(inputs, threat_model), labels)
    if labels is not None:
        expected = "None where inputs are batches, each a pair (inputs, labels)"
        raise InvalidArgumentError("labels", type(labels).__name__, expected)
    shapes, rows, found = [list[int]()], 0, list[Tensor]()
    with tempfile.TemporaryFile() as file:
        for number, batch in enumerate(inputs):
            few, classes = _pair(batch, number)
            checked = check_samples(few, threat_model).cpu()
            before, shapes = shapes, [list(one.shape[1:]) for one in (checked, classes)]
            if found and shapes != before:
                got = "inputs and labels of shapes {} and {}".format(*shapes)
                expected = "those of the batches before, {} and {}".format(*before)
                raise InvalidArgumentError("inputs", f"a batch {number} with {got} a sample", expected)
            rows += len(checked)
            file.write(checked.numpy().data)
            found.append(classes)
        if not rows:
            expected = (
                "batches (inputs, labels); an iterator that was read once has none left, a list or DataLoader has"
            )
            raise InvalidArgumentError("inputs", "no batches", expected)
        file.flush()
        mapped = np.memmap(file, dtype=np.float32, mode="r+", shape=(rows, *shapes[0]))
    return Samples(torch.from_numpy(mapped), torch.cat(found))


def _iterable(value: object) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _pair(batch: object, number: int) -> tuple[Array, Tensor]:
    """Return inputs and labels of a batch; InvalidArgumentError where it is something else."""
    expected = (
        "a tensor or array (N, ...), or batches (inputs, labels), as a torch.utils.data.DataLoader makes them; of a "
        "data set, DataLoader(data, batch_size=100)"
    )
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise InvalidArgumentError(
            "inputs", f"an iterable whose item {number} is a {type(batch).__name__}{size}", expected
        )
    inputs, labels = batch
    if not all(hasattr(one, "__array__") and getattr(one, "ndim", 0) for one in batch) or len(inputs) != len(labels):
        shown = " and ".join(
            f"{type(one).__name__} of shape {tuple(one.shape)}" if hasattr(one, "shape") else repr(one)[:40]
            for one in batch
        )
        raise InvalidArgumentError("inputs", f"an iterable whose item {number} is {shown}", expected)
    return inputs, as_tensor("labels", labels, expected="of shape (N,)").cpu()


def check_samples(inputs: object, threat_model: ThreatModel) -> Tensor:
    """Return clean samples as a copy in float32; InvalidArgumentError where they are no valid inputs."""
    checked = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    threat_model.check_samples(checked)
    return checked


def check_model(
    module: nn.Module,
    inputs: Tensor,
    *,
    bounds: tuple[float, float],
    argument: str = "model",
    draws: bool = False,
    random: bool = False,
) -> None:
    """Raise ModelError where the logits of a row do not follow from that row alone, see ``check_consistency``.

    A defense that declares that it treats rows in groups is let pass, and with ``draws`` one that declares that it is
    random; with ``random`` any random module.
    """
    inside = [part for part in module.modules() if isinstance(part, AdaptiveDefense)]
    if any(part.batch_level for part in inside):
        return
    draws, random = draws or random, random or any(part.random for part in inside)
    check_consistency(
        module,
        inputs,
        bounds=bounds,
        argument=argument,
        repeatable=not (random and draws),
        # The rows of a random one draw numbers of their own, by their place in the batch.
        row_wise=not random,
        optimised=bool(inside),
    )


def bounded_module(model: object, threat_model: ThreatModel, *, device: str | torch.device | None = None) -> nn.Module:
    """A model as a module, on the device; InvalidArgumentError where it is of no known kind or has other bounds."""
    _check_threat_model(threat_model)
    adapted = as_module(model)
    if adapted.bounds is not None and adapted.bounds != threat_model.bounds:
        raise InvalidArgumentError(
            "threat_model", f"bounds {threat_model.bounds}", f"the bounds the model states, {adapted.bounds}"
        )
    return on_device(adapted.module, device)


def _check_threat_model(threat_model: object) -> None:
    if not isinstance(threat_model, ThreatModel):
        raise InvalidArgumentError("threat_model", type(threat_model).__name__, "a ThreatModel")


def as_attacks(attacks: object, *, argument: str = "attacks") -> dict[str, Attack]:
    """Attacks by name, of one, a list or a dict of them; InvalidArgumentError without any, or with two of one name."""
    if isinstance(attacks, Mapping):
        found = [as_attack(value, name=str(key), argument=argument) for key, value in attacks.items()]
    else:
        found = [as_attack(value, argument=argument) for value in (attacks if isinstance(attacks, list) else [attacks])]
    if not found:
        raise InvalidArgumentError(argument, attacks, "at least one attack")
    named = {one.name: one for one in found}
    if len(named) < len(found):
        names = [one.name for one in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgumentError(
            argument, f"several named {', '.join(twice)}", "a dict of attacks by different names"
        )
    return named
