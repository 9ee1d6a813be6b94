"""Multi-label models as classifiers of sets of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.criteria import MultiLabel
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import as_tensor
from robust_ext.models.wrapping import Wrapped

MOST = 20_000
"""Sets that a classifier may have: a batch of 250 then has 20 MB of logits."""


class LabelSets(Wrapped):
    """A module of logits ``(N, L)``, one a label, as a classifier of sets of labels.

    The logit of a set is minus what the label logits would have to change in sum until it is predicted, 0 for the set
    that is: ``-sum_{l in S} max(-z_l, 0) - sum_{l not in S} max(z_l, 0)``. Where a set is classified right, its margin
    is minus the least of its labels' own; its cross-entropy is the sum of theirs where all sets are known. A piecewise
    affine module stays one.

    Args:
        module: A module of logits ``(N, L)``.
        sets: Zeros and ones ``(C, L)``, one row a set.
        columns: The L columns of the module's logits that are looked at; all of them when left out.

    Example:
        >>> LabelSets(nn.Identity(), torch.tensor([[1, 0], [0, 0]]))(torch.tensor([[2.0, -1.0]]))
        tensor([[-0., -2.]])
    """

    sets: Tensor
    columns: Tensor

    def __init__(self, module: nn.Module, sets: Tensor, columns: Tensor | None = None) -> None:
        super().__init__(module)
        chosen = torch.arange(sets.shape[1]) if columns is None else columns
        self.register_buffer("sets", sets.float())
        self.register_buffer("columns", chosen)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, C)`` of inputs ``(N, ...)``."""
        logits: Tensor = self.module(x)[:, self.columns]
        sets = self.sets.to(logits.dtype)
        # Sums of numbers of one sign: that of the predicted set is exactly 0, and all others' below it.
        return -(logits.clamp_min(0) @ (1 - sets).mT + (-logits).clamp_min(0) @ sets.mT)


def classify_label_sets(
    module: nn.Module, labels: object, inputs: Tensor, criterion: MultiLabel
) -> tuple[nn.Module, Tensor]:
    """Return a classifier of the sets that occur and those that differ from them by one label, and each sample's set.

    A set is predicted wrongly exactly where one of its labels is, as the set with that label changed has a higher logit
    then.

    Args:
        module: A module of logits ``(N, L)``.
        labels: Zeros and ones ``(N, L)`` of any type.
        inputs: ``(N, ...)``, on the module's device.
        criterion: The labels that count.

    Returns:
        The classifier, and int64 ``(N,)``.

    Raises:
        InvalidArgumentError: Labels are no zeros and ones of the logits' shape, or too many sets occur.
    """
    with torch.no_grad():
        columns = module(inputs[:1].clone()).shape[1]
    given = as_tensor("labels", labels, expected=f"of shape ({len(inputs)}, {columns})").detach().to(inputs.device)
    expected = f"zeros and ones ({len(inputs)}, {columns}), one column for each logit of the multi-label model"
    if given.shape != (len(inputs), columns):
        raise InvalidArgumentError("labels", f"shape {tuple(given.shape)}", expected)
    if not bool(((given == 0) | (given == 1)).all()):
        raise InvalidArgumentError("labels", f"values in {given.min():g}..{given.max():g}", expected)
    chosen = list(range(columns)) if criterion.labels is None else list(criterion.labels)
    if max(chosen) >= columns:
        raise InvalidArgumentError("criterion", repr(criterion), f"labels below {columns}, the number of logits")
    own = given[:, chosen].to(torch.int64)
    occurring = torch.unique(own, dim=0)
    changed = (occurring[:, None] - torch.eye(len(chosen), dtype=torch.int64, device=own.device)).abs()
    sets = torch.unique(torch.cat([occurring, changed.flatten(0, 1)]), dim=0)
    if len(sets) > MOST:
        raise InvalidArgumentError(
            "labels",
            f"{len(occurring)} different rows of {len(chosen)} labels",
            f"at most {MOST // (len(chosen) + 1)} different rows: give fewer samples in a call, or choose labels, "
            "MultiLabel(labels=(0, 3))",
        )
    places = {tuple(row): place for place, row in enumerate(sets.tolist())}
    found = torch.tensor([places[tuple(row)] for row in own.tolist()], device=own.device)
    return LabelSets(module, sets, torch.tensor(chosen, device=own.device)), found
