"""Blocks on the workers of an executor: the records of a run in this process, whatever becomes of the workers."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.demo.network import digits_network

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = digits_network()(X).argmax(1)
PLANTED = {"inner_points": 40, "random_inner": 10, "random_corners": 10, "canaries": 2, "judge_seed": 7}


def noise(model, x, y, generator):
    model(x)
    return (x + 0.1 * torch.rand(x.shape, generator=generator).sub(0.5)).clamp(0, 1)


ATTACKS = {"ours": "robust_ext:APGD(steps=3)", "noise": noise, "nothing": lambda model, x, y: x}

# Forks begin at once; what spawned workers do differently is tested with the executors.
forked = partial(ProcessPoolExecutor, 2, mp_context=multiprocessing.get_context("fork"))


@pytest.fixture(scope="module")
def pool():
    with forked() as executor:
        yield executor


def brightness(x):
    return x.flatten(1).mean(1)


def accuracy(attacks=ATTACKS, **more):
    return robust_accuracy(digits_network(), attacks, X, Y, THREAT_MODEL, batch_size=3, **more)


def planted(**more):
    return binarization_test(digits_network(), ATTACKS, X, THREAT_MODEL, batch_size=2, **PLANTED, **more)


EVALUATIONS = {
    "robust accuracy": accuracy,
    "binarization": planted,
    "sequential": partial(planted, sequential=True),
    "detector": lambda **more: binarization_test(
        digits_network(), noise, X, THREAT_MODEL, batch_size=6, detector=brightness,
        detector_data=X.repeat(3, 1, 1, 1), **PLANTED, **more,
    ),
    "mead": lambda **more: mead(
        digits_network(), ["robust_ext:ObjectivePGD(steps=2)", "robust_ext:OrthogonalPGD(steps=2)"], X, Y,
        THREAT_MODEL, detectors={"bright": brightness, "dark": lambda x: -x.flatten(1).mean(1)},
        detector_data=X.repeat(3, 1, 1, 1), resamples=0, batch_size=5, **more,
    ),
    "adaptive": lambda **more: evaluate_defense(
        lambda x: (x * 8).round() / 8, ["robust_ext:APGD(steps=2)", "robust_ext:Square(queries=3)"], X, Y,
        THREAT_MODEL, classifier=digits_network(), batch_size=5, **more,
    ),
}  # fmt: skip


def records(folder):
    """All that is kept of samples, by file; lines as they came, without their checksums and in order."""
    return {
        str(file.relative_to(folder)): sorted(
            line.rpartition(b', "checksum"')[0] for line in file.read_bytes().splitlines()
        )
        for file in sorted(folder.rglob("records.jsonl"))
    }


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_same_records(name, pool, tmp_path):
    heard = {True: [], False: []}

    class Listener:
        def __init__(self, elsewhere):
            self.on_record = heard[elsewhere].append

        def on_result(self, result):
            pass

    for elsewhere in (False, True):
        where = {"executor": pool} if elsewhere else {}
        EVALUATIONS[name](out=tmp_path / str(elsewhere), callbacks=[Listener(elsewhere)], **where)
    here, there = (records(tmp_path / str(elsewhere)) for elsewhere in (False, True))
    assert here
    assert there == here
    assert heard[True] == heard[False]
