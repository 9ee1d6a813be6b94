"""Randomness that is counted, not consumed.

Every draw comes from a generator derived from (seed, sample, purpose), so the points of a sample do not depend on the
batch it is in, on the order of the samples, on the attack, or on what was drawn before. Libraries that know only
global seeds run inside :func:`seeded_globals`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from robust_ext.core.validation import check_integer


def derive_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and on every key, in order.

    Example:
        >>> derive_seed(0, 7, "inner") == derive_seed(0, 7, "inner")
        True
        >>> derive_seed(0, 7, "inner") == derive_seed(0, 8, "inner")
        False
    """
    seed = check_integer("seed", seed, minimum=0)
    text = "\x1f".join([str(seed), *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *keys: int | str) -> torch.Generator:
    """A CPU generator of its own for ``(seed, *keys)``, usually ``(seed, sample, purpose)``.

    It lives on the CPU whatever the device, so the same settings draw the same points everywhere.
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
        """That of :func:`stream` for these rows, in order."""
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
