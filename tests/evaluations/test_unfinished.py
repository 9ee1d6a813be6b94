"""What ``robust-ext show`` prints of runs that are not finished, of every evaluation."""

import pytest
from typer.testing import CliRunner

from robust_ext import diagnose
from robust_ext.cli import app as cli
from robust_ext.core.errors import DataError, RunFolderError
from robust_ext.evaluations.unfinished import show_run
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, Calls, evaluate, sign_step

# The call of an attack at which each is stopped, and what there is of it then.
STOPPED = {
    "binarization": (10, ["step", "still", "8  10", "found 0 of 8"], "binarization (2)"),
    "mead": (3, ["step linf 0.1", "found", "not begun"], "step linf 0.1 (2)"),
    "robust_accuracy": (3, ["step linf 0.1", "found", "not begun"], "step linf 0.1 (2)"),
    "test_time": (3, ["clean", "left of these 10: static 100.0, defense 100.0", "left of these 8"], "step (2)"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run(name, tmp_path):
    stop, words, missing = STOPPED[name]
    with pytest.raises(KeyboardInterrupt):
        evaluate(name, tmp_path, stop_at=stop)
    # As a kill leaves it: a last line that was not written to its end.
    with next(tmp_path.rglob("records.jsonl")).open("ab") as file:
        file.write(b'{"index": 9, "outc')
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    for word in (*words, "Not finished", f"Missing samples: {missing}"):
        assert word in shown.output
    result = evaluate(name, tmp_path)
    assert show_run(tmp_path) == str(result)


def test_a_stopped_diagnosis(tmp_path):
    calls = Calls(stop_at=2)

    def step(model, x, y, threat_model):
        calls.count()
        return sign_step(model, x, y, threat_model)

    with pytest.raises(KeyboardInterrupt):
        diagnose(NETWORK, {"step": step}, INPUTS, LABELS, LINF, out=tmp_path, batch_size=5, inner_points=9)
    shown = show_run(tmp_path)
    assert "Not finished (step)" in shown
    assert "found" in shown


def test_what_is_no_run_and_what_is_damaged(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        show_run(tmp_path / "nothing")
    with pytest.raises(KeyboardInterrupt):
        evaluate("robust_accuracy", tmp_path, stop_at=3)
    file = next(tmp_path.rglob("records.jsonl"))
    file.write_bytes(file.read_bytes().replace(b'"index": 0', b'"index": 1', 1))
    with pytest.raises(RunFolderError, match="checksum"):
        show_run(tmp_path)
