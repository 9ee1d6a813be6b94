"""Shared parts of the ART classes of this project's attacks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.model import DIFFERENTIABLE, class_labels, clipped_inputs, device_of, module_of
from robust_ext.adapters.art.restricted import (
    DEFENDED,
    broadcast,
    check_budget,
    check_mask,
    common_ratio,
    groups_of_rows,
    search_rows,
)
from robust_ext.adapters.native import (
    HostParameter,
    build_attack,
    check_references,
    check_seed,
    check_starting_points,
    find_defended,
)
from robust_ext.attacks.native import NativeAttack, Step, Watch, cannot_aim
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_integer, check_number

EvasionAttack: Any = art.attacks.EvasionAttack
SummaryWriter: Any = art.summary_writer.SummaryWriter
NORM_NAMES = {"inf": "linf", np.inf: "linf", 2: "l2", 1: "l1"}


class NativeEvasionAttack(EvasionAttack):  # type: ignore[misc]
    """Base of this project's attacks as ART attacks: everything but the settings.

    Settings are attributes of the names they have in the constructor, and in ``attack_params``. Without a ``seed``,
    randomness follows ``np.random.seed``, as in ART. The network is attacked in eval mode, as ART predicts, and left in
    the mode it was in; its parameters' gradients are not touched. The batch size decides nothing but, for attacks whose
    rows depend on the batch or on rounding, as their own texts state.

    Attacks that need gradients take a ``PyTorchClassifier`` whose preprocessing, if it has any, runs in PyTorch, or a
    ``TensorFlowV2Classifier`` or ``KerasClassifier`` whose preprocessing is standardisation; the others take any
    classifier of ART, a ``BlackBoxClassifier`` too, and query its ``predict``. Both need ``clip_values``. Detector-
    aware attacks take a ``DefendedPyTorchClassifier``, see :mod:`robust_ext.adapters.art.estimators`, or any
    ``PyTorchClassifier`` whose network holds a :class:`robust_ext.models.defended.Defended` and nothing that changes
    inputs or logits around it. Their labels are the classifier's own, without that of being rejected (one-hot labels
    may have its column); left out, they are the classifier's predictions whether they are rejected or not. Searched are
    points that are misclassified and let pass;
    count them with ``estimator.outcomes``.

    ``eps`` may be an array that broadcasts to the inputs. Rows of one budget each are attacked together. Where the
    values of one row have budgets of their own, which attacks in linf alone take, the attack works on values that go
    from -1 to 1 over what their budgets and the clip values allow, and its steps are shares of that. ``eps_step`` then
    is an array as well, or None.

    Attributes:
        core: The attack's class in this project.
        parameters: Of the constructor after the estimator, in order.
    """

    core: ClassVar[type[NativeAttack]]
    parameters: ClassVar[tuple[HostParameter, ...]]
    targeted: bool
    batch_size: int
    verbose: bool
    # Of attacks that have no such parameter.
    norm: Any = np.inf
    eps: Any = None
    eps_step: Any = None
    seed: int | None = None

    def _start(self, estimator: Any, *, summary_writer: Any, **values: Any) -> None:
        EvasionAttack.__init__(self, estimator=estimator, summary_writer=summary_writer)
        gradients = self.core().traits.gradients
        if gradients and not isinstance(estimator, DIFFERENTIABLE):
            expected = f"a {', '.join(one.__name__ for one in DIFFERENTIABLE)}: this attack needs gradients"
            raise InvalidArgumentError("estimator", f"a {type(estimator).__name__}", expected)
        for name, value in values.items():
            setattr(self, name, value)
        self._check_params()

    def native(self) -> NativeAttack:
        """Return the attack with the settings of this object.

        Raises:
            InvalidArgumentError: A setting is not accepted.
        """
        return self._native(None if isinstance(self.eps_step, np.ndarray) else self.eps_step)

    def _native(self, eps_step: float | None) -> NativeAttack:
        settings = [one.name for one in self.parameters if one.setting is not None]
        values = {name: _plain(getattr(self, name)) for name in settings} | {"eps_step": eps_step}
        starts = [one.name for one in self.parameters if one.setting == "start"]
        if starts and values.get("num_random_init") == 0:
            # As in ART's own attacks: one run, from the input.
            values |= {"num_random_init": 1, starts[0]: "input"}
        return build_attack(self, values)

    @property
    def summary_writer(self) -> Any:
        """The writer of steps, or None."""
        return self._summary_writer

    @summary_writer.setter
    def summary_writer(self, value: Any) -> None:
        self._summary_writer_arg = value
        self._summary_writer = value if isinstance(value, SummaryWriter) else None
        if isinstance(value, (bool, str)) and value:
            self._summary_writer = art.summary_writer.SummaryWriterDefault(value)

    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        """Perturb a batch.

        Args:
            x: Inputs ``(N, ...)`` within the estimator's ``clip_values``; not changed. What rounding left up to 1e-5
                outside is clipped.
            y: Labels, one-hot ``(N, K)`` or indices ``(N,)``: the true classes, or the classes to aim at. None:
                the estimator's predictions.
            **kwargs: ``mask``: bool or floating point, broadcastable to ``x``; values where it is 0 stay as they are.
                The attack runs on a network that takes these values from ``x`` always: budget that an attack
                without gradients spends there is lost. Detector-aware attacks take none. ``x_init``: as in ART's own
                gradient attacks, without effect. ``references``, of attacks that imitate: clean points of the classes
                that inputs are to be taken for (the class aimed at, or any but their own), which the detector lets
                pass, ``(N, R, ...)``, or ``(R, ...)`` for all inputs. ``x_adv_init``, of the linear-region attack:
                points to begin at besides those searched for, ``(N, ...)`` or ``(N, S, ...)``; no result is farther
                than the nearest of them that is adversarial.

        Returns:
            float32 array ``(N, ...)`` within the clip values, and in the ball unless the attack looks for the smallest
            perturbation; an input for which such an attack found nothing comes back as it was.

        Raises:
            ValueError: Inputs, labels or a keyword are not accepted, a targeted attack has no labels, or the estimator
                has no clip values.
            ModelError: The estimator has preprocessing outside PyTorch, or postprocessing, and the attack needs
                gradients; or the attack does not work on such a network.
        """
        traits = self.native().traits
        known = ["mask", "x_init"] + ["references"] * traits.references
        known += ["x_adv_init"] * self.core.takes_starting_points
        for name in kwargs.keys() - set(known):
            raise InvalidArgumentError("generate", f"the keyword {name!r}", f"x, y, {', '.join(known)} alone")
        network = getattr(self.estimator, "model", None)
        with frozen(network) if isinstance(network, nn.Module) else nullcontext():
            if isinstance(network, nn.Module):
                network.eval()
            module, bounds = module_of(self.estimator, gradients=traits.gradients, batch_size=self.batch_size)
            inputs = clipped_inputs(x, bounds)
            labels = self._labels(inputs, y)
            mask = check_mask(kwargs.get("mask"), inputs)
            if mask is not None and traits.detector:
                raise InvalidArgumentError("mask", "an array", "None: detector-aware attacks change all values")
            given: dict[str, Tensor] = {}
            if traits.references:
                points = _plain(kwargs.get("references"))
                given["references"] = check_references(points, inputs, bounds=bounds)
            if kwargs.get("x_adv_init") is not None:
                points = _plain(kwargs["x_adv_init"])
                given["starting_points"] = check_starting_points("x_adv_init", points, inputs, bounds=bounds)
            out = self._search(module, inputs, labels, given, mask, bounds)
        if self.summary_writer is not None:
            self.summary_writer.reset()
        return out.numpy()

    def _search(
        self,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        given: dict[str, Tensor],
        mask: Tensor | None,
        bounds: tuple[float, float],
    ) -> Tensor:
        """Return candidates ``(N, ...)``, batch by batch."""
        groups, reach, norm = groups_of_rows(self.eps, self.eps_step, inputs), None, NORM_NAMES[self.norm]
        if groups is None:
            traits = self.native().traits
            if norm != "linf" or traits.minimum_norm or traits.detector:
                expected = (
                    "a number, or one for each input: budgets of single values are for attacks in linf that are given "
                    "a budget and no detector"
                )
                raise InvalidArgumentError("eps", f"an array of shape {np.shape(self.eps)}", expected)
            reach = torch.from_numpy(broadcast("eps", np.asarray(self.eps, dtype=np.float32), inputs))
            groups = [(1.0, common_ratio(self.eps, self.eps_step, inputs), torch.arange(len(inputs)))]
        if all(eps == 0 for eps, _, _ in groups):
            return inputs
        # Shared by all batches: each sample draws from it in turn, so the batch size decides nothing.
        seed = int(np.random.randint(2**31)) if self.seed is None else self.seed
        generator = torch.Generator().manual_seed(seed)
        parts = [(eps, step, rows) for eps, step, all_rows in groups for rows in torch.split(all_rows, self.batch_size)]
        out = inputs.clone()
        shown = tqdm(parts, desc=f"{type(self).__name__} - Batches", leave=False, disable=not self.verbose)
        for number, (eps, step, rows) in enumerate(shown):
            if eps == 0:
                continue
            out[rows] = search_rows(
                self._native(step),
                module,
                inputs[rows],
                labels[rows],
                {name: points[rows] for name, points in given.items()},
                mask=None if mask is None else mask[rows],
                reach=None if reach is None else reach[rows],
                device=device_of(self.estimator),
                threat_model=ThreatModel(
                    norm=norm, epsilon=bounds[1] - bounds[0] if eps is None else eps, bounds=bounds
                ),
                generator=generator,
                targeted=self.targeted,
                watch=self._watch(number, labels[rows]),
            )
        return out

    def _labels(self, inputs: Tensor, y: Any) -> Tensor:
        """Return labels as int64 ``(N,)``."""
        if y is None and self.targeted:
            raise InvalidArgumentError("y", None, "labels to aim at, because the attack is targeted")
        classes = int(self.estimator.nb_classes)
        if self.core().traits.detector:
            classes -= find_defended(self.estimator.model, expected=DEFENDED).exposure == "reject"
        return class_labels(self.estimator, inputs, y, classes=classes, batch_size=self.batch_size)

    def _watch(self, batch_id: int, labels: Tensor) -> Watch | None:
        """Return the reporter of steps to the summary writer."""
        if self.summary_writer is None:
            return None
        one_hot = nn.functional.one_hot(labels, self.estimator.nb_classes).numpy().astype(np.float32)

        def update(step: Step) -> None:
            self.summary_writer.update(
                batch_id=batch_id,
                global_step=step.number,
                grad=None if step.gradient is None else _array(step.gradient),
                patch=None,
                estimator=self.estimator,
                x=_array(step.points),
                y=one_hot,
                targeted=self.targeted,
            )

        return update

    def _check_params(self) -> None:
        """Raise ``ValueError`` where a setting is not accepted."""
        super()._check_params()
        if self.norm not in NORM_NAMES:
            raise InvalidArgumentError("norm", self.norm, 'np.inf, "inf", 2 or 1')
        for name in ("targeted", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(name, getattr(self, name), "True or False")
        self.batch_size = check_integer("batch_size", self.batch_size, minimum=1)
        self.seed = check_seed(self.seed)
        attack = self.native()
        traits = attack.traits
        if isinstance(self.eps, np.ndarray) and self.eps.ndim:
            check_budget("eps", self.eps, above=traits.minimum_norm)
        elif self.eps is not None:
            self.eps = check_number("eps", self.eps, minimum=0, open_minimum=traits.minimum_norm)
        if isinstance(self.eps_step, np.ndarray):
            check_budget("eps_step", self.eps_step, above=True)
        if NORM_NAMES[self.norm] not in traits.norms:
            expected = f"one for {' or '.join(traits.norms)}, as the other settings are"
            raise InvalidArgumentError("norm", self.norm, expected)
        reason = cannot_aim(attack) if self.targeted else None
        if reason is not None:
            raise InvalidArgumentError("targeted", True, f"False for {type(self).__name__}: {reason}")
        if traits.detector:
            find_defended(self.estimator.model, expected=DEFENDED)


def _plain(value: Any) -> Any:
    """Turn arrays into tensors, which attacks take; leave everything else unchanged."""
    return torch.from_numpy(np.array(value, dtype=np.float32)) if isinstance(value, np.ndarray) else value


def _array(tensor: Tensor) -> Any:
    """Copy to numpy, so that the attack's next step changes nothing."""
    return tensor.detach().cpu().numpy().copy()
