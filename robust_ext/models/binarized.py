"""The binarized classifier: a network's own features under one planted two-class readout a sample.

Class 0 holds the clean sample and its inner points, class 1 the planted ones (Zimmermann et al. 2022, algorithm 1).
A batch of problems shares the network and differs in the readouts, so a whole batch can be attacked at once; which
readout a row gets is found from the row itself, and survives attacks that subset, permute or repeat rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.errors import InvalidArgumentError, ModelError
from robust_ext.threat import ThreatModel
from robust_ext.validation import check_choice


class BinarizedClassifier(nn.Module):
    """Logits ``(M, 2)`` of rows that belong to N binarized problems.

    Row m of problem i gets ``offset_i -+ scale_i ((features(x_m) - anchor_i) . weight_i - threshold_i)``.

    Args:
        features: From inputs ``(M, ...)`` to features ``(M, F)``; shared, not copied.
        references: The clean samples ``(N, ...)``.
        weight: Directions ``(N, F)`` from class 0 to class 1.
        anchor: Origins ``(N, F)``; near the planted point, where float32 has to tell the classes apart.
        threshold: ``(N,)``, where class 1 begins along the direction.
        scale: ``(N,)``, logits a unit of the direction.
        offset: ``(N,)``, the middle of the logits.
        rows: ``"ordered"``: every batch holds the N problems in order (checked by its size). ``"any"``: a row belongs
            to the reference nearest in l2.
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
        rows: str = "any",
    ) -> None:
        super().__init__()
        self.rows = check_choice("rows", rows, ("ordered", "any"))
        count = references.shape[0]
        parts = {"weight": weight, "anchor": anchor, "threshold": threshold, "scale": scale, "offset": offset}
        for name, part in parts.items():
            if part.shape[:1] != (count,):
                raise InvalidArgumentError(name, f"shape {tuple(part.shape)}", f"{count} rows, one for each reference")
        self.features = features
        device = references.device
        self.register_buffer("references", references.detach().flatten(1))
        for name, part in parts.items():
            self.register_buffer(name, part.detach().to(device, torch.float32))
        self.eval()

    def problems(self, x: Tensor) -> Tensor | None:
        """The problem each row belongs to, int64 ``(M,)``; None where row m is problem m."""
        count = self.references.shape[0]
        if self.rows == "ordered":
            if x.shape[0] != count:
                raise ModelError(
                    f"binarized classifier: got a batch of {x.shape[0]} rows, expected the {count} problems in order; "
                    'an attack that queries other batches needs rows="any" or rows="single"'
                )
            return None
        if count == 1:
            return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        with torch.no_grad():
            flat, references = x.detach().flatten(1).double(), self.references.double()
            # argmin of |x - r|^2 over r: the term |x|^2 is the same for all. In float32 what is left of it would be
            # rounding where references are much alike.
            return (references.square().sum(1) - 2 * flat @ references.mT).argmin(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(M, 2)`` of inputs ``(M, ...)``."""
        # On numpy 2, some of ART's attacks (Boundary, HopSkipJump) send float64.
        x = x.to(self.references.dtype)
        index = self.problems(x)
        names = ("weight", "anchor", "threshold", "scale", "offset")
        parts = [getattr(self, name) for name in names]
        weight, anchor, threshold, scale, offset = parts if index is None else [part[index] for part in parts]
        # The readout works in float32 whatever the network's type: its classes can lie close together.
        along = ((self.features(x).float() - anchor) * weight).sum(1)
        signed = scale * (along - threshold)
        return torch.stack([offset - signed, offset + signed], 1)


def identifiable(references: Tensor, threat_model: ThreatModel) -> bool:
    """Whether every point in the ball around a reference is nearer (l2) to it than to any other reference.

    A perturbation d moves x towards another reference by at most ``epsilon ||r_j - r_i||_*`` (the dual norm), so the
    nearest one is right whenever that is below half the squared distance, for every pair.
    """
    flat = references.detach().flatten(1).double()
    dual = {"linf": 1.0, "l2": 2.0, "l1": torch.inf}[threat_model.norm]
    for i in range(len(flat) - 1):
        difference = flat[i + 1 :] - flat[i]
        reach = threat_model.epsilon * difference.norm(p=dual, dim=1)
        if bool((reach * 1.001 >= difference.square().sum(1) / 2).any()):
            return False
    return True
