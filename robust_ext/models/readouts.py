"""Linear readouts that separate planted from inner points, fitted for a whole batch of problems at once.

Logistic regression (Zimmermann et al. 2022, section 3.1 and appendix A.2) or the maximum margin, both with a free
intercept, on features that are centred and divided by one scale a problem, so that C means the same for every network.
The paper trains without a penalty; separable data have no such minimum (the weights grow without end and the result
is where the optimiser happens to stop), so the penalty here is small and finite, and the minimum is unique.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.validation import check_choice, check_number

READOUTS = ("logistic", "max-margin")


@dataclass(frozen=True)
class Directions:
    """Fitted directions.

    Args:
        weight: float64 ``(B, F)``, pointing from inner to planted points, of unit length (zero where nothing varies,
            NaN where the features are not finite).
        center: float64 ``(B, F)``, the mean of each problem's features.
        scale: float64 ``(B,)``, the scale its features were divided by.
        converged: bool ``(B,)``.
    """

    weight: Tensor
    center: Tensor
    scale: Tensor
    converged: Tensor


def fit_directions(features: Tensor, planted: Tensor, *, kind: str = "logistic", C: float = 10.0) -> Directions:
    """Fit one linear readout for each of B problems.

    Args:
        features: ``(B, n, F)``, any float dtype; solved in float64.
        planted: bool ``(n,)``, True for rows of the planted class.
        kind: ``"logistic"``: logistic regression. ``"max-margin"``: the hard-margin support vector machine, by
            scikit-learn (``C`` is not used).
        C: Weight of the losses against the penalty ``||w||^2 / 2``, as in scikit-learn's ``LogisticRegression``.
            From about 10 on the direction hardly changes; smaller values give easier tests.

    Returns:
        The directions. Whether they separate is for :func:`place_boundary` to say.

    Example:
        >>> rows = torch.tensor([[[0.0, 0.0], [0.0, 1.0], [1.0, 0.5]]])
        >>> fit_directions(rows, torch.tensor([False, False, True])).weight.round(decimals=3).abs()
        tensor([[1., 0.]], dtype=torch.float64)
    """
    check_choice("kind", kind, READOUTS)
    check_number("C", C, minimum=0, open_minimum=True)
    if features.dim() != 3:
        raise InvalidArgumentError("features", f"shape {tuple(features.shape)}", "shape (B, n, F)")
    if planted.shape != features.shape[1:2] or planted.dtype != torch.bool:
        raise InvalidArgumentError(
            "planted", f"shape {tuple(planted.shape)}, dtype {planted.dtype}", f"bool of shape ({features.shape[1]},)"
        )
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
    if kind == "max-margin":
        weight, converged = _maximum_margin(rows, planted)
    else:
        weight, converged = _logistic(rows, planted, C)
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
        rows = upper.mT.contiguous()
    problems, _, size = rows.shape
    signs = torch.where(planted, 1.0, -1.0).to(rows).expand(rows.shape[:2])
    # Start at the best constant: the intercept of the classes' odds.
    share = planted.double().mean()
    solution = rows.new_zeros(problems, size + 1)
    solution[:, size] = (share / (1 - share)).log()
    converged = torch.zeros(problems, dtype=torch.bool, device=rows.device)
    active = torch.arange(problems, device=rows.device)
    for _ in range(100):
        if not active.numel():
            break
        x, y, current = (
            (rows, signs, solution) if len(active) == problems else (t[active] for t in (rows, signs, solution))
        )
        margins = y * _outputs(x, current)
        wrong = torch.sigmoid(-margins)
        value = _objective(current, margins, C)
        pull = -C * y * wrong
        gradient = torch.cat([current[:, :size] + (x.mT @ pull[:, :, None]).squeeze(2), pull.sum(1, keepdim=True)], 1)
        step = -_solve(x, C * wrong * (1 - wrong), gradient)
        slope = (gradient * step).sum(1)
        length = _line_search(x, y, current, step, value, slope, C)
        solution[active] = current + length[:, None] * step
        # The Newton decrement -slope is twice the distance to the minimum, in the objective's own units.
        finished = (-slope <= 1e-10 * (1 + value)) | (length == 0)
        converged[active[finished]] = True
        active = active[~finished]
    weight = solution[:, :size]
    return (weight if basis is None else (basis @ weight[:, :, None]).squeeze(2)), converged


def _outputs(rows: Tensor, solution: Tensor) -> Tensor:
    return (rows @ solution[:, :-1, None]).squeeze(2) + solution[:, -1:]


def _objective(solution: Tensor, margins: Tensor, C: float) -> Tensor:
    return solution[:, :-1].square().sum(1) / 2 + C * torch.nn.functional.softplus(-margins).sum(1)


def _solve(rows: Tensor, curvature: Tensor, gradient: Tensor) -> Tensor:
    """Solve the Newton system of ``diag(1, .., 1, 0) + X' D X`` with X extended by a column of ones."""
    size = rows.shape[2]
    # Few rows have curvature once a direction is found; what the others add is too small to change the direction much.
    keep = int((curvature > 1e-6 * curvature.amax(1, keepdim=True)).sum(1).max())
    if keep < rows.shape[1]:
        curvature, index = curvature.topk(keep, dim=1)
        rows = rows.gather(1, index[:, :, None].expand(-1, -1, size))
    root = curvature.sqrt()
    weighted = torch.cat([rows * root[:, :, None], root[:, :, None]], 2)
    matrix = weighted.mT @ weighted
    diagonal = torch.ones(size + 1, dtype=rows.dtype, device=rows.device)
    # The intercept has no penalty; a trace keeps the system solvable where no row has curvature.
    diagonal[size] = 1e-10
    matrix.diagonal(dim1=1, dim2=2).add_(diagonal)
    return torch.cholesky_solve(gradient[:, :, None], torch.linalg.cholesky(matrix)).squeeze(2)


def _line_search(x: Tensor, y: Tensor, current: Tensor, step: Tensor, value: Tensor, slope: Tensor, C: float) -> Tensor:
    """Largest of 1, 1/2, 1/4, ... that gives a tenth of the promised decrease; 0 where none does."""
    start, along = _outputs(x, current), _outputs(x, step)
    length = torch.ones_like(value)
    short = torch.ones_like(value, dtype=torch.bool)
    for _ in range(40):
        moved = current + length[:, None] * step
        new = _objective(moved, y * (start + length[:, None] * along), C)
        # The slack is rounding: near the minimum the promised decrease is smaller than one.
        short = new > value + 0.1 * length * slope + 1e-13 * value.abs()
        if not bool(short.any()):
            return length
        length = torch.where(short, length / 2, length)
    return torch.where(short, 0.0, length)
