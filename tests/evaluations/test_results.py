"""Results as objects: equality, files, tables and plots, of every kind."""

import copy
import csv
import html.parser
import io
import json
import pickle
import types

import pytest

import robust_ext
from robust_ext.casestudies.result import CaseStudyResult
from robust_ext.evaluations.diagnosis import DiagnosisResult
from tests.evaluations import small
from tests.reports import results as made

HOSTILE = '<script>alert("$x_1$")</script> & 100% {of} ~^\\ #'


def diagnosis(out, attacks):
    step = {"step": attacks["step"]}
    settings = {"inner_points": 20, "queries": 20, "references": False, "planted": 4}
    return robust_ext.diagnose(small.NETWORK, step, small.INPUTS, small.LABELS, small.LINF, out=out, **settings)


def evaluation(out):
    given = {"budget": "quick", "planted": 4, "claim": 60, "out": out}
    return robust_ext.evaluate(small.NETWORK, small.INPUTS, small.LABELS, small.LINF, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder):
    step = robust_ext.as_attack(small.sign_step, name=HOSTILE)
    plain = {"step": robust_ext.as_attack(small.sign_step, name="step")}
    attacks = {HOSTILE: step, "still": lambda model, x, y: x}
    kinds = {name: evaluate(folder / name, attacks) for name, evaluate in small.EVALUATIONS.items()}
    others = {"diagnosis": diagnosis(folder / "diagnosis", plain), "evaluation": evaluation(folder / "evaluation")}
    return {**kinds, **others}


KINDS = [*small.EVALUATIONS, "diagnosis", "evaluation"]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_what_is_loaded_are_equal(results, folder, kind):
    result = results[kind]
    others = [
        pickle.loads(pickle.dumps(result)),  # noqa: S301
        copy.deepcopy(result),
        robust_ext.load_result(folder / kind),
        type(result).load(folder / kind / "result.json"),
        type(result)(types.MappingProxyType(dict(reversed(result.content.items())))),
    ]
    for other in others:
        assert other == result
        assert hash(other) == hash(result)
        assert str(other) == str(result)
        assert type(other) is type(result)
    assert type(result)({**result.content, "seed": 1}) != result
    assert result != result.content
    # A security curve keeps a row for each run and sample in this process alone.
    assert list(others[2].records) == ([] if kind == "robust_accuracy" else list(result.records))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_result_in_a_notebook_is_a_line_or_a_table(results, kind):
    result = results[kind]
    assert repr(result).startswith(f"<{type(result).__name__}: ")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 300
    parser = _Parser()
    parser.feed(result._repr_html_())
    assert parser.open == []
    assert parser.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert parser.rows == 1 + len(result.rows())


def test_a_notebook_shows_the_fragment(results):
    formatters = pytest.importorskip("IPython.core.formatters")
    result = results["binarization"]
    shown, _ = formatters.DisplayFormatter().format(result)
    assert shown == {"text/plain": repr(result), "text/html": result._repr_html_()}


class _Parser(html.parser.HTMLParser):
    """The tags of a fragment, and those that were not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.rows = [], set(), 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.rows += tag == "tr"
        # Only what stands on dark and on light ground.
        style = dict(attrs).get("style", "")
        assert "color:" not in style.replace("color: inherit", "")
        assert "background: " not in style.replace("background: transparent", "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", KINDS)
def test_tables_agree(results, kind, tmp_path):
    pandas = pytest.importorskip("pandas")
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
    assert pandas.read_csv(io.StringIO(text)).shape == frame.shape


@pytest.mark.parametrize("kind", KINDS)
def test_latex_is_escaped(results, kind):
    lines = results[kind].to_latex().splitlines()
    assert lines[1] == r"\toprule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    columns = len(lines[0].removeprefix(r"\begin{tabular}{").removesuffix("}"))
    for line in (lines[2], *lines[4:-2]):
        assert line.replace(r"\&", "").count("&") == columns - 1
        bare = line.replace(r"\&", "").replace("{}", "").removesuffix(r"\\")
        for char in "%$#_{}":
            assert bare.count(char) == bare.count(f"\\{char}")


@pytest.mark.parametrize("kind", KINDS)
def test_plots(results, kind):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    result = results[kind]
    figure, axes = pyplot.subplots()
    assert result.plot(axes) is axes
    assert axes.has_data()
    assert result.plot().figure is not figure
    for one in (axes, pyplot.gca()):
        one.figure.canvas.draw()
    words = [text.get_text() for text in axes.texts]
    assert not [text for text in words if text.startswith("name-")]
    pyplot.close("all")


def test_the_plot_of_a_binarization_test_shows_its_numbers(results):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    result = results["binarization"]
    with pyplot.style.context("dark_background"):
        axes = result.plot()
        assert {line.get_color() for line in axes.lines} == {"white"}
        curves = results["robust_accuracy"].plot()
        assert curves.get_legend().get_lines()[-1].get_color() == "white"
    widths = [patch.get_width() for patch in axes.patches]
    expected = [value for row in result.rows() for value in (row["score"], row["random_score"])]
    assert widths == pytest.approx(expected)
    pyplot.close("all")


def test_pairs_have_a_row_a_test():
    pair = robust_ext.BinarizationResult(made.make_result([made.make_pair("pgd")]))
    assert [(row["test"], row["score"]) for row in pair.rows()] == [("regular", 0.61328125), ("inverted", 0.25)]
    assert "inverted" in pair._repr_html_()


def test_case_studies_have_two_rows_a_study(tmp_path):
    result = CaseStudyResult(made.make_case_studies(HOSTILE))
    result.save(tmp_path)
    assert robust_ext.load_result(tmp_path) == result
    assert [row["recipe"] for row in result.rows()] == ["weak", "right"] * len(result.content["studies"])
    assert "<script" not in result._repr_html_()
    assert repr(result).count("of the authors flagged") == 1


def test_records_of_a_binarization_test(results):
    pytest.importorskip("pandas")
    result = results["binarization"]
    frame = result.records_frame()
    for row in result.rows():
        mine = frame[frame["attack"] == row["attack"]]
        assert len(mine) == row["samples"]
        assert (mine["outcome"] == "found").sum() == row["found"]


def test_findings_come_back_from_the_content(results):
    result = results["diagnosis"]
    assert [one.to_dict() for one in result.findings] == result.content["findings"]
    assert isinstance(result, DiagnosisResult)


def test_without_pandas_the_error_names_the_package(results, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(robust_ext.MissingDependencyError, match="pip install pandas"):
        results["mead"].to_frame()


BAD = {
    "cut off": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[1, 2]",
    "not a number": lambda text: text.replace('"seed": 0', '"seed": NaN'),
    "deep": lambda text: "[" * 100_000,
    "newer": lambda text: text.replace('"format": 2', '"format": 99'),
    "no format": lambda text: text.replace('"format": 2', '"format": "one"'),
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


def test_a_file_of_an_earlier_version_is_read(results, folder, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(results["mead"].to_dict()), encoding="utf-8")
    assert robust_ext.load_result(file) == results["mead"]


def test_only_its_own_kind_is_loaded(results, folder):
    with pytest.raises(robust_ext.DataError, match="holds a MeadResult, not a BinarizationResult"):
        robust_ext.BinarizationResult.load(folder / "mead")


def test_damaged_records_are_refused(results, folder, tmp_path):
    import shutil

    shutil.copytree(folder / "binarization", tmp_path / "run")
    file = tmp_path / "run" / "records.jsonl"
    file.write_text(file.read_text("utf-8").replace('"sample": 3', '"sample": 4'), encoding="utf-8")
    with pytest.raises(robust_ext.RunFolderError, match=r"records\.jsonl"):
        robust_ext.load_result(tmp_path / "run")
