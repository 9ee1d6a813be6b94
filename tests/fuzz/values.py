"""Values that are hardly ever right, for arguments of each kind; drawn by hypothesis."""

import datetime
import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

X = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
ATTACK = "robust_ext:APGD(steps=1)"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()


# Right ones, as attacks need not be run on samples that are misclassified as they are.
Y = network()(X).argmax(1)


def unchanged(a):
    return a


class Odd:
    """An object whose every method fails."""

    def __len__(self):
        raise RuntimeError("no length")

    def __iter__(self):
        raise RuntimeError("no items")

    def __float__(self):
        raise RuntimeError("no number")

    def __index__(self):
        raise RuntimeError("no index")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), -1),
    st.just(10**30),
    st.floats(allow_nan=True, allow_infinity=True).filter(lambda x: not (0 < x < 1)),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
    st.sampled_from(
        [
            Odd(),
            object(),
            type,
            int,
            print,
            lambda: 3,
            unchanged,
            ...,
            1j,
            range(3),
            {1, 2},
            datetime.date(2000, 1, 1),
            np.zeros(0),
            np.zeros((2, 2)),
            np.float32("nan"),
            np.array(None),
            torch.zeros(0),
            torch.zeros(2, 2),
            torch.tensor(math.nan),
            nn.Identity(),
            nn.Linear(2, 2),
            (1, 2, 3),
            ("linf",),
            [[]],
            Exception("x"),
            float("1e-30"),
            -0.0,
            1e300,
            "\x1b[31m",
        ]
    ),
)
"""Values that are hardly ever right for anything."""

INPUTS = st.one_of(
    JUNK,
    st.sampled_from(
        [
            X.long(),
            X.bool(),
            X * math.nan,
            X / 0,
            X + 2,
            X - 2,
            X[0, 0, 0],
            X[:0],
            X[:, :0],
            X.numpy().astype(int),
            X.to(torch.complex64),
            X.unsqueeze(0),
            X.flatten(),
            torch.zeros(3, 1, 5, 5),
            X.to_sparse(),
            X.to("meta"),
            X[:2].repeat(1, 3, 1, 1),
        ]
    ),
)
LABELS = st.one_of(
    JUNK,
    st.sampled_from(
        [
            Y.float(),
            Y - 3,
            Y + 3,
            Y[:2],
            Y.view(3, 1),
            Y.bool(),
            Y.numpy() + 0.5,
            torch.ones(3, 3),
            Y.tolist(),
            Y.to("meta"),
            Y * 10**15,
        ]
    ),
)


class Gives(nn.Module):
    """A model that returns one thing."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.eval()

    def forward(self, x):
        return self.made(x) if callable(self.made) else self.made


MODELS = st.one_of(
    JUNK,
    st.sampled_from(
        [
            Gives(None),
            Gives("x"),
            Gives(torch.zeros(3, 1)),
            Gives(torch.zeros(3, 3) * math.nan),
            Gives(lambda x: x),
            Gives(X),
            Gives(lambda x: x.flatten(1)[:1]),
            Gives(lambda x: x.flatten(1).softmax(1)),
            Gives(lambda x: x.flatten(1).long()),
            nn.Linear(16, 3),
            nn.Linear,
            nn.Module(),
            nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3)),
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval().to("meta"),
            (nn.Flatten(), nn.Linear(9, 3)),
        ]
    ),
)
ATTACKS = st.one_of(
    JUNK,
    st.sampled_from(
        [
            "robust_ext:Nothing()",
            "foolbox:LinfPGD(steps=0)",
            ":",
            "a:b",
            (int, {}),
            (int, 3),
            [ATTACK, ATTACK],
            {"a": 3},
            {},
            lambda m, x: x,
            lambda m, x, y: None,
            lambda m, x, y: x[:1],
            lambda m, x, y: x * 1j,
            lambda m, x, y: x.long(),
            lambda m, x, y: 1 / 0,
            lambda m, x, y: x.numpy(),
            lambda m, x, y, z: x,
        ]
    ),
)
DETECTORS = st.one_of(
    JUNK,
    st.sampled_from(
        [lambda x: x, lambda x: None, lambda x: 1 / 0, lambda x: x.flatten(1).mean(1) * math.nan, [], {}, "a:b", int]
    ),
)
DEFENSES = st.one_of(
    JUNK, st.sampled_from([lambda x: x[:1], lambda x: 1 / 0, lambda x: None, "hd(steps=-1)", "aid", "x", "a:b"])
)
IDS = st.one_of(
    JUNK,
    st.sampled_from([[0, 0, 1], [0, 1], [0, 1, -1], [0, 1, 1.5], "abc", {0: 1}, torch.zeros(3), np.zeros((3, 1), int)]),
)
