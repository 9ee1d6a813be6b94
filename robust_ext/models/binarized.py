"""The binarized classifier: a network's own features under one planted two-class readout a sample.

Class 0 holds the clean sample and its inner points, class 1 the planted ones (Zimmermann et al. 2022, algorithm 1).
A batch of problems shares the network and differs in the readouts, so a whole batch can be attacked at once; which
readout a row gets is found from its place in the batch or from the row itself, which survives attacks that subset,
permute or repeat rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.machine import RowLimit
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.models.readouts.base import Readout
from robust_ext.models.readouts.linear import Logistic

_ORDERS = {"linf": torch.inf, "l2": 2, "l1": 1}


class BinarizedClassifier(nn.Module):
    """Logits ``(M, 2)`` of rows that belong to N binarized problems.

    Row m of problem i gets the readout's logits with the parameters of problem i; unless the readout has others, these
    are ``offset_i -+ scale_i (score(features(x_m), parameters_i) - threshold_i)``, where the score of a linear one is
    ``(features(x_m) - anchor_i) . weight_i``.

    Which problem a row belongs to follows from ``batching``. With ``"auto"``, a row is *known* where it is closer to a
    reference than half that reference's distance from the next one, in ``norm``: these balls are disjoint, and nothing
    in one of them is nearer to another reference. A batch of N rows none of which is known to belong to another row's
    problem is in row order, and row m is problem m however far it lies. In every other batch a row belongs to the
    nearest reference, and a row that is not known is refused: the nearest rule can be wrong there. Two things cannot be
    told: N rows in another order, all of them far; and a row that has wandered into another reference's ball.

    Args:
        features: From inputs ``(M, ...)`` to features ``(M, *F)``; shared, not copied.
        references: The clean samples ``(N, ...)``.
        threshold: ``(N,)``, the score above which class 1 begins.
        scale: ``(N,)``, logits a unit of the score.
        offset: ``(N,)``, the middle of the logits.
        readout: What makes scores and logits of features; a linear one where left out.
        batching: ``"full"``: every batch holds the N problems in order (checked by its size). ``"any"``: a row belongs
            to the reference nearest in ``norm``, however far. ``"auto"``: as above.
        norm: The threat model's, so that a row in the ball around its reference is known by it, see
            :func:`identifiable`.
        **parameters: The readout's, each ``(N, ...)``; they become buffers of their names. A linear one has ``weight``
            and ``anchor``.
    """

    references: Tensor
    threshold: Tensor
    scale: Tensor
    offset: Tensor
    radii: Tensor | None

    def __init__(
        self,
        features: nn.Module,
        *,
        references: Tensor,
        threshold: Tensor,
        scale: Tensor,
        offset: Tensor,
        readout: Readout | None = None,
        batching: str = "any",
        norm: str = "l2",
        **parameters: Tensor,
    ) -> None:
        super().__init__()
        self.batching = check_choice("batching", batching, ("full", "any", "auto"))
        self.norm = check_choice("norm", norm, NORMS)
        count = references.shape[0]
        parts = {**parameters, "threshold": threshold, "scale": scale, "offset": offset}
        for name, part in parts.items():
            if part.shape[:1] != (count,):
                raise InvalidArgumentError(name, f"shape {tuple(part.shape)}", f"{count} rows, one for each reference")
        self.features = features
        self.readout = Logistic() if readout is None else readout
        self.names = tuple(parameters)
        device = references.device
        self.register_buffer("references", references.detach().flatten(1))
        self.register_buffer("radii", cell_radii(references, self.norm) if batching == "auto" else None)
        for name, part in parts.items():
            if hasattr(self, name):
                taken = f"a parameter of the readout called {name!r}"
                raise InvalidArgumentError(name, taken, "a name that no attribute of a binarized classifier has")
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
            if self.norm == "l2":
                # argmin of |x - r|^2 over r: the term |x|^2 is the same for all. In float32 what is left of it would be
                # rounding where references are much alike.
                nearest = (references.square().sum(1) - 2 * flat @ references.mT).argmin(1)
            else:
                nearest = torch.cdist(flat, references, p=_ORDERS[self.norm]).argmin(1)
            return nearest if self.radii is None else self._recognised(flat, nearest, self.radii[nearest])

    def _recognised(self, flat: Tensor, nearest: Tensor, limit: Tensor) -> Tensor | None:
        """With ``batching="auto"``: None for a batch in row order, else ``nearest``; ModelError beyond the limits."""
        away = torch.linalg.vector_norm(flat - self.references[nearest], ord=_ORDERS[self.norm], dim=1)
        known, count = away < limit, self.references.shape[0]
        if len(flat) == count and not bool((known & (nearest != torch.arange(count, device=flat.device))).any()):
            return None
        if not bool(known.all()):
            row = int((~known).nonzero()[0])
            raise ModelError(
                f"binarized classifier: row {row} of a batch of {len(flat)} lies {float(away[row]):.4g} ({self.norm}) "
                f"from the nearest of the {count} inputs, expected less than {float(limit[row]):.4g}; farther away "
                f"only a batch of all {count} rows in order shows whose it is: have the attack query such batches, or "
                "attack one problem at a time, see single(row)"
            )
        return nearest

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(M, 2)`` of inputs ``(M, ...)``."""
        # On numpy 2, some of ART's attacks (Boundary, HopSkipJump) send float64.
        x = x.to(self.references.dtype)
        index = self.problems(x)
        if torch.is_grad_enabled():
            return self.read(self.features(x), index)
        # Features of a row depend on that row alone, so a batch that does not fit into memory goes through in parts.
        return self.read(RowLimit(len(x)).run(self.features, x), index)

    def read(self, features: Tensor, index: Tensor | None) -> Tensor:
        """Logits ``(M, 2)`` of floating point features ``(M, *F)``; ``index`` is what :meth:`problems` returned."""
        parts = [getattr(self, name) for name in (*self.names, "threshold", "scale", "offset")]
        *own, threshold, scale, offset = parts if index is None else [part[index] for part in parts]
        parameters = dict(zip(self.names, own, strict=True))
        return self.readout.logits(features, parameters, threshold, scale, offset).float()

    def scores(self, points: Tensor, logits: Tensor) -> Tensor:
        """Scores, float64 ``(N,)``, of points ``(N, ...)`` in row order that have these logits ``(N, 2)``.

        They follow from the logits, which whoever verifies points has anyway, unless the readout has logits of its own.
        """
        if type(self.readout).logits is Readout.logits:
            return (logits[:, 1] - logits[:, 0]).double() / 2 / self.scale + self.threshold
        with torch.no_grad():
            features = self.features(points.to(self.references.dtype))
            return self.readout.score(features, {name: getattr(self, name) for name in self.names})


def cell_radii(references: Tensor, norm: str) -> Tensor:
    """Half the distance of each reference ``(N, ...)`` from the nearest other, float64 ``(N,)``; inf where it is alone.

    By the triangle inequality, a point closer than that to a reference is nearer to it than to any other.
    """
    flat = references.detach().flatten(1).double()
    if len(flat) < 2:
        return flat.new_full((len(flat),), torch.inf)
    # The quicker way by a matrix product loses digits where references are much alike.
    between = torch.cdist(flat, flat, p=_ORDERS[norm], compute_mode="donot_use_mm_for_euclid_dist")
    return between.fill_diagonal_(torch.inf).amin(1) / 2


def identifiable(references: Tensor, threat_model: ThreatModel) -> bool:
    """Return whether every point in a reference's ball is nearer to it than to any other, in the threat model's norm.

    It is where the references are more than two epsilon apart, with a slack of a thousandth.
    """
    reach = 1.001 * threat_model.epsilon + threat_model.tolerance(references[:1].numel())
    return bool((cell_radii(references, threat_model.norm) > reach).all())
