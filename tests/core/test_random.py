import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_ext.attacks.base import draw_seed
from robust_ext.core.random import RowGenerator, derive_seed, seeded_globals, stream


def seed_globals(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def global_state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()


def globals_drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(seed, *keys):
    return torch.rand(5, generator=stream(seed, *keys)).tolist()


@given(st.sets(st.integers(0, 30), min_size=1))
def test_some_rows_draw_what_they_would_among_all(rows):
    generator = stream(3, "rows")
    every = [draw_seed(generator) for _ in range(31)]
    some = RowGenerator.of(sorted(rows), 3, "rows")
    assert [draw_seed(some) for _ in rows] == [every[row] for row in sorted(rows)]


def test_streams_and_global_generators_do_not_depend_on_each_other():
    expected = drawn(3, 7, "inner")
    torch.rand(1000)
    torch.rand(1000, generator=stream(3, 7, "inner"))
    seed_globals(99)
    before = global_state()
    assert drawn(3, 7, "inner") == expected
    np.testing.assert_equal(global_state(), before)


def test_every_part_of_the_key_counts():
    keys = [(), (0,), ("0",), (0, 0), (0, "a"), ("a", 0), ("a",), ("ab",), ("a", "b"), (1,)]
    keys += [(seed, purpose) for seed in range(200) for purpose in ("inner", "boundary")]
    seeds = {derive_seed(seed, *key) for seed in (0, 1, 2) for key in keys}
    assert len(seeds) == 3 * len(set(keys))
    assert derive_seed(1, 2) != derive_seed(12)
    assert derive_seed(0, 1, 2) != derive_seed(0, 12)


@given(st.integers(0, 2**80), st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3))
def test_seeds_are_fit_for_torch_and_stable(seed, keys):
    derived = derive_seed(seed, *keys)
    assert 0 <= derived < 2**63
    assert derive_seed(seed, *keys) == derived
    assert stream(seed, *keys).initial_seed() == derived


def test_seeds_are_the_same_on_every_machine():
    """Fixed once and for all: a change would give everyone other points."""
    assert derive_seed(0, 7, "inner") == 4608928784374938213
    assert derive_seed(np.int64(5), 1) == derive_seed(5, 1) == derive_seed(torch.tensor(5), 1)


def test_derived_draws_look_independent():
    """Neighbouring samples and purposes are no more alike than chance: 4000 means of pairs of uniform numbers."""
    a = np.array([drawn(0, i, "inner")[0] for i in range(2000)])
    b = np.array([drawn(0, i, "boundary")[0] for i in range(2000)])
    limit = 5 / np.sqrt(2000)
    assert abs(a.mean() - 0.5) < limit * np.sqrt(1 / 12)
    assert abs(np.corrcoef(a, b)[0, 1]) < limit
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < limit


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1, 2**64 + 3])
def test_the_guard_seeds_and_restores(seed):
    """Also after an exception, and inside another one."""
    seed_globals(77)
    expected = globals_drawn()
    seed_globals(77)
    with suppress(ZeroDivisionError), seeded_globals(seed):
        inside = [globals_drawn(), globals_drawn()]
        np.random.randn()
        raise ZeroDivisionError
    assert globals_drawn() == expected
    with seeded_globals(seed):
        first = globals_drawn()
        with seeded_globals(2):
            globals_drawn()
        assert [first, globals_drawn()] == inside
        assert first != expected
