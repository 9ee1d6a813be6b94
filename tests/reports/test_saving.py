"""A result as files in a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from robust_ext.reports import render_html, save

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def test_writes_two_files_and_nothing_else(make_attack, make_result, tmp_path):
    result = make_result([make_attack("攻撃 \ud800")])
    folder = tmp_path / "deep" / "run"
    save(result, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "result.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == result
    assert (folder / "report.html").read_text(encoding="utf-8") == render_html(result)


def test_replaces_what_was_there(make_attack, make_result, tmp_path):
    save(make_result([make_attack("pgd")], seed=1), tmp_path)
    save(make_result([make_attack("pgd")], seed=2), str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["seed"] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_numbers_that_json_does_not_know(make_attack, make_result, tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(make_result([make_attack("pgd", score=value)]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_result_without_a_page_leaves_the_folder_as_it_was(make_attack, make_result, tmp_path):
    with pytest.raises(ValueError, match="at least one attack"):
        save(make_result([]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(make_attack, make_result, tmp_path, monkeypatch):
    save(make_result([make_attack("pgd")], seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(make_result([make_attack("pgd")], seed=2), tmp_path)
    assert {path.name: path.read_bytes() for path in Path(tmp_path).iterdir()} == before
