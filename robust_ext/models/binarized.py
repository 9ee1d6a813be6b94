"""The binarized classifier: a network's own features under one planted two-class readout a sample.

Class 0 holds the clean sample and its inner points, class 1 the planted ones (Zimmermann et al. 2022, algorithm 1).
A batch of problems shares the network and differs in the readouts, so a whole batch can be attacked at once; which
readout a row gets is found from the row itself, and survives attacks that subset, permute or repeat rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice


class BinarizedClassifier(nn.Module):
    """Logits ``(M, 2)`` of rows that belong to N binarized problems.

    Row m of problem i gets ``offset_i -+ scale_i ((features(x_m) - anchor_i) . weight_i - threshold_i)``.

    Args:
        features: From inputs ``(M, ...)`` to features ``(M, F)``; shared, not copied.
        references: The clean samples ``(N, ...)``.
        weight: Directions ``(N, F)`` from class 0 to class 1.
        anchor: Origins ``(N, F)``.
        threshold: ``(N,)``, where class 1 begins along the direction.
        scale: ``(N,)``, logits a unit of the direction.
        offset: ``(N,)``, the middle of the logits.
        batching: ``"full"``: every batch holds the N problems in order (checked by its size). ``"any"``: a row belongs
            to the reference nearest in ``norm``.
        norm: The threat model's, so that a row in the ball around its reference is known by it, see
            :func:`identifiable`.
    """

    references: Tensor
    weight: Tensor
    anchor: Tensor
    threshold: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        features: nn.Module,
        *,
        references: Tensor,
        weight: Tensor,
        anchor: Tensor,
        threshold: Tensor,
        scale: Tensor,
        offset: Tensor,
        batching: str = "any",
        norm: str = "l2",
    ) -> None:
        super().__init__()
        self.batching = check_choice("batching", batching, ("full", "any"))
        self.norm = check_choice("norm", norm, NORMS)
        count = references.shape[0]
        parts = {"weight": weight, "anchor": anchor, "threshold": threshold, "scale": scale, "offset": offset}
        for name, part in parts.items():
            if part.shape[:1] != (count,):
                raise InvalidArgumentError(name, f"shape {tuple(part.shape)}", f"{count} rows, one for each reference")
        self.features = features
        device = references.device
        self.register_buffer("references", references.detach().flatten(1))
        for name, part in parts.items():
            # float32 would not keep classes apart that lie close together.
            self.register_buffer(name, part.detach().to(device, torch.float64))
        self.eval()

    def problems(self, x: Tensor) -> Tensor | None:
        """The problem each row belongs to, int64 ``(M,)``; None where row m is problem m."""
        count = self.references.shape[0]
        if self.batching == "full":
            if x.shape[0] != count:
                raise ModelError(
                    f"binarized classifier: got a batch of {x.shape[0]} rows, expected the {count} problems in order; "
                    'an attack that queries other batches needs batching="any" or batching="single"'
                )
            return None
        if count == 1:
            return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        with torch.no_grad():
            flat, references = x.detach().flatten(1).double(), self.references.double()
            if self.norm != "l2":
                return torch.cdist(flat, references, p=torch.inf if self.norm == "linf" else 1).argmin(1)
            # argmin of |x - r|^2 over r: the term |x|^2 is the same for all. In float32 what is left of it would be
            # rounding where references are much alike.
            return (references.square().sum(1) - 2 * flat @ references.mT).argmin(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(M, 2)`` of inputs ``(M, ...)``."""
        # On numpy 2, some of ART's attacks (Boundary, HopSkipJump) send float64.
        x = x.to(self.references.dtype)
        index = self.problems(x)
        return self.read(self.features(x), index)

    def read(self, features: Tensor, index: Tensor | None) -> Tensor:
        """Logits ``(M, 2)`` of floating point features ``(M, F)``; ``index`` is what :meth:`problems` returned."""
        names = ("weight", "anchor", "threshold", "scale", "offset")
        parts = [getattr(self, name) for name in names]
        weight, anchor, threshold, scale, offset = parts if index is None else [part[index] for part in parts]
        along = ((features.double() - anchor) * weight).sum(1)
        signed = scale * (along - threshold)
        return torch.stack([offset - signed, offset + signed], 1).float()


def identifiable(references: Tensor, threat_model: ThreatModel) -> bool:
    """Whether every point in the ball around a reference is nearer to it than to any other, in the threat model's norm.

    By the triangle inequality it is wherever the references are more than two epsilon apart.
    """
    flat = references.detach().flatten(1)
    reach = 2.002 * threat_model.epsilon + 2 * threat_model.tolerance(flat[:1].numel())
    for i in range(len(flat) - 1):
        rest = flat[i + 1 :]
        if bool((threat_model.distance(rest, flat[i].expand_as(rest)) <= reach).any()):
            return False
    return True
