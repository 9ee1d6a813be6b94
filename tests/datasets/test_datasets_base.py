"""Dataset: what it accepts, what is taken from it, which samples are chosen."""

import numpy as np
import pytest
import torch

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_inputs
from robust_ext.datasets import Dataset


def make(count=20, *, dtype=np.uint8):
    images = np.arange(count * 12, dtype=np.int64).reshape(count, 3, 2, 2) % 256
    images = images.astype(np.uint8) if dtype == np.uint8 else (images / 255).astype(dtype)
    return Dataset(name="toy", images=images, labels=np.arange(count) % 4, class_names=("a", "b", "c", "d"))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_take_scales_to_unit_interval(dtype):
    data = make(dtype=dtype)
    inputs, labels = data.take([3, 0, 3])
    assert inputs.dtype == torch.float32
    assert labels.tolist() == [3, 0, 3]
    expected = torch.arange(36, 48).reshape(3, 2, 2) / 255
    torch.testing.assert_close(inputs[0], expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(inputs[0], inputs[2], rtol=0, atol=0)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 255.0), (0.1, 0.3), (-0.7, -0.1), (1e-3, 1e3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_take_stays_in_bounds_and_reaches_them(bounds, dtype):
    images = np.linspace(0, 255 if dtype == np.uint8 else 1, 256).astype(dtype).reshape(1, 1, 16, 16)
    data = Dataset(name="ramp", images=images, labels=np.zeros(1, int), class_names=("a",))
    inputs, _ = data.take([0], bounds=bounds)
    check_inputs("inputs", inputs, bounds=bounds)
    assert float(inputs.min()) == pytest.approx(bounds[0], rel=1e-6)
    assert float(inputs.max()) == pytest.approx(bounds[1], rel=1e-6)


@pytest.mark.parametrize("indices", [[1, 2], np.array([1, 2], np.uint16), torch.tensor([1, 2]), range(1, 3), (1, 2)])
def test_take_accepts_indices_of_any_kind(indices):
    assert make().take(indices)[1].tolist() == [1, 2]


def test_take_leaves_the_dataset_alone():
    data = make(dtype=np.float32)
    before = data.images.copy()
    inputs, labels = data.take(range(20))
    inputs.zero_()
    labels.zero_()
    np.testing.assert_array_equal(data.images, before)
    with pytest.raises(ValueError, match="read-only"):
        data.images[0] = 0


def test_a_smaller_choice_begins_a_larger_one():
    data = make()
    whole = data.choose(20, seed=7)
    assert sorted(whole) == list(range(20))
    for count in range(21):
        np.testing.assert_array_equal(data.choose(count, seed=7), whole[:count])
    assert (data.choose(20, seed=8) != whole).any()
    np.testing.assert_array_equal(data.choose(5, seed=7, order="first"), np.arange(5))
    # The same on every machine.
    assert data.choose(5, seed=0).tolist() == [4, 10, 6, 18, 3]
    with pytest.raises(InvalidArgumentError, match="got 21, expected at most 20, the number of images in toy"):
        data.choose(21, seed=0)


def test_no_images_at_all():
    data = Dataset(name="none", images=np.empty((0, 1, 2, 2), np.float32), labels=np.empty(0, int), class_names=())
    assert (len(data), data.choose(0, seed=0).shape) == (0, (0,))
    for some, shape in ((data, (0, 1, 2, 2)), (make(), (0, 3, 2, 2))):
        inputs, taken = some.take([])
        assert (inputs.shape, taken.shape) == (shape, (0,))
