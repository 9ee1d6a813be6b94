"""Recording: which networks can be followed; their regions, against matrices by hand and the networks themselves."""

import copy
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.recording import record, record_checked
from robust_ext.core.errors import ModelError
from robust_ext.core.target import Counted, PassCounter
from tests.models.cases import Net

SHAPE = (4, 6, 5)
# PyTorch warns that even kernels take a copy.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def between(function):
    """A function between a convolution and a readout, with weights drawn from a seed."""

    def run(net, x):
        hidden = function(F.conv2d(x, net.weight.to(x.dtype), padding=1)).reshape(x.shape[0], -1)
        return F.linear(hidden, filters(3, hidden.shape[1], dtype=x.dtype) / hidden.shape[1] ** 0.5)

    return Net(run, weight=nn.Parameter(filters(4, SHAPE[0], 3, 3, dtype=torch.float32)))


def filters(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=dtype) / 3


def drawn(rows, *, seed=0, dtype=torch.float64, shape=SHAPE):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(build, seed=0):
    """A network with drawn weights and statistics, so that no normalisation is the identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().eval()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
                nn.init.uniform_(module.bias, -0.5, 0.5)
    return network


def product(regions, z):
    """The linear parts alone, ``C z`` and ``A z``."""
    (constraints, logits), (offsets, biases) = regions.forward(z), regions.forward(torch.zeros_like(z))
    return constraints - offsets, logits - biases


def check_regions(network, points, *, tolerance=1e-10):
    """All that holds for the regions of any network, tried at points of the region and along lines out of it."""
    regions = record(network, points)
    rows = points.shape[0]
    constraints, replayed = regions.forward(points)
    assert constraints.shape == (rows, regions.constraints)
    torch.testing.assert_close(replayed, network(points), rtol=tolerance, atol=tolerance)
    assert bool((constraints >= -tolerance).all())
    check_adjoint(regions, points, tolerance)
    # The affine map is that of the network wherever all constraints hold, and only there is the pattern the same.
    line = drawn(rows, seed=1, dtype=points.dtype, shape=tuple(points.shape[1:]))
    slopes = product(regions, line)[0]
    falling = torch.where(slopes < -1e-6, -constraints / slopes, torch.inf).clamp(min=0)
    lengths = falling.amin(1) if regions.constraints else torch.full((rows,), torch.inf)
    lengths = lengths.clamp(max=1.0).view(-1, *(1,) * (points.dim() - 1))
    inside = points + 0.99 * lengths * line
    torch.testing.assert_close(regions.forward(inside)[1], network(inside), rtol=tolerance, atol=tolerance)
    assert record(network, inside).pattern() == regions.pattern()
    assert bool(regions.agrees(regions.at(inside)).all())
    if tolerance < 1e-8:
        outside, left = regions.at(points + (lengths + 1e-6) * line), (lengths < 1.0).flatten()
        assert [a != b for a, b in zip(outside.pattern(), regions.pattern(), strict=True)] == left.tolist()
        assert torch.equal(~regions.agrees(outside).all(1), left)


def check_adjoint(regions, points, tolerance):
    z = drawn(points.shape[0], seed=2, dtype=points.dtype, shape=tuple(points.shape[1:]))
    products = product(regions, z)
    y, v = (drawn(len(points), seed=4, dtype=points.dtype, shape=(one.shape[1],)) for one in products)
    back = regions.adjoint(y, v)
    assert back.shape == points.shape
    parts = torch.cat([products[0] * y, products[1] * v], 1)
    missed = (parts.sum(1) - (back * z).flatten(1).sum(1)).abs()
    assert bool((missed <= tolerance * (parts.abs().sum(1) + 1)).all())
    both = regions.adjoint(y) + regions.adjoint(torch.zeros_like(y), v)
    torch.testing.assert_close(both, back, rtol=tolerance, atol=tolerance * 10)


PRELU = torch.tensor([0.3, -0.5, 0.0, 1.2], dtype=torch.float64)
CONSTANT = torch.linspace(-1, 1, 4, dtype=torch.float64).view(4, 1, 1)
GATES = {
    "relu": F.relu,
    "relu_": lambda x: x.relu_(),
    "leaky_relu of negative slope": lambda x: F.leaky_relu(x, -0.4, inplace=True),
    "prelu": lambda x: F.prelu(F.prelu(x, PRELU.to(x.dtype)), PRELU[:1].to(x.dtype)),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "relu6 and hardsigmoid": lambda x: F.relu6(x * 8) + F.hardsigmoid(x * 3),
    "threshold with a jump": lambda x: nn.Threshold(0.1, -3.0)(x),
    "clamp": lambda x: x.clamp(-0.3, 0.4) + x.clamp_min(-0.1),
    "clamp to a point": lambda x: x.clamp(0.1, 0.1),
    "clamp from above": lambda x: x.clamp_(max=0.1),
    "clamp to tensors": lambda x: x.clamp(CONSTANT.to(x.dtype) / 4, CONSTANT.to(x.dtype) / 4 + 0.2),
    "maximum of two shapes": lambda x: torch.maximum(x, x.mean((1, 2), keepdim=True)),
    "abs": torch.abs,
    "minimum": lambda x: torch.minimum(x, x[:, [1, 2, 3, 0]]),
    "extremes with a constant": lambda x: torch.min(CONSTANT.to(x.dtype), x) + torch.maximum(x, CONSTANT.to(x.dtype)),
    "max over channels": lambda x: x.max(1)[0],
    "amin over mixed dimensions": lambda x: torch.amin(x, (-1, 1), keepdim=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "max_pool2d that overlaps": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max_pool2d of odd settings": lambda x: F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 1), ceil_mode=True),
    "max_pool3d": lambda x: F.max_pool3d(x[:, None], 2, 2, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (4, 2)),
}
NORM = seeded(lambda: nn.BatchNorm2d(4).double())
nn.init.uniform_(NORM.weight, -1, 1)

AFFINE = {
    "conv2d": lambda x: F.conv2d(x, filters(3, 4, 3, 2), filters(3), stride=(2, 1), padding=(1, 0)),
    "conv2d with groups": lambda x: F.conv2d(x, filters(6, 2, 3, 3), groups=2, dilation=2, padding=2),
    "conv2d of one channel": lambda x: F.conv2d(x[:, :1], filters(3, 1, 2, 2), dilation=(2, 3), stride=2),
    "conv2d same": lambda x: F.conv2d(x, filters(3, 4, 3, 4), padding="same"),
    "conv2d that steps over values": lambda x: F.conv2d(x, filters(3, 4, 2, 2), stride=3),
    "conv3d": lambda x: F.conv3d(x[:, None], filters(2, 1, 2, 3, 2), stride=(1, 2, 1)),
    "circular conv2d": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), filters(3, 4, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, filters(4, 3, 3, 3), filters(3), 2, 1, 1),
    "conv and batch_norm": lambda x: NORM(F.conv2d(x, filters(4, 4, 3, 3), filters(4))),
    "conv used twice and batch_norm": lambda x: (lambda y: NORM(y) + y)(F.conv2d(x, filters(4, 4, 3, 3))),
    "torch.batch_norm": lambda x: torch.batch_norm(
        x, NORM.weight, NORM.bias, NORM.running_mean, NORM.running_var, False, 0.1, 1e-5, False
    ),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "means": lambda x: F.adaptive_avg_pool2d(x, (3, 2)) + x.mean((2, 3), keepdim=True),
    "sums": lambda x: x.sum(-1, keepdim=True) + sum([x, 2 * x, x[:, :1]]),
    "arithmetic": lambda x: -((1 - x) * 3 / CONSTANT.sub(3) - 2 + CONSTANT) + torch.tensor(2.0) * x + torch.tensor(3),
    "arithmetic in place": lambda x: x.clone().sub_(CONSTANT).mul_(2).div_(CONSTANT - 4).add_(x, alpha=3).neg_(),
    "broadcasting": lambda x: torch.sub(x, x[:, [3, 2, 1, 0]], alpha=0.5) + x.mean(1, keepdim=True) - x[:, :, :1],
    "a constant that widens": lambda x: x[:, :1] * CONSTANT + (x[:, :1] + CONSTANT) + (CONSTANT - x[:, :1]),
    "views": lambda x: x.view(x.shape[0], 2, -1).unflatten(1, (2, 1)).squeeze(2).unsqueeze(1).flatten(2),
    "slices": lambda x: x[:, ::2, 1:-1, ..., 0] + x[:, torch.tensor([True, False, True, False])][..., 1:-1, 1],
    "split and cat": lambda x: torch.cat([*x.split(3, 1), *torch.chunk(x, 2, 1), x.unbind(1)[0][:, None]], 1),
    "cat with zeros": lambda x: torch.cat([x, x.new_zeros(x.shape[0], 2, 6, 5)], dim=1),
    "pad": lambda x: F.pad(F.pad(x, (1, 2, -1, 0, 1, 1), value=0.5), (1, 2, 1, 0), mode="reflect"),
    "expand and repeat": lambda x: x[:, :1].expand(-1, 3, 6, 5).repeat(1, 2, 1, 3) + x[:, :1].repeat(1, 6, 1, 3),
    "linear of tokens": lambda x: F.linear(x, filters(7, 5), filters(7)),
    "matmul": lambda x: torch.matmul(x, filters(4, 5, 2)) @ filters(2, 3),
    "constant masks": lambda x: torch.where(CONSTANT > 0, x, -x) + x * (CONSTANT < 0) + x.masked_fill(CONSTANT > 0, 2),
    "baddbmm": lambda x: torch.baddbmm(x.flatten(2)[..., :2], filters(1, 4, 4).expand(len(x), 4, 4), x[..., 0, :2]),
    "gather": lambda x: x.gather(1, torch.tensor([2, 0, 3]).view(1, 3, 1, 1).expand(len(x), 3, 6, 5)),
    "other dtypes": lambda x: F.dropout(x.float().double(), training=False).to(torch.float64).to(x.dtype) + x.detach(),
    "shapes and queries": lambda x: x * (x.shape[1] + len(x) - len(x) + x.dim()) if x.is_contiguous() else x,
}


@pytest.mark.parametrize("name", [*GATES, *AFFINE])
def test_every_function_and_any_rows_and_points(name):
    tolerance, points = 1e-5 if name == "other dtypes" else 1e-10, drawn(3)
    if name in GATES:
        check_regions(between(GATES[name]), drawn(3, dtype=torch.float32), tolerance=2e-5)
        network = between(GATES[name]).double()
    else:
        network = between(lambda x: F.relu(AFFINE[name](F.leaky_relu(x)))).double()
    check_regions(network, points, tolerance=tolerance)
    regions = record(network, points)
    for rows in ([2, 0, 2, 1, 1], [1], []):
        chosen = regions.select(torch.tensor(rows, dtype=torch.int64))
        assert chosen.pattern() == [regions.pattern()[i] for i in rows]
        check_same(chosen, record(network, points[rows]))
        check_adjoint(chosen, drawn(len(rows), seed=7), 10 * tolerance)
    for count in (0, 1, 4):
        moved, recorded = regions.at(drawn(count, seed=11)), record(network, drawn(count, seed=11))
        torch.testing.assert_close(moved.logits, recorded.logits, rtol=1e-10, atol=1e-10)
        check_same(moved, recorded)


def check_same(regions, recorded):
    assert (regions.rows, regions.pattern()) == (recorded.rows, recorded.pattern())
    z = drawn(recorded.rows, seed=12)
    for one, other in zip(regions.forward(z), recorded.forward(z), strict=True):
        # The order within a layer is that of the memory, which may differ for another number of rows.
        torch.testing.assert_close(one.sort(1).values, other.sort(1).values, rtol=1e-10, atol=1e-10)


def residual():
    """Shared layers, one of them used twice, in-place activations and a skip connection."""

    def run(net, x):
        hidden = net.relu(net.norm(net.conv(x)))
        hidden = net.relu(net.norm(net.conv(hidden)) + hidden)
        hidden += x
        return net.out(torch.flatten(net.pool(hidden), 1))

    layers = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(inplace=True)}
    return Net(run, **layers, pool=nn.MaxPool2d(2), out=nn.Linear(4 * 3 * 2, 3))


@pytest.mark.parametrize("channels_last", [False, True])
def test_skips_shared_modules_and_memory_formats(channels_last):
    network, points = seeded(residual).double(), drawn(3)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
        points = points.contiguous(memory_format=torch.channels_last)
    check_regions(network, points)
    regions, plain = record(network, points), record(seeded(residual).double(), drawn(3))
    assert regions.pattern() == plain.pattern()
    assert [name for name, _ in regions.layers] == ["relu", "relu", "max_pool2d"]
    assert regions.constraints == 2 * 4 * 30 + 4 * 6 * 4
    values = regions.forward(points)[0].sort(1).values
    torch.testing.assert_close(values, plain.forward(points)[0].sort(1).values)


def test_no_trace_is_left_on_the_network_and_one_forward_pass_is_made():
    network, counter, points = seeded(residual), PassCounter(), drawn(2, dtype=torch.float32)
    network.norm.weight.requires_grad_(False)
    before, given = copy.deepcopy(network.state_dict()), points.clone()
    regions = record(Counted(network, counter), points)
    regions.adjoint(*regions.forward(points))
    with torch.inference_mode():
        assert record(network, points.clone()).pattern() == regions.pattern()
    assert (counter.forward, counter.backward) == (2, 0)
    assert torch.equal(points, given)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert [p.requires_grad for p in network.parameters()] == [True, True, False, True, True, True]
    assert all(p.grad is None for p in network.parameters())
    assert not any((points.requires_grad, network.training, regions.logits.requires_grad))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    SCRIPTED = torch.jit.script(nn.Sigmoid())


def assigned(x):
    y = x.clone()
    y[:, 0] = 1.0
    return y


def stale(x):
    view = x.view(x.shape[0], -1)
    x.relu_()
    return view


REFUSED = {
    "gelu": (F.gelu, "gelu"),
    "product": (lambda x: x * x, "mul"),
    "matmul": (lambda x: x @ x.mT, "matmul"),
    "layer_norm": (nn.LayerNorm(SHAPE[1:]).double(), "layer_norm"),
    "tokens in the batch": (lambda x: F.linear(x.reshape(-1, 30), filters(7, 30)).view(x.shape[0], -1), "batch first"),
    "limits of its own": (lambda x: x.clamp(x.mean(1, keepdim=True)), "clamp: its limits depend on the input"),
    "batch_norm in train mode": (nn.BatchNorm2d(4).double(), r"batch_norm: it is in train mode"),
    "positions": (lambda x: x.max(1)[1].to(x.dtype), "positions of largest values"),
    "mean over rows": (lambda x: x - x.mean(0, keepdim=True), "mean: it mixes the rows"),
    "another row": (lambda x: x[[1, 2, 0]], "mixes the rows"),
    "noise": (lambda x: x + torch.rand(x.shape), "different value in each row"),
    "numpy": (lambda x: torch.from_numpy(x.detach().numpy()), "numpy"),
    "data": (lambda x: x.data, "data"),
    "an assignment to a part": (assigned, "__setitem__"),
    "a stale view": (stale, "in place through a view"),
    "a comparison in Python": (lambda x: x if bool((x > 0).flatten(1).any(1)[0]) else -x, "gt"),
    "dynamic weights": (lambda x: F.conv2d(filters(3, 4, 6, 5), x), "conv2d"),
    "scripted": (SCRIPTED, "cannot be seen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused_by_name(name):
    function, words = REFUSED[name]
    with pytest.raises(ModelError, match=words) as caught:
        record(between(function).double(), drawn(3))
    assert "supported are linear layers" in str(caught.value)
    assert "robust_ext:BoundarySearch()" in str(caught.value)


def test_a_last_log_softmax_is_left_out():
    plain = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))).double()
    network, inputs = nn.Sequential(plain, nn.LogSoftmax(1)).eval(), drawn(3, shape=(6,))
    torch.testing.assert_close(record(network, inputs).forward(inputs)[1].log_softmax(1), network(inputs))
    torch.testing.assert_close(record_checked(network, inputs, (-5.0, 5.0)).at(inputs).logits, plain(inputs))


NETWORKS = {"wong_kolter_mnist": (1, 28, 28), "mead_mnist": (1, 28, 28), "resnet20": (3, 32, 32)}


@pytest.mark.parametrize("name", NETWORKS)
def test_published_networks(name):
    examples = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "networks.py"))
    check_regions(seeded(examples[name]).double(), drawn(2, shape=NETWORKS[name]))
