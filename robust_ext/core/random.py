"""Randomness that is counted, not consumed.

Every draw comes from a generator derived from (seed, sample, purpose), so the points of a sample do not depend on the
batch it is in, on the order of the samples, on the attack, or on what was drawn before. Libraries that know only
global seeds run inside :func:`seeded_globals`.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.validation import check_integer

# Part of what identifies a run: another number wherever the same key gives other numbers, or points other draws.
STREAMS = 2

# Shifts and factors of lowbias32, as signed numbers of 32 bits.
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None))
_ONE = 0x3F800000  # 1.0 in float32
# Normal and Laplace numbers are quantiles in units of that many parts; whole numbers, so that sums are exact.
_PARTS = 40_000
_QUANTILES = 2**15


class CountedRows:
    """Rows ``start`` to ``start + count`` of the streams of B keys, without synchronising with the device.

    Args:
        keys: Whole numbers in [0, 2**64), one a stream, usually of :func:`robust_ext.core.random.derive_seed`.
        count: Number of rows of each.
        start: Index of the first row; rows end below 2**31.
        device: Where numbers are made.

    Example:
        >>> rows = CountedRows([7], 3)
        >>> torch.equal(rows.words(5)[:, 2:], CountedRows([7], 1, start=2).words(5))
        True
    """

    def __init__(self, keys: Sequence[int], count: int, *, start: int = 0, device: torch.device | str = "cpu") -> None:
        checked = [check_integer("key", key, minimum=0, maximum=2**64 - 1) for key in keys]
        hashed = b"".join(hashlib.blake2b(key.to_bytes(8, "little"), digest_size=16).digest() for key in checked)
        words = torch.tensor(struct.unpack(f"<{4 * len(checked)}i", hashed), dtype=torch.int32, device="cpu")
        words = words.view(len(checked), 4, 1).to(device, non_blocking=True)
        rows = torch.arange(start, start + count, dtype=torch.int32, device=device)
        self._first = _mixed(rows, words[:, 0], words[:, 1])[..., None]
        self._second = _mixed(rows, words[:, 2], words[:, 3])[..., None]

    def words(self, size: int, *, skip: int = 0) -> Tensor:
        """Places ``skip`` to ``skip + size`` of each row: int32 ``(B, count, size)``, all 32 bits random."""
        places = torch.arange(skip, skip + size, dtype=torch.int32, device=self._first.device)
        return _mixed(places, self._first, self._second)

    def centred(self, size: int) -> Tensor:
        """Uniform whole numbers in [-2**23, 2**23), int32 ``(B, count, size)``, which float32 holds."""
        return self.words(size).bitwise_right_shift_(8)

    def uniforms(self, size: int) -> Tensor:
        """Uniform in [0, 1), in steps of 2**-24, float64 ``(B, count, size)``."""
        return self.centred(size).double().mul_(2.0**-24).add_(0.5)

    def below(self, threshold: Tensor) -> Tensor:
        """True with probability ``threshold / 2**24``, bool ``(B, count, D)``, for int32 ``(B, 1, D)``."""
        return self.words(threshold.shape[-1]).bitwise_right_shift_(8).bitwise_and_(2**24 - 1) < threshold

    def signs(self, size: int) -> Tensor:
        """-1 or 1, float32 ``(B, count, size)``: one bit each, which becomes the sign bit of 1.0."""
        words = self.words(-(-size // 32))
        bits = words[..., None] << torch.arange(32, dtype=torch.int32, device=words.device)
        return bits.bitwise_and_(-(2**31)).bitwise_or_(_ONE).view(torch.float32).flatten(-2)[..., :size]

    def normals(self, size: int) -> Tensor:
        """Normal numbers in units of 1 / 40,000, float32 ``(B, count, size)``.

        They are whole and not 0. Sums of their squares are exact in float64, in any order, for up to 4 million. Each
        is one of 65,536 equally probable values, the mean of the normal distribution between two of its quantiles; the
        outermost, 4.39, stands for all beyond 4.17 standard deviations.
        """
        return self._looked_up(_normal_table(self._first.device), size)

    def laplaces(self, size: int) -> Tensor:
        """Draw from the Laplace distribution with mean size 1, as :meth:`normals`; sizes beyond 10.4 become 11.4."""
        return self._looked_up(_laplace_table(self._first.device), size)

    def _looked_up(self, table: Tensor, size: int) -> Tensor:
        # A word has two indices of 16 bits; its upper half is for the second half of the places.
        words = self.words(-(-size // 2))
        index = torch.cat([words & 0xFFFF, words.bitwise_right_shift_(16).bitwise_and_(0xFFFF)], -1)[..., :size]
        return table.index_select(0, index.flatten()).view(index.shape)


def _mixed(places: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``mix(mix(places ^ first) + second)``, int32, in one buffer and a spare one: products and sums wrap around."""
    words = places ^ first
    spare = torch.empty_like(words)
    _mix(words, spare)
    words += second
    _mix(words, spare)
    return words


def _mix(words: Tensor, spare: Tensor) -> None:
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(words, shift, out=spare)
        # The shift of signed numbers fills in the sign.
        words ^= spare.bitwise_and_(2 ** (32 - shift) - 1)
        if factor is not None:
            words *= factor


@cache
def _normal_table(device: torch.device) -> Tensor:
    edges = torch.special.ndtri(
        0.5 + torch.arange(_QUANTILES + 1, dtype=torch.float64, device="cpu") / (2 * _QUANTILES)
    )
    density = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi)
    return _table(-density.diff() * 2 * _QUANTILES, device)


@cache
def _laplace_table(device: torch.device) -> Tensor:
    shares = torch.arange(_QUANTILES + 1, dtype=torch.float64, device="cpu") / _QUANTILES
    # The mean of -log(u) between two neighbours.
    return _table(1 + torch.special.entr(shares).diff() * _QUANTILES, device)


def _table(sizes: Tensor, device: torch.device) -> Tensor:
    # None lies so close to a half that another library's logarithm would round it otherwise.
    whole = (sizes * _PARTS).round().float()
    return torch.cat([whole, -whole]).to(device)


def derive_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and on every key, in order.

    Example:
        >>> derive_seed(0, 7, "inner") == derive_seed(0, 7, "inner")
        True
        >>> derive_seed(0, 7, "inner") == derive_seed(0, 8, "inner")
        False
    """
    text = str(check_integer("seed", seed, minimum=0))
    for key in keys:
        text += f"\x1f{type(key).__name__}:{key}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *keys: int | str) -> torch.Generator:
    """A CPU generator of its own for ``(seed, *keys)``, usually ``(seed, sample, purpose)``.

    It lives on the CPU regardless of the device, so the same settings draw the same points everywhere.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed(derive_seed(seed, *keys))
    return generator


class RowGenerator(torch.Generator):
    """A generator for some rows of a batch, by whose draws of one seed a row each gets that which all rows would.

    ``gaps`` is how many rows are left out before each of them.
    """

    gaps: list[int]

    @classmethod
    def of(cls, rows: Sequence[int], seed: int, *keys: int | str) -> RowGenerator:
        """Return the values of :func:`stream` for these rows, in order."""
        made = cls()
        made.manual_seed(derive_seed(seed, *keys))
        made.gaps = [row - before - 1 for before, row in zip([-1, *rows], rows, strict=False)]
        return made


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of ``random``, numpy and torch (CPU and GPUs), and restore them afterwards.

    Args:
        seed: Any integer of at least 0; numpy gets its lower 32 bits, torch its lower 63.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            _seed_torch(seed % 2**63)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _seed_torch(seed: int) -> None:
    accelerators = (torch.cuda, torch.backends.mps, getattr(torch, "xpu", None))
    if any(one is not None and one.is_available() for one in accelerators):
        torch.manual_seed(seed)
    else:
        # The same without a note, for devices there may be later, of where it was called from: that takes milliseconds.
        torch.default_generator.manual_seed(seed)
