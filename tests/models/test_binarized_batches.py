"""Which problem a row of a batch belongs to, by its place or by where it lies: compared with each problem alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_ext.core.errors import ModelError
from robust_ext.core.threat import NORMS
from robust_ext.models.binarized import BinarizedClassifier
from tests.models.test_binarized import classifier, network, parts


@st.composite
def planted_cases(draw):
    """A classifier of problems in random bounds, each of them alone, and a generator."""
    norm, count = draw(st.sampled_from(NORMS)), draw(st.integers(2, 5))
    low, width = draw(st.sampled_from([(0.0, 1.0), (-3.0, 6.0), (0.0, 255.0)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    made = {**parts(count), "references": torch.rand(count, 2, 3, generator=generator) * width + low}
    singles = [
        BinarizedClassifier(network(), **{name: part[i : i + 1] for name, part in made.items()}) for i in range(count)
    ]
    return BinarizedClassifier(network(), **made, batching="auto", norm=norm), made["references"], singles, generator


def lengths(norm, steps):
    """By hand, of rows ``(n, ...)``."""
    values = steps.double().abs().flatten(1)
    return {"linf": values.amax(1), "l2": values.square().sum(1).sqrt(), "l1": values.sum(1)}[norm]


def half_way(norm, references, i):
    """Half the distance of reference i from the next one."""
    others = [j for j in range(len(references)) if j != i]
    return float(lengths(norm, references[others] - references[i]).min()) / 2


def alone(singles, x, order):
    return torch.cat([singles[i](row[None]) for row, i in zip(x, order, strict=True)])


@settings(max_examples=150, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_batches_of_near_rows_get_their_own_readouts_in_any_order(case, data):
    module, references, singles, generator = case
    order = data.draw(
        st.permutations(range(len(references))) | st.lists(st.integers(0, len(references) - 1), min_size=1, max_size=9)
    )
    steps = torch.randn(len(order), 2, 3, generator=generator)
    reach = torch.tensor([half_way(module.norm, references, i) for i in order]) * data.draw(st.floats(0, 0.999))
    x = references[order] + steps * (reach / lengths(module.norm, steps)).float().view(-1, 1, 1)
    torch.testing.assert_close(module(x), alone(singles, x, order), rtol=1e-4, atol=1e-4)


@settings(max_examples=150, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_far_rows_count_in_order_and_are_refused_in_other_batches(case, data):
    module, references, singles, generator = case
    count = len(references)
    factor = data.draw(st.sampled_from([0.3, 3.0, 30.0]))
    width = float(references.max() - references.min())
    x = references + factor * width * torch.randn(references.shape, generator=generator)
    near = [
        [float(lengths(module.norm, row[None] - references[i])) < half_way(module.norm, references, i)
         for i in range(count)] for row in x
    ]  # fmt: skip
    wandered = any(near[m][i] for m in range(count) for i in range(count) if i != m)
    far = [m for m in range(count) if not any(near[m])]
    if not wandered:
        torch.testing.assert_close(module(x), alone(singles, x, range(count)), rtol=1e-4, atol=1e-3)
    for batch in (list(range(count - 1)), [*range(count), 0], [0] * (count + 1)):
        rows = [place for place, m in enumerate(batch) if m in far]
        if rows:
            least = min(
                float(lengths(module.norm, x[batch[rows[0]]][None] - references[i : i + 1])) for i in range(count)
            )
            with pytest.raises(
                ModelError, match=rf"row {rows[0]} of a batch of {len(batch)} lies .* single\(row\)"
            ) as error:
                module(x[batch])
            assert float(str(error.value).split("lies ")[1].split()[0]) == pytest.approx(least, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(case=planted_cases(), data=st.data())
def test_a_full_batch_that_near_rows_show_to_be_permuted_refuses_far_ones(case, data):
    module, references, singles, _ = case
    count = len(references)
    order = data.draw(st.permutations(range(count)))
    x = references[order].clone()
    far = data.draw(st.integers(0, count - 1))
    x[far] = references.max() + 100 * float(references.max() - references.min())
    if any(m != i for m, i in enumerate(order) if m != far):
        with pytest.raises(ModelError, match=rf"row {far} of a batch of {count}"):
            module(x)
    else:
        torch.testing.assert_close(module(x), alone(singles, x, order), rtol=1e-4, atol=1e-3)


def test_rows_that_are_not_finite_keep_their_place_and_are_refused_elsewhere():
    module = BinarizedClassifier(network(), **parts(3), batching="auto")
    x = parts(3)["references"].clone()
    x[1, 0, 0] = torch.nan
    logits = module(x)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[::2], classifier(3)(x)[::2])
    with pytest.raises(ModelError, match="row 0 of a batch of 1 lies nan"):
        module(x[1:2])
