"""Results as objects: equality, files, tables and plots, of every kind; callbacks; their docs.

And results beside each other, against scipy and by hand.
"""

import copy
import csv
import io
import json
import logging
import math
import pickle
import re
import types
from pathlib import Path
from unittest.mock import MagicMock, Mock
from xml.etree import ElementTree

import pytest
from scipy.stats import binomtest, multinomial
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli.app import app
from robust_ext.core.statistics import difference_interval, paired_difference
from robust_ext.evaluations.callbacks import metrics, params
from tests.evaluations import small

HOSTILE = '<script>alert("$x_1$")</script> & 100% {of} ~^\\ #'
GIVEN = small.NETWORK, small.INPUTS, small.LABELS, small.LINF


def still(model, x, y):
    return x


def diagnosis(out):
    settings = {"inner_points": 20, "queries": 20, "planted": 4}
    return small.call("diagnosis", small.NETWORK, {"step": small.sign_step}, *GIVEN[1:3], out=out, **settings)


def evaluation(out):
    return robust_ext.evaluate(*GIVEN, budget="quick", planted=4, claim=60, out=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder):
    attacks = {HOSTILE: robust_ext.as_attack(small.sign_step, name=HOSTILE), "still": still}
    kinds = {name: evaluate(folder / name, attacks) for name, evaluate in small.EVALUATIONS.items()}
    return {**kinds, "diagnosis": diagnosis(folder / "diagnosis"), "evaluation": evaluation(folder / "evaluation")}


every_kind = pytest.mark.parametrize("kind", [*small.EVALUATIONS, "diagnosis", "evaluation"])


@every_kind
def test_copies_and_what_is_loaded_are_equal(results, folder, kind):
    result = results[kind]
    others = [
        pickle.loads(pickle.dumps(result)),  # noqa: S301
        copy.deepcopy(result),
        robust_ext.load_result(folder / kind),
        type(result)(types.MappingProxyType(dict(reversed(result.content.items())))),
    ]
    for other in others:
        assert other == result
        assert (hash(other), str(other), type(other)) == (hash(result), str(result), type(result))
    assert type(result)({**result.content, "seed": 1}) != result
    # A security curve keeps a row for each run and sample in this process alone.
    assert list(others[2].records) == ([] if kind == "robust_accuracy" else list(result.records))


@every_kind
def test_tables_agree(results, kind, tmp_path):
    pytest.importorskip("pandas")
    result, rows = results[kind], results[kind].rows()
    frame = result.to_frame()
    assert list(frame.columns) == list(result.columns)
    assert len({tuple(row[key] for key in result.keys) for row in rows}) == len(rows)
    for name, values in frame.items():
        known = [(row[name], value) for row, value in zip(rows, values, strict=True) if row[name] is not None]
        assert all(one == other for one, other in known)
        assert all(type(one) in (str, int, float, bool) for one, _ in known)
    text = result.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8") == text
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row[result.keys[0]] for row in read] == [row[result.keys[0]] for row in rows]
    value = result.value
    assert [row[value] for row in read] == ["" if row[value] is None else repr(row[value]) for row in rows]


@every_kind
def test_html_and_latex_are_escaped_and_plots_are_drawn(results, kind):
    elements = [*ElementTree.fromstring(results[kind]._repr_html_()).iter()]
    tags, styles = [one.tag for one in elements], ";".join(one.get("style", "") for one in elements)
    # Only what stands on dark and on light ground.
    assert set(re.findall(r"(?<!-)color: \w+|background: \w+", styles)) <= {"color: inherit", "background: transparent"}
    assert set(tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert tags.count("tr") == 1 + len(results[kind].rows())
    lines = results[kind].to_latex().splitlines()
    assert lines[1] == r"\toprule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    columns = len(lines[0].removeprefix(r"\begin{tabular}{").removesuffix("}"))
    for line in (lines[2], *lines[4:-2]):
        assert line.replace(r"\&", "").count("&") == columns - 1
        bare = line.replace(r"\&", "").replace("{}", "").removesuffix(r"\\")
        assert all(bare.count(char) == bare.count(f"\\{char}") for char in "%$#_{}")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    _, axes = pyplot.subplots()
    assert results[kind].plot(axes) is axes
    assert axes.has_data()
    axes.figure.canvas.draw()
    pyplot.close("all")


BAD = {
    "cut off": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[1, 2]",
    "not a number": lambda text: text.replace('"seed": 0', '"seed": NaN'),
    "deep": lambda text: "[" * 100_000,
    "newer": lambda text: text.replace('"format": 2', '"format": 99'),
    "unknown kind": lambda text: text.replace('"kind": "mead"', '"kind": "__import__"'),
    "no kind": lambda text: text.replace('"kind": "mead"', '"kind": ["mead"]'),
    "another kind": lambda text: text.replace('"kind": "mead"', '"kind": "binarization"'),
    "key gone": lambda text: json.dumps({key: one for key, one in json.loads(text).items() if key != "averages"}),
    "wrong type": lambda text: json.dumps({**json.loads(text), "detectors": [1, 2]}),
}


@pytest.mark.parametrize("damage", BAD)
def test_files_that_are_no_results_are_refused(results, folder, tmp_path, damage):
    file = tmp_path / "result.json"
    file.write_text(BAD[damage]((folder / "mead" / "result.json").read_text("utf-8")), encoding="utf-8")
    with pytest.raises(robust_ext.DataError, match=r"result\.json: "):
        robust_ext.load_result(tmp_path)


def listener(**more):
    return Mock(spec=["on_record", "on_result"], **more)


def heard(one):
    """The records and results that a listener was told of."""
    return [[call.args[0] for call in each.call_args_list] for each in (one.on_record, one.on_result)]


def listened(*callbacks, **more):
    attacks = {"still": still, "<b> 1%": small.sign_step, "b_1": still}
    return robust_ext.robust_accuracy(small.NETWORK, attacks, *GIVEN[1:], callbacks=callbacks, batch_size=4, **more)


def test_callbacks_get_every_record_and_then_the_result_and_what_one_raises_loses_nothing(tmp_path, caplog):
    bad, good, again = listener(), listener(), listener()
    bad.on_record.side_effect = bad.on_result.side_effect = ValueError("no disk")
    result = listened(bad, good, Mock(spec=["on_result"]), out=tmp_path)
    records, told = heard(good)
    assert told == [result] == [robust_ext.load_result(tmp_path)]
    runs = [f"{name} linf 0.1" for name in ("still", "<b> 1%", "b_1")]
    assert [(one["run"], one["sample"]) for one in records] == [(run, sample) for run in runs for sample in range(10)]
    assert (bad.on_record.call_count, bad.on_result.call_count) == (1, 1)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2
    # What is in the folder already is told too.
    listened(again, out=tmp_path)
    assert heard(again)[0] == records


@pytest.mark.parametrize("kind", small.KINDS)
def test_every_evaluation_has_callbacks(kind):
    """A diagnosis tells of itself alone, and not of the evaluations that it is made of."""
    one, own = listener(), {"batch_size": 4} if kind != "diagnosis" else {"planted": 2, "inner_points": 9}
    result = small.call(kind, small.NETWORK, still, small.INPUTS, small.LABELS, callbacks=[one], **own)
    records, told = heard(one)
    assert told == [result]
    assert {record["sample"] for record in records} >= set(range(10))


def test_trackers_get_the_numbers_of_the_rows():
    client, run, writer = Mock(), MagicMock(), Mock()
    result = listened(robust_ext.MLflowCallback(client), robust_ext.WandbCallback(run))
    robust_ext.TensorBoardCallback(writer, step=7).on_result(result)
    found = metrics(result)
    assert found["robust_accuracy/still/0.1/robust_accuracy"] == result.robust_accuracy(0.1, attack="still")
    assert found["robust_accuracy/worst_case/0.1/samples"] == 10
    # Names that are alike when they are made plain stay apart.
    assert {"robust_accuracy/b_1/0.1/seconds", "robust_accuracy/b_1/0.1_2/seconds"} <= set(found)
    assert len([name for name in found if name.endswith("/forward")]) == 3
    assert all(math.isfinite(value) for value in found.values())
    assert params(result)["robust_accuracy/batch_size"] == "4"
    assert {one[0] for one in client.method_calls} == {"log_params", "log_metrics"}
    assert set(client.log_metrics.call_args.args[0]) == set(run.log.call_args.args[0]) == set(found)
    assert all(len(text) <= 250 for text in client.log_params.call_args.args[0].values())
    run.config.update.assert_called_once_with(params(result), allow_val_change=True)
    assert {one.args[0] for one in writer.add_scalar.call_args_list} == set(found)


SHORT = {"inner_points": 30, "random_inner": 10, "random_corners": 10, "witness_steps": 2, "witness_queries": 4}
STRONG = "robust_ext:APGD(steps=20, loss='ce')"


@pytest.mark.parametrize(("gained", "lost", "trials"), [(0, 0, 5), (7, 0, 7), (3, 9, 40), (600, 500, 2000), (5, 5, 10)])
def test_paired_difference_is_mcnemars_test(gained, lost, trials):
    difference, (low, high), p_value = paired_difference(gained, lost, trials)
    assert difference == pytest.approx((gained - lost) / trials)
    assert low <= difference <= high
    assert p_value == pytest.approx(binomtest(gained, gained + lost).pvalue if gained + lost else 1)


def test_the_interval_of_a_paired_difference_covers_what_it_states():
    trials = 8
    found = {(up, down): paired_difference(up, down, trials)[1] for up in range(9) for down in range(9 - up)}
    for rates in ((0.0, 0.0), (0.2, 0.1), (0.5, 0.4), (0.9, 0.05)):
        covered = 0.0
        for (up, down), (low, high) in found.items():
            chance = multinomial.pmf([up, down, trials - up - down], trials, [*rates, 1 - sum(rates)])
            covered += chance * (low <= rates[0] - rates[1] <= high)
        assert covered >= 0.95


def test_the_interval_of_a_difference_is_newcombes():
    """His example (f): 9 of 10 and 3 of 10, with Wilson's intervals, by method 10."""
    few, many = (binomtest(hits, 10).proportion_ci(method="wilson") for hits in (3, 9))
    low, high = difference_interval(0.3, (few.low, few.high), 0.9, (many.low, many.high))
    assert (round(low, 4), round(high, 4)) == (0.1705, 0.8090)


def test_two_tests_of_the_same_samples_and_the_command_that_compares_them(tmp_path):
    for name, attack, more in (("weak", still, {}), ("strong", STRONG, {"batch_size": 5})):
        test = (small.NETWORK, {name: robust_ext.as_attack(attack, name=name)}, small.INPUTS, small.LINF)
        robust_ext.binarization_test(*test, out=tmp_path / name, **SHORT, **more)
    first, second = (robust_ext.load_result(tmp_path / name) for name in ("weak", "strong"))
    found = robust_ext.compare(tmp_path / "weak", str(tmp_path / "strong"))
    (change,) = found.content["changes"]
    assert change["verdict"] == [first.verdict, second.verdict]
    assert change["same"] == {"network": True, "code of the network": True, "samples": True}
    assert change["settings"].keys() >= {"batch_size", "attack weak"}
    assert change["settings"]["batch_size"][1] == 5
    (row,) = change["scores"]
    one, other = (
        {record["sample"] for record in result.records if record["attacks"][name]["outcome"] == "found"}
        for name, result in (("weak", first), ("strong", second))
    )
    assert (row["gained"], row["lost"]) == (len(other - one), len(one - other))
    assert row["p_value"] == pytest.approx(binomtest(row["gained"], row["gained"] + row["lost"]).pvalue)
    assert (row["before"], row["after"], row["score"]) == (first.score, second.score, "weak -> strong")
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "weak"), str(tmp_path / "strong"), "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.rstrip() == str(found).rstrip()
    assert json.loads(file.read_text("utf-8")) == json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_robust_accuracy_is_compared_sample_by_sample():
    def accuracy(attacks, samples=10):
        return robust_ext.robust_accuracy(
            small.NETWORK, attacks, small.INPUTS[:samples], small.LABELS[:samples], small.LINF
        )

    one, other = accuracy({"attack": still}), accuracy({"attack": small.sign_step})
    rows = {row["score"]: row for row in robust_ext.compare(one, other).rows()}
    lost = round(10 * (1 - other.robust_accuracy(0.1)))
    for name in ("attack, epsilon 0.1", "worst case, epsilon 0.1"):
        assert (rows[name]["gained"], rows[name]["lost"], rows[name]["paired"]) == (0, lost, 10)
    (change,) = robust_ext.compare(one, accuracy({"still": still, "step": small.sign_step}, 8)).content["changes"]
    assert change["same"]["samples"] is False
    assert change["settings"]["samples"] == [10, 8]
    (row,) = [row for row in change["scores"] if row["score"] == "worst case, epsilon 0.1"]
    assert row["p_value"] is None
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert change["only"] == [["attack"], ["still", "step"]]


DOCS = Path(__file__).parents[2] / "docs"
# Parts of results, by the name of the table that has their keys.
TABLES = {
    "robust_accuracy": {"": "robust accuracy", "attacks": "its attacks"},
    "test_time": {"": "a test-time evaluation", "static attacks": "an attack on a defense"},
    "mead": {"": "MEAD", "detectors": "a detector", "arms": "an arm"},
    "diagnosis": {"": "", "attacks": "an attack"},
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_docs_name_the_keys_of_results(kind):
    page = DOCS / ("result_json.md" if kind == "diagnosis" else "result_json_worst_case.md")
    text = page.read_text(encoding="utf-8").split("## Diagnosis")[-1]
    more = {"mead": {"published": True, "resamples": 5}, "diagnosis": {"planted": 64, "references": True}}
    step = robust_ext.as_attack("robust_ext:ObjectivePGD(steps=3)")
    given = step, *GIVEN[1:3], robust_ext.ThreatModel(norm="linf", epsilon=0.5)
    content = small.call(kind, small.NETWORK, *given, **more.get(kind, {})).to_dict()
    for place, heading in TABLES[kind].items():
        part = content
        for key in place.split():
            part = part[key]
        table = text.split(f"| key of {heading} |" if heading else "| key |")[1].split("\n\n")[0]
        first = " ".join(line.partition(" | ")[0] for line in table.splitlines()[1:])
        assert set(re.findall(r"`(\w+)(?:\[\])?`", first)) == set(part if part is content else part[0]), place
