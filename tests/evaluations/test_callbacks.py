"""What evaluations tell their callbacks, and the ready ones for trackers."""

import logging
import math
from unittest.mock import Mock

import pytest

import robust_ext
from robust_ext.evaluations.callbacks import metrics, params
from tests.evaluations import small

STILL = {"still": lambda model, x, y: x, "<b> 1%": small.sign_step, "b_1": lambda model, x, y: x}


class Listener:
    def __init__(self, *, raises=False):
        self.raises, self.results, self.records = raises, [], []

    def on_result(self, result):
        self._hear(self.results, result)

    def on_record(self, record):
        self._hear(self.records, record)

    def _hear(self, heard, one):
        heard.append(one)
        if self.raises:
            raise ValueError("no disk")


def evaluate(callbacks, **more):
    return robust_ext.robust_accuracy(
        small.NETWORK, STILL, small.INPUTS, small.LABELS, small.LINF, callbacks=callbacks, batch_size=4, **more
    )


@pytest.fixture(scope="module")
def result():
    return evaluate(())


def test_callbacks_get_every_record_and_then_the_result(tmp_path):
    first = Listener()
    result = evaluate([first, Mock(spec=["on_result"])], out=tmp_path)
    assert first.results == [result]
    assert [(one["run"], one["sample"]) for one in first.records] == [
        (f"{name} linf 0.1", sample) for name in STILL for sample in range(10)
    ]
    # What is in the folder already is told too.
    again = Listener()
    evaluate([again], out=tmp_path)
    assert again.records == first.records


@pytest.mark.parametrize("kind", small.KINDS)
def test_every_evaluation_has_callbacks(kind):
    """A diagnosis tells of itself alone, and not of the evaluations that it is made of."""
    listener, own = Listener(), {"batch_size": 4} if kind != "diagnosis" else {"planted": 2, "inner_points": 9}
    given = small.NETWORK, STILL["still"], small.INPUTS, small.LABELS
    result = small.call(kind, *given, callbacks=[listener], **own)
    assert listener.results == [result]
    assert {one["sample"] for one in listener.records} >= set(range(10))


def test_what_a_callback_raises_loses_nothing(tmp_path, caplog):
    bad, good = Listener(raises=True), Listener()
    result = evaluate([bad, good], out=tmp_path)
    assert good.results == [result]
    assert len(good.records) == 30
    assert len(bad.records) == 1
    assert robust_ext.load_result(tmp_path) == result
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


def test_metrics_are_the_numbers_of_the_rows(result):
    found = metrics(result)
    assert found["robust_accuracy/still/0.1/robust_accuracy"] == result.robust_accuracy(0.1, attack="still")
    assert found["robust_accuracy/worst_case/0.1/samples"] == 10
    # Names that are alike when they are made plain stay apart.
    assert {"robust_accuracy/b_1/0.1/seconds", "robust_accuracy/b_1/0.1_2/seconds"} <= set(found)
    assert len([name for name in found if name.endswith("/forward")]) == 3
    assert all(math.isfinite(value) for value in found.values())
    assert params(result)["robust_accuracy/batch_size"] == "4"
    test = robust_ext.binarization_test(
        small.NETWORK, STILL["still"], small.INPUTS[:3], small.LINF, inner_points=9, witness_steps=1
    )
    assert metrics(test)["binarization/passed"] == 0


class Recorder:
    """Stands in for a tracker: keeps what is called with what."""

    def __init__(self):
        self.calls, self.config = {}, None

    def __getattr__(self, name):
        return lambda *args, **more: self.calls.setdefault(name, []).append((*args, *more.values()))


def test_trackers(result):
    client, run, writer = Recorder(), Recorder(), Recorder()
    run.config = Recorder()
    evaluate([robust_ext.MLflowCallback(client), robust_ext.WandbCallback(run)])
    robust_ext.TensorBoardCallback(writer, step=7).on_result(result)
    assert set(client.calls) == {"log_params", "log_metrics"}
    ((logged,),), ((given,),) = client.calls["log_metrics"], client.calls["log_params"]
    ((sent,),) = run.calls["log"]
    assert set(logged) == set(sent) == set(metrics(result))
    assert all(len(text) <= 250 for text in given.values())
    assert run.config.calls["update"] == [(params(result), True)]
    assert {(name, step) for name, _, step in writer.calls["add_scalar"]} == {(name, 7) for name in metrics(result)}
