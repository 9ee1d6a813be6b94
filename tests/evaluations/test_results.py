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
from tests.evaluations import small

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
    parser = _Parser()
    parser.feed(result._repr_html_())
    assert parser.open == []
    assert parser.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert parser.rows == 1 + len(result.rows())


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
def test_latex_is_escaped_and_plots_are_drawn(results, kind):
    lines = results[kind].to_latex().splitlines()
    assert lines[1] == r"\toprule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    columns = len(lines[0].removeprefix(r"\begin{tabular}{").removesuffix("}"))
    for line in (lines[2], *lines[4:-2]):
        assert line.replace(r"\&", "").count("&") == columns - 1
        bare = line.replace(r"\&", "").replace("{}", "").removesuffix(r"\\")
        for char in "%$#_{}":
            assert bare.count(char) == bare.count(f"\\{char}")
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
