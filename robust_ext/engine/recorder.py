"""The recorder: small statistics of every query of an attack, for each row, from any library.

It watches the target's module, so it sees inputs, logits, and the gradients that flow back through both. Nothing of a
query is kept but a few numbers, next to the last point and its gradient, and the points at which logits are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.errors import AttackError
from robust_ext.core.foreign import without_values
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.steps import Checkpoints, Query, Steps, put, sampled
from robust_ext.engine.trace import COLUMNS, Trace, Witnesses, no_values

# Below this margin the largest probability rounds to 1 in float32, and cross-entropy and its gradient to 0.
_SATURATED = -16.63
# Points that a line through the inputs explains to this part are the inputs on another scale, where its slope is
# another than 1 by so much, or their mean is another by such a part of the bounds.
_ALIKE, _SCALED, _SHIFTED = 0.9, 0.1, 0.2
# How far from a multiple of 1/255, in these.
_ON_GRID = 2e-3


class Recorder:
    """Statistics of the queries of ``inputs`` ``(N, ...)`` with ``labels`` ``(N,)``, the goals of a criterion."""

    def __init__(
        self, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, criterion: Criterion = MISCLASSIFICATION
    ) -> None:
        count, device = len(inputs), inputs.device
        self._inputs, self._labels, self._threat_model, self._criterion = inputs, labels, threat_model, criterion
        self._clean = inputs.detach().flatten(1)
        self._squares = self._clean.square().sum(1)
        self._limit = 1 + threat_model.tolerance(self._clean[:1].numel()) / threat_model.epsilon
        self._classes = int(labels.max()) + 1 if count else 0
        self._depth, self._current = 0, None  # type: int, Query | None
        sums = ("queries", "graphs", "cut", "gradients", "zero", "non_finite", "zero_loss", "other_label", "saturated")
        self._sums = {
            name: torch.zeros(count, dtype=torch.float64, device=device)
            for name in (*sums, "outside", "unmoved", "looked", "elsewhere")
        }
        lowest = torch.full((count,), -torch.inf, device=device)
        self._highest = {name: lowest.clone() for name in ("best", "scale", "reach", "fallen", "longest")}
        self._latest = {
            name: torch.full((count,), torch.nan, device=device)
            for name in ("first", "last", "end", "low", "high", "best_at", "adversarial_at", "slope", "shift", "grid")
        }
        self._full = 0  # Queries of all rows in order
        self._partly = False  # Whether there were others
        self._kept, self._steps = Checkpoints(count, device), Steps(self._clean, threat_model)
        self.witnesses = Witnesses(inputs, threat_model)

    def enter(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before a module that is watched is called: have the gradient at its input noted."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._current = Query()
        x = args[0] if args else None
        if not _readable(x) or not x.requires_grad or not torch.is_grad_enabled():
            return None
        self._current.graph = True
        # A hook on the caller's own tensor would stay on it, and be called at every later pass.
        x = x.view_as(x)
        x.register_hook(partial(self._note_gradient, self._current))  # type: ignore[no-untyped-call]
        return (x, *args[1:])

    def leave(self, _module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """After it: note points and logits, and have the gradient at the logits noted."""
        self._depth -= 1
        if self._depth or not args or not _readable(args[0]) or not _readable(out):
            return None
        query, points = self._current, args[0]
        assert query is not None
        # A mode or subclass that records operations must not record this.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.witnesses.note(points.detach(), out.detach())
            self._note(query, points.detach(), out.detach(), cut=query.graph and not out.requires_grad)
        if query.points is None or not out.requires_grad:
            return None
        seen = out.view_as(out) if out is points else out
        seen.register_hook(partial(self._note_loss, query))  # type: ignore[no-untyped-call]
        return seen if seen is not out else None

    def _note(self, query: Query, points: Tensor, logits: Tensor, *, cut: bool) -> None:
        shape = self._inputs.shape[1:]
        if points.shape[1:] != shape or logits.dim() != 2 or len(logits) != len(points) or not len(points):
            return
        if logits.shape[1] < max(2, self._classes):
            return
        flat = points.flatten(1).to(self._clean)
        # A point belongs to the row of the nearest input.
        away_from = self._squares - 2 * flat @ self._clean.mT if len(flat) != len(self._clean) else None
        rows = None if away_from is None else away_from.argmin(1)
        query.rows, query.number = rows, self._number(rows)
        labels = self._labels if rows is None else self._labels[rows]
        away = flat - (self._clean if rows is None else self._clean[rows])
        distance = self._length(away)
        logits = logits.to(self._highest["best"])
        margin = self._criterion.margin(logits, labels)
        low, high = self._threat_model.bounds
        slack = 1e-6 * max(abs(low), abs(high))
        # Along rows aminmax, like the linf norm of linalg, takes 15 times as long on a CPU.
        least, most = flat.amin(1), flat.amax(1)
        inside = (distance <= self._limit) & (least >= low - slack) & (most <= high + slack)
        self._set("first", rows, margin, only=self._of(self._sums["queries"], rows) == 0)
        self._add("queries", rows, torch.ones_like(distance))
        if query.graph:
            self._add("graphs", rows, torch.ones_like(distance))
        if cut:
            self._add("cut", rows, torch.ones_like(distance))
        self._add("saturated", rows, (-margin if self._criterion.aims else margin) < _SATURATED)
        self._add("outside", rows, ~inside)
        self._add("unmoved", rows, distance == 0)
        for name, values in (("last", margin), ("end", distance), ("low", least), ("high", most)):
            self._set(name, rows, values)
        self._raise("scale", rows, logits.abs().amax(1))
        self._raise("reach", rows, distance)
        self._raise("fallen", rows, -margin)
        counted = margin.where(inside, -torch.inf)
        number = torch.full_like(margin, query.number)
        self._set("best_at", rows, number, only=counted > self._of(self._highest["best"], rows))
        unsolved = self._of(self._latest["adversarial_at"], rows).isnan()
        self._set("adversarial_at", rows, number, only=(counted > 0) & unsolved)
        self._raise("best", rows, counted)
        if query.graph:
            # Attacks work on their points in place.
            query.points = flat.clone() if flat.data_ptr() == points.data_ptr() else flat
            if sampled(query.number):
                self._note_place(rows, flat, inside)
        if self._kept.due(query.number):
            best = self._of(self._highest["best"], rows)
            self._kept.add(query.number, rows, best, margin=margin, distance=distance, adversarial=counted > 0)

    def _note_place(self, rows: Tensor | None, flat: Tensor, inside: Tensor) -> None:
        """Return whether points are inputs that are scaled or shifted, and whether they lie on the grid of 8 bits."""
        clean, size = (self._clean if rows is None else self._clean[rows]), flat.shape[1]
        ours, theirs = clean.sum(1), flat.sum(1)
        shared = (flat * clean).sum(1) - ours * theirs / size
        spread = self._of(self._squares, rows) - ours.square() / size
        slope, fit = shared / spread, shared.square() / spread / (flat.square().sum(1) - theirs.square() / size)
        low, width = self._threat_model.bounds[0], self._threat_model.width
        shift = (theirs - slope * ours) / size
        away = ((slope - 1).abs() > _SCALED) | ((theirs - ours).abs() > _SHIFTED * width * size)
        self._add("looked", rows, torch.ones_like(slope))
        self._add("elsewhere", rows, ~inside & (fit > _ALIKE) & away)
        self._set("slope", rows, slope)
        self._set("shift", rows, shift)
        cells = (flat - low) * (255 / width)
        self._set("grid", rows, ((cells - cells.round()).abs().amax(1) < _ON_GRID).to(slope))

    def _note_loss(self, query: Query, gradient: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            gradient = gradient.detach()
            self._add("zero_loss", query.rows, (gradient == 0).all(1))
            labels = self._labels if query.rows is None else self._labels[query.rows]
            away = (gradient.sum(1) - 2 * gradient.gather(1, labels[:, None])[:, 0]).sign()
            query.sense = -away if self._criterion.aims else away
            if gradient.shape[1] < 3:
                # Of two entries each is alone, and which one is the label's cannot be seen.
                return
            negative, positive = gradient < 0, gradient > 0
            below, above = negative.sum(1), positive.sum(1)
            lone = torch.where(below == 1, negative.int().argmax(1), positive.int().argmax(1))
            like_ce = ((below == 1) & (above > 1)) | ((above == 1) & (below > 1))
            self._add("other_label", query.rows, like_ce & (lone != labels))

    def _note_gradient(self, query: Query, gradient: Tensor) -> None:
        if query.points is None or not _readable(gradient):
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            rows, flat = query.rows, gradient.detach().flatten(1)
            size = flat.abs().amax(1)
            finite = torch.isfinite(size)
            self._add("gradients", rows, torch.ones_like(size))
            self._add("zero", rows, size == 0)
            self._add("non_finite", rows, ~finite)
            self._kept.add_gradient(query.number, size.where(finite, 0))
            # Products of tiny gradients would round to 0.
            query.direction = flat / size.clamp_min(torch.finfo(flat.dtype).tiny)[:, None]
            away = self._steps.add(query)
            if away is None:
                return
            moved = self._length(away)
            self._raise("longest", rows, moved)
            if self._kept.due(query.number):
                self._kept.add_step(query.number, rows, moved)

    def _length(self, away: Tensor) -> Tensor:
        """Return the length of each row ``(n, D)``, in epsilons."""
        norm, epsilon = self._threat_model.norm, self._threat_model.epsilon
        length = away.abs().amax(1) if norm == "linf" else torch.linalg.vector_norm(away, ord=int(norm[1:]), dim=1)
        return length / epsilon

    def _number(self, rows: Tensor | None) -> int:
        if rows is None and not self._partly:
            self._full += 1
            return self._full - 1
        self._partly = True
        return int(self._sums["queries"][0 if rows is None else rows[0]])

    def _of(self, values: Tensor, rows: Tensor | None) -> Tensor:
        return values if rows is None else values[rows]

    def _add(self, name: str, rows: Tensor | None, values: Tensor) -> None:
        sums = self._sums[name]
        if rows is None:
            sums += values
        else:
            sums.index_add_(0, rows, values.to(sums))

    def _raise(self, name: str, rows: Tensor | None, values: Tensor) -> None:
        highest = self._highest[name]
        if rows is None:
            torch.fmax(highest, values, out=highest)
        else:
            highest.scatter_reduce_(0, rows, values.nan_to_num(-torch.inf, torch.inf, -torch.inf), "amax")

    def _set(self, name: str, rows: Tensor | None, values: Tensor, *, only: Tensor | None = None) -> None:
        latest = self._latest[name]
        if only is not None and rows is None:
            values = torch.where(only, values, latest)
        elif only is not None and rows is not None:
            # A row may be there twice, once with a value to be kept.
            rows, values = rows[only], values[only]
        put(latest, rows, values)

    @property
    def cut(self) -> bool:
        """True if logits came without a graph where gradients were wanted, and none arrived."""
        return bool(self._sums["cut"].any()) and not bool(self._sums["gradients"].any())

    def trace(self, returned: object = None) -> Trace:
        """Return the recording; for a single-step attack, ``returned`` shows the step."""
        count = len(self._clean)
        if _readable(returned) and without_values(returned) is None and returned.shape == self._inputs.shape:
            self._steps.end(returned.detach().flatten(1).to(self._clean))
        found = {name: values.double().cpu() for name, values in (*self._sums.items(), *self._latest.items())}
        for name, values in self._highest.items():
            found[name] = values.double().cpu()
        nan = torch.full((count,), torch.nan, dtype=torch.float64)
        for name in ("zero", "non_finite", "zero_loss", "other_label"):
            found[name] = found[name].where(found["gradients"] + found["zero_loss"] > 0, nan)
        found["elsewhere"] = (found["elsewhere"] / found["looked"]).where(found["looked"] > 0, nan)
        found |= self._steps.found()
        found["late"] = self._kept.late(found["queries"], found["best"])
        found["recent"] = self._kept.recent(found["queries"], found["best"])
        found["lowest"], found["step"] = -found["fallen"], self._kept.median_step()
        found["batch_queries"] = nan.new_full((count,), float(found["queries"].max())) if count else nan
        values = torch.stack([found[name] for name in COLUMNS], 1) if count else no_values(0)
        return Trace(values=values, curve=self._kept.curve())


def _readable(value: object) -> TypeGuard[Tensor]:
    """Return whether it is a tensor with values: inside vmap and similar there are none to look at."""
    return isinstance(value, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value)


@contextmanager
def record_queries(target: Target, inputs: Tensor, labels: Tensor, threat_model: ThreatModel) -> Iterator[Recorder]:
    """Record queries to the target and their results, by any attack.

    Where one raises after logits were not finite, or came without a graph and no gradient came back to it, its
    AttackError mentions that.
    """
    recorder = Recorder(inputs, labels, threat_model, criterion=target.criterion)
    modules = [target.module] if target.defended is None else [target.module, target.defended.classifier]
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.enter_context(module.register_forward_pre_hook(recorder.enter))
            stack.enter_context(module.register_forward_hook(recorder.leave, always_call=True))
        try:
            yield recorder
        except AttackError as error:
            met = []
            if recorder.cut:
                met.append(
                    "no gradient came back from the model to its inputs: a layer cuts the graph (detach, no_grad, "
                    "numpy, argmax), and a diagnosis finds which; give that layer another backward pass (BPDA)"
                )
            if recorder.witnesses.points is not None:
                met.append("the model returned NaN or infinite logits at points that it queried: fix the model first")
            if type(error) is not AttackError or not met:
                raise
            raise AttackError("; before that, ".join([str(error), *met])) from error
