"""The largest of several values, as in max pooling, see :mod:`robust_ext.attacks.linear_region.gates`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.gates import Gate


class Winner(Gate):
    """The largest of several values, as in max pooling.

    A row of constraints belongs to each window and each value in it: the winner minus that value. The winner's own is
    0; windows at the rim, which hold fewer values, repeat one.

    Args:
        name: The function it stands for.
        windows: int64 ``(values, windows)``, positions in a channel.
        winners: int32 ``(rows, channels, windows)``, position of each winner in the channel.
        size: Positions in a channel.
        inside: Shape of the input of one row, its entries first.
        outside: Shape of the result of one row, its entries first.
        back: For each position, the places in ``windows`` that hold it; worked out when left out.
    """

    def __init__(
        self,
        name: str,
        *,
        windows: Tensor,
        winners: Tensor,
        size: int,
        inside: tuple[int, ...],
        outside: tuple[int, ...],
        back: Tensor | None = None,
    ) -> None:
        self.name = name
        self.windows = windows
        self.winners = winners
        self.size = size
        self.inside, self.outside = inside, outside
        self.rows, self.channels = winners.shape[0], winners.shape[1]
        self.constraints = self.channels * windows.numel()
        self._back = _slots(windows, size) if back is None else back

    @cached_property
    def _indices(self) -> Tensor:
        return self.winners.flatten(0, 1).long()

    def apply(self, x: Tensor, constraints: Tensor, *, offset: bool) -> Tensor:
        """See :class:`Gate`."""
        flat = x.reshape(self.rows * self.channels, self.size)
        best = flat.gather(1, self._indices).view(self.rows, self.channels, 1, self.windows.shape[1])
        shape = (self.rows, self.channels, *self.windows.shape)
        others = flat.index_select(1, self.windows.flatten()).view(shape)
        torch.sub(best, others, out=constraints.view(shape))
        return best.view(self.rows * self.outside[0], *self.outside[1:])

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> Tensor:
        """See :class:`Gate`."""
        lines = self.rows * self.channels
        flat = multipliers.reshape(lines, self.windows.numel())
        best = flat.view(lines, *self.windows.shape).sum(1)
        if gradient is not None:
            best += gradient.reshape(best.shape)
        if self._back.shape[0] > 1 or self._back.numel() != self.windows.numel():
            # One column of zeros more, for positions that lie in fewer windows than others.
            flat = torch.nn.functional.pad(flat, (0, 1))
        spread = flat.index_select(1, self._back.flatten())
        out = spread.view(lines, *self._back.shape).sum(1).neg_() if self._back.shape[0] > 1 else spread.neg_()
        return out.scatter_add_(1, self._indices, best).view(self.rows * self.inside[0], *self.inside[1:])

    def at(self, x: Tensor, rows: int) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        flat = x.reshape(rows * self.channels, self.size)
        values = flat.index_select(1, self.windows.flatten()).view(flat.shape[0], *self.windows.shape)
        best, place = values.max(1)
        columns = torch.arange(self.windows.shape[1], device=x.device)
        winners = self.windows[place, columns].view(rows, self.channels, self.windows.shape[1])
        return self._with(winners.to(torch.int32)), best.view(rows * self.outside[0], *self.outside[1:])

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        return self._with(self.winners[rows])

    def _with(self, winners: Tensor) -> Winner:
        return Winner(
            self.name,
            windows=self.windows,
            winners=winners,
            size=self.size,
            inside=self.inside,
            outside=self.outside,
            back=self._back,
        )

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        assert isinstance(other, Winner)
        same = (self.winners == other.winners).unsqueeze(2)
        return same.expand(-1, -1, self.windows.shape[0], -1).reshape(self.rows, self.constraints)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return self.winners.flatten(1)


def _slots(windows: Tensor, size: int) -> Tensor:
    """For each position the places in ``windows`` that hold it ``(places, size)``, filled up with one past the end."""
    flat = windows.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=size)
    starts = counts.cumsum(0) - counts
    which = torch.arange(max(1, int(counts.max())), device=flat.device)[:, None]
    places = (starts + which).clamp(max=flat.numel() - 1)
    return torch.where(which < counts, order[places], flat.numel())
