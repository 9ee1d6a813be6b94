"""The trained part of SODEF: features to a state, its field, and the readout of where the field leads.

Source: Kang et al., "Stable Neural ODE with Lyapunov-Stable Equilibrium Points for Defending against Adversarial
Attacks" (2021), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_inputs, check_integer, check_labels, check_number
from robust_ext.defenses.training.loop import train_module
from robust_ext.defenses.training.ode import StableField, integrate
from robust_ext.defenses.training.part import TrainedPart

# As in the authors' code: sharpness of the three penalties, and how far below 0 the Jacobian is pushed.
_DIAGONAL, _OFF_DIAGONAL, _SPEED, _SHIFT = 1.0, 0.1, 50.0, 1.0
_JACOBIANS = 8
_STEPS = 5


class StableHead(TrainedPart):
    """Linear map to the state, stable field, linear readout.

    Args:
        features: Values of one row of features.
        classes: Number of logits.
        dimension: Of the state.
        hidden: Width of the field.
    """

    def __init__(self, features: int, classes: int, *, dimension: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.reduce = nn.Linear(
            check_integer("features", features, minimum=1), check_integer("dimension", dimension, minimum=1)
        )
        self.field = StableField(dimension, hidden=hidden)
        self.readout = nn.Linear(dimension, check_integer("classes", classes, minimum=2))
        self.settings = {"features": features, "classes": classes, "dimension": dimension, "hidden": hidden}
        self.eval()


def fit_stable_head(
    features: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    classes: int | None = None,
    dimension: int = 64,
    hidden: int = 256,
    diagonal: float = 10.0,
    off_diagonal: float = 10.0,
    speed: float = 0.1,
    epochs: int = 5,
    batch_size: int = 128,
    learning_rate: float = 1e-2,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
) -> StableHead:
    """Train a head on the features of a network that stays as it is.

    First the map to the state and the readout learn to classify without the field. Then field and readout learn to
    classify with it, and the states to be stable points: the field is to be small there (``speed``), its Jacobian to
    have a negative diagonal (``diagonal``) that outweighs the rest of its column (``off_diagonal``). In training the
    equation is solved in five equal steps. Weights are those of the authors' code; data, passes and rates are not, as
    theirs are for a large network.

    Args:
        features: From inputs to features ``(N, F)``, in eval mode, see :func:`robust_ext.models.features.split`.
        inputs: Training inputs, floating point ``(N, ...)`` in the bounds, at least 2.
        labels: Their classes, integers ``(N,)``.
        classes: Number of logits; one more than the largest label when left out.
        dimension: Of the state.
        hidden: Width of the field.
        diagonal: Weight of the diagonals, at least 0.
        off_diagonal: Weight of the rest of the Jacobians, at least 0.
        speed: Weight of the field at the features, at least 0.
        epochs: Passes over the data of either part.
        batch_size: At least 2.
        learning_rate: Of Adam.
        bounds: Of the inputs.
        seed: Of everything that is drawn.

    Returns:
        On the features' device, in eval mode; its parameters require no gradients.

    Raises:
        InvalidArgumentError: These are no such tensors or settings.
    """
    weights = [
        check_number(name, value, minimum=0)
        for name, value in (("diagonal", diagonal), ("off_diagonal", off_diagonal), ("speed", speed))
    ]
    device = module_device(features)
    inputs = check_inputs("inputs", inputs, bounds=check_bounds(bounds)).to(device)
    labels = check_labels("labels", labels, samples=len(inputs), classes=classes).to(device)
    with torch.no_grad():
        seen = features(inputs).flatten(1)
    if classes is None:
        classes = max(int(labels.max()) + 1 if len(labels) else 0, 2)
    with seeded_globals(derive_seed(seed, "head")):
        head = StableHead(seen.shape[1], classes, dimension=dimension, hidden=hidden).to(device)

    def alone(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head.readout(head.reduce(seen[rows])), labels[rows])

    def together(rows: Tensor) -> Tensor:
        start = head.reduce(seen[rows])
        end = integrate(head.field, start, solver="rk4", steps=_STEPS)
        return nn.functional.cross_entropy(head.readout(end), labels[rows]) + _unstable(head.field, start, weights)

    schedule = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    train_module(head, len(seen), alone, learning_rate=learning_rate, **schedule)
    head.reduce.requires_grad_(False)
    train_module(head, len(seen), together, learning_rate=learning_rate / 10, **schedule)
    return head.requires_grad_(False)


def _unstable(field: StableField, states: Tensor, weights: list[float]) -> Tensor:
    """How far some states are from stable points of the field (Kang et al. 2021, section 4.2)."""
    time = torch.zeros((), device=states.device)
    velocity = field(time, states)
    jacobians = field.jacobian(states[:_JACOBIANS])
    diagonal = jacobians.diagonal(dim1=1, dim2=2)
    rest = jacobians.abs().sum(1) - 2 * diagonal.abs()
    terms = (
        (_DIAGONAL * (diagonal + _SHIFT)).exp().mean(),
        (_OFF_DIAGONAL * (rest + _SHIFT)).exp().mean(),
        (_SPEED * velocity).square().mean(),
    )
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()
