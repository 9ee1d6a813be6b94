"""What evaluations tell their callbacks, and the ready ones for trackers."""

import logging
import math
import sys

import pytest

import robust_ext
from robust_ext.evaluations.callbacks import metrics, params
from tests.evaluations import small

STILL = {"still": lambda model, x, y: x, "<b> 1%": small.sign_step, "b_1": lambda model, x, y: x}


class Listener:
    def __init__(self, log=None, raising=()):
        self.log, self.raising, self.results, self.records = log, raising, [], []

    def on_result(self, result):
        self.results.append(result)
        if "result" in self.raising:
            raise ValueError("no disk")

    def on_record(self, record):
        self.records.append(record)
        if "record" in self.raising:
            raise ValueError("no disk")


class OnlyResults:
    def __init__(self):
        self.seen = []

    def on_result(self, result):
        self.seen.append(result)


def evaluate(callbacks, **more):
    return robust_ext.robust_accuracy(
        small.NETWORK, STILL, small.INPUTS, small.LABELS, small.LINF, callbacks=callbacks, batch_size=4, **more
    )


@pytest.fixture(scope="module")
def result():
    return evaluate(())


def test_callbacks_get_every_record_and_then_the_result(tmp_path):
    first, second = Listener(), OnlyResults()
    result = evaluate([first, second], out=tmp_path)
    assert first.results == second.seen == [result]
    assert [(one["run"], one["sample"]) for one in first.records] == [
        (f"{name} linf 0.1", sample) for name in STILL for sample in range(10)
    ]
    # What is in the folder already is told too.
    again = Listener()
    evaluate([again], out=tmp_path)
    assert again.records == first.records


@pytest.mark.parametrize("name", [*small.EVALUATIONS])
def test_every_evaluation_has_callbacks(name, monkeypatch):
    listener = Listener()
    public = {"test_time": "evaluate_defense", "binarization": "binarization_test"}.get(name, name)
    own = getattr(robust_ext, public)
    monkeypatch.setattr(robust_ext, public, lambda *args, **more: own(*args, callbacks=[listener], **more))
    result = small.EVALUATIONS[name](None, {"still": STILL["still"]})
    assert listener.results == [result]
    assert {one["sample"] for one in listener.records} == set(range(10))


def test_a_diagnosis_tells_of_itself_alone():
    listener, settings = OnlyResults(), {"inner_points": 9, "planted": 2, "references": False}
    model, x, y = small.NETWORK, small.INPUTS[:2], small.LABELS[:2]
    result = robust_ext.diagnose(model, STILL["still"], x, y, small.LINF, callbacks=[listener], **settings)
    assert listener.seen == [result]


def test_what_a_callback_raises_loses_nothing(tmp_path, caplog):
    bad, good = Listener(raising=("result", "record")), Listener()
    result = evaluate([bad, good], out=tmp_path)
    assert good.results == [result]
    assert len(good.records) == 30
    assert len(bad.records) == 1
    assert robust_ext.load_result(tmp_path) == result
    words = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert words == [f"Listener.{one} raised; the evaluation goes on" for one in ("on_record", "on_result")]


@pytest.mark.parametrize("callbacks", [print, [print], None, "ab"])
def test_what_is_no_callback_is_refused_before_any_work(callbacks):
    with pytest.raises(robust_ext.InvalidArgumentError, match=r"callbacks: got .* method on_result\(result\)"):
        evaluate(callbacks)


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


def test_mlflow_and_wandb(result):
    client, run = Recorder(), Recorder()
    run.config = Recorder()
    evaluate([robust_ext.MLflowCallback(client), robust_ext.WandbCallback(run)])
    assert set(client.calls) == {"log_params", "log_metrics"}
    ((logged,),), ((given,),) = client.calls["log_metrics"], client.calls["log_params"]
    assert set(logged) == set(metrics(result))
    assert all(len(text) <= 250 for text in given.values())
    ((sent,),) = run.calls["log"]
    assert set(sent) == set(logged)
    assert run.config.calls["update"] == [(params(result), True)]


def test_trackers_that_are_not_installed_are_named(monkeypatch):
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(robust_ext.MissingDependencyError, match="pip install mlflow"):
        robust_ext.MLflowCallback()
    with pytest.raises(robust_ext.MissingDependencyError, match="pip install wandb"):
        robust_ext.WandbCallback().on_result(None)


def test_tensorboard_with_a_stand_in(result):
    writer = Recorder()
    robust_ext.TensorBoardCallback(writer, step=7).on_result(result)
    assert {(name, step) for name, _, step in writer.calls["add_scalar"]} == {(name, 7) for name in metrics(result)}
    assert "robust_accuracy/batch_size = 4" in writer.calls["add_text"][0][1]


def test_tensorboard_for_real(result, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    robust_ext.TensorBoardCallback(tmp_path).on_result(result)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = {name: read.Scalars(name)[0].value for name in read.Tags()["scalars"]}
    assert found == pytest.approx(metrics(result), rel=1e-6)
