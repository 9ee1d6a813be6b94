"""Linear readouts: the position along one direction in feature space, and their solvers."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_choice, check_number
from robust_ext.models.readouts.base import Fitted, Readout

KINDS = ("logistic", "max-margin")


@dataclass(frozen=True)
class Directions:
    """Fitted directions: ``weight`` float64 ``(B, F)`` from inner to planted points, of unit length.

    It is zero where nothing varies, NaN where the features are not finite. ``center`` float64 ``(B, F)`` is the mean of
    each problem's features, ``scale`` float64 ``(B,)`` what they were divided by; ``converged`` is bool ``(B,)``.
    """

    weight: Tensor
    center: Tensor
    scale: Tensor
    converged: Tensor


def fit_directions(features: Tensor, planted: Tensor, *, kind: str = "logistic", C: float = 10.0) -> Directions:
    """Fit one linear readout for each of B problems with features ``(B, n, F)``, in float64.

    ``planted``, bool ``(n,)``, marks rows of the planted class. ``kind`` is ``"logistic"`` regression, or
    ``"max-margin"``, scikit-learn's hard-margin support vector machine without ``C``. ``C`` weighs the losses against
    the penalty ``||w||^2 / 2``: from about 10 on the direction hardly changes. The directions need not separate.
    """
    check_choice("kind", kind, KINDS)
    check_number("C", C, minimum=0, open_minimum=True)
    if features.dim() != 3:
        raise InvalidArgumentError("features", f"shape {tuple(features.shape)}", "shape (B, n, F)")
    if planted.shape != features.shape[1:2] or planted.dtype != torch.bool:
        got = f"shape {tuple(planted.shape)}, dtype {planted.dtype}"
        raise InvalidArgumentError("planted", got, f"bool of shape ({features.shape[1]},)")
    if not 0 < int(planted.sum()) < len(planted):
        raise InvalidArgumentError("planted", f"{int(planted.sum())} of {len(planted)} rows", "rows of both classes")
    first = features[:, :1].double()
    # Constant features are exactly zero after this, and not the rounding of their mean.
    rows = features.double() - first
    mean = rows.mean(1, keepdim=True)
    rows, center = rows - mean, first + mean
    scale = rows.square().mean((1, 2)).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    rows = rows / scale[:, None, None]
    finite = torch.isfinite(rows).all(2).all(1)
    rows = rows.where(finite[:, None, None], 0.0)
    solved = _maximum_margin(rows, planted) if kind == "max-margin" else _logistic(rows, planted, C)
    weight, converged = solved
    weight = weight / weight.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    weight = weight.where(finite[:, None], torch.nan)
    return Directions(weight, center.squeeze(1), scale, converged & finite)


def _maximum_margin(rows: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``(B, F)`` and whether each problem was solved within the cap on iterations."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.svm import SVC
    except ImportError as error:
        raise MissingDependencyError(
            'the max-margin readout needs scikit-learn: pip install "robust-ext[cli]"'
        ) from error
    classes = planted.cpu().numpy()
    # C far above any multiplier of a separable problem makes the margin hard; the cap ends inseparable ones.
    fits = [SVC(kernel="linear", C=1e8, tol=1e-6, max_iter=100_000) for _ in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        weights = [torch.tensor(fit.fit(x.cpu().numpy(), classes).coef_[0]) for fit, x in zip(fits, rows, strict=True)]
    converged = torch.tensor([fit.fit_status_ == 0 for fit in fits], dtype=torch.bool, device=rows.device)
    return (torch.stack(weights).to(rows) if weights else rows.new_zeros(0, rows.shape[2])), converged


def _logistic(rows: Tensor, planted: Tensor, C: float) -> tuple[Tensor, Tensor]:
    """Weights ``(B, F)`` and whether each problem converged: damped Newton, problems that are done drop out."""
    basis: Tensor | None = None
    if rows.shape[2] > rows.shape[1]:
        # The penalty keeps the solution in the span of the rows: solve in coordinates of that span.
        basis, upper = torch.linalg.qr(rows.mT)
        rows = upper.mT
    # A column of ones takes the intercept in.
    x = torch.cat([rows, torch.ones_like(rows[:, :, :1])], 2)
    y = torch.where(planted, 1.0, -1.0).to(x)
    # The Newton matrix only shapes the steps; where C keeps it far from singular, float32 is enough for that.
    rough = x.float() if C <= 100 else x
    share = planted.double().mean()
    solution = x.new_zeros(x.shape[0], x.shape[2])
    # Start at the best constant: the intercept of the classes' odds.
    solution[:, -1] = (share / (1 - share)).log()
    result, converged = torch.empty_like(solution), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    active = torch.arange(len(x), device=x.device)
    margins = y * solution[:, -1:].expand(-1, x.shape[1])
    for _ in range(100):
        if not len(active):
            break
        wrong = torch.sigmoid(-margins)
        value = _objective(solution, margins, C)
        gradient = (x.mT @ (-C * y * wrong)[:, :, None]).squeeze(2)
        gradient[:, :-1] += solution[:, :-1]
        step = -_solve(rough, C * wrong * (1 - wrong), gradient)
        slope = (gradient * step).sum(1)
        along = y * (x @ step[:, :, None]).squeeze(2)
        length = _line_search(solution, margins, step, along, value, slope, C)
        solution = solution + length[:, None] * step
        margins = margins + length[:, None] * along
        # The Newton decrement -slope is twice the distance to the minimum, in the objective's own units.
        finished = (-slope <= 1e-10 * (1 + value)) | (length == 0)
        if bool(finished.any()):
            result[active[finished]] = solution[finished]
            converged[active[finished]] = True
            active, x, rough, solution, margins = (t[~finished] for t in (active, x, rough, solution, margins))
    result[active] = solution
    weight = result[:, :-1]
    return (weight if basis is None else (basis @ weight[:, :, None]).squeeze(2)), converged


def _objective(solution: Tensor, margins: Tensor, C: float) -> Tensor:
    return solution[:, :-1].square().sum(1) / 2 + C * torch.nn.functional.softplus(-margins).sum(1)


def _solve(x: Tensor, curvature: Tensor, gradient: Tensor) -> Tensor:
    """Solve the Newton system of ``diag(1, .., 1, 0) + X' D X``; the intercept, last, has no penalty."""
    # Few rows have curvature once a direction is found; what the others add is too small to change the direction much.
    keep = int((curvature > 1e-6 * curvature.amax(1, keepdim=True)).sum(1).max())
    if keep < 0.5 * x.shape[1]:
        curvature, index = curvature.topk(keep, dim=1, sorted=False)
        x = x[torch.arange(len(x), device=x.device)[:, None], index]
    weighted = x * curvature.sqrt().to(x)[:, :, None]
    matrix = (weighted.mT @ weighted).double()
    diagonal = torch.ones_like(gradient[0])
    # A trace keeps the system solvable where no row has curvature.
    diagonal[-1] = 1e-10
    matrix.diagonal(dim1=1, dim2=2).add_(diagonal)
    return torch.cholesky_solve(gradient[:, :, None], torch.linalg.cholesky(matrix)).squeeze(2)


def _line_search(
    solution: Tensor, margins: Tensor, step: Tensor, along: Tensor, value: Tensor, slope: Tensor, C: float
) -> Tensor:
    """Largest of 1, 1/2, 1/4, ... that gives a tenth of the promised decrease; 0 where none does."""
    length = torch.ones_like(value)
    short = torch.ones_like(value, dtype=torch.bool)
    for _ in range(40):
        new = _objective(solution + length[:, None] * step, margins + length[:, None] * along, C)
        # The slack is rounding: near the minimum the promised decrease is smaller than one.
        short = new > value + 0.1 * length * slope + 1e-13 * value.abs()
        if not bool(short.any()):
            return length
        length = torch.where(short, length / 2, length)
    return torch.where(short, 0.0, length)


class Linear(Readout):
    """``score = (features - anchor) . weight`` with unit ``weight`` ``(B, F)``.

    ``anchor`` ``(B, F)`` is where the closest planted point lies along the direction from the clean sample: the readout
    holds its position along the direction, and no more of it.
    """

    axes: ClassVar[tuple[str, ...]] = ("F",)

    @abstractmethod
    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Unit directions, float64 ``(B, F)``, from inner to planted points; ``features`` ``(B, n, F)``."""

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """``weight`` and ``anchor``, which is the clean sample until :meth:`anchored`; ``features`` ``(B, n, F)``."""
        return {"weight": self.directions(features, planted), "anchor": features[:, 0].double()}

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The position along the direction, from the anchor."""
        return ((features.double() - parameters["anchor"]) * parameters["weight"]).sum(1)

    def scores(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The same of the features ``(B, n, F)`` of B problems, as a product of matrices."""
        return positions(features, parameters["weight"], parameters["anchor"])

    def anchored(self, parameters: dict[str, Tensor], edge: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The anchor at the closest planted point, whose score is 0 then."""
        weight = parameters["weight"]
        return {**parameters, "anchor": parameters["anchor"] + edge[:, None] * weight}, edge * 0


@settings_class
class Logistic(Linear):
    """Logistic regression (section 3.1 and appendix A.2)."""

    C: float = setting(
        default=10.0,
        help="Weight of the losses, see :func:`robust_ext.models.readouts.fit_directions`; raised for the "
        "problems that it keeps from being separated.",
        above=0,
    )

    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Return the directions of logistic regression."""
        return separating_directions(features, planted, C=self.C)


@settings_class
class MaxMargin(Linear):
    """The maximum margin."""

    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Return the directions of the maximum margin."""
        return fit_directions(features, planted, kind="max-margin").weight


def positions(features: Tensor, weight: Tensor, anchor: Tensor) -> Tensor:
    """Positions of features ``(B, n, F)`` along directions ``(B, F)``, float64 ``(B, n)``, from anchors ``(B, F)``."""
    return ((features.double() - anchor[:, None]) @ weight[:, :, None]).squeeze(2)


def separating_directions(features: Tensor, planted: Tensor, *, C: float, draws: int = 1) -> Tensor:
    """Directions ``(B, F)``; where the penalty keeps one from separating what can be separated, it is lowered.

    Every ``draws`` rows in turn belong to one point, whose position is their mean.
    """
    points, planted = planted, planted.repeat_interleave(draws)
    direction = fit_directions(features, planted, C=C).weight
    for factor in (1e3, 1e6):
        along = positions(features, direction, features[:, 0].double()).view(len(features), -1, draws).mean(2)
        mixed = along[:, points].min(1).values <= along[:, ~points].max(1).values
        if not bool(mixed.any()):
            break
        direction[mixed] = fit_directions(features[mixed], planted, C=C * factor).weight
    return direction


def unit_positions(along: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets and scales that normalise positions ``(B, n)``, float64 ``(B,)`` each.

    After that the closest planted point is at 0 and the closest inner one at -1. Where these overlap, the divisor is
    the standard deviation of all of them, or 1 where that is 0.
    """
    begin = along[:, planted].amin(1)
    gap = begin - along[:, ~planted].amax(1)
    spread = along.std(1, correction=0)
    return begin, torch.where(gap > 0, gap, torch.where(spread > 0, spread, torch.where(spread.isnan(), spread, 1.0)))


def fit_members(features: Tensor, planted: Tensor, *, C: float) -> dict[str, Tensor]:
    """One linear readout for each of K members with features ``(B, n, K, F)``, see :func:`member_positions`.

    Directions ``weight`` and origins ``anchor`` are ``(B, K, F)``, divisors ``unit`` ``(B, K)``.
    """
    problems, _, members, size = features.shape
    # (B K, n, F): every member of every problem is a problem of its own.
    rows = features.transpose(1, 2).flatten(0, 1)
    weight = separating_directions(rows, planted, C=C)
    first = rows[:, 0].double()
    begin, unit = unit_positions(positions(rows, weight, first), planted)
    found = {"weight": weight, "anchor": first + begin[:, None] * weight}
    shaped = {name: part.view(problems, members, size) for name, part in found.items()}
    return {**shaped, "unit": unit.view(problems, members)}


def member_positions(features: Tensor, parameters: Fitted) -> Tensor:
    """Positions ``(M, K)`` of the features ``(M, K, F)`` of members, see :func:`unit_positions`."""
    along = ((features.double() - parameters["anchor"]) * parameters["weight"]).sum(2)
    return along / parameters["unit"]
