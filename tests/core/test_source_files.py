"""Which files code consists of, compared with what Python imports; and that none of them is run to find out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from robust_ext.core.reached import SourceFiles

PACKAGE = {"a.py": "from p import m", "p/__init__.py": "", "p/m.py": ""}
# Files by name, the first of which is run, and those that do not belong to it.
CASES = {
    "of a chain": ({"a.py": "import b", "b.py": "from c import x", "c.py": "x = 1", "d.py": ""}, {"d.py"}),
    "of a circle": ({"a.py": "import b", "b.py": "import c", "c.py": "import a, b", "d.py": "import a"}, {"d.py"}),
    "in a function": ({"a.py": "def f():\n    import b", "b.py": ""}, set()),
    "in a branch": ({"a.py": "try:\n    import nothing\nexcept ImportError:\n    import b", "b.py": ""}, set()),
    "by name": ({"a.py": "import importlib\nimportlib.import_module('b')", "b.py": ""}, set()),
    "of a package": (
        {"a.py": "import p.m", "p/__init__.py": "from . import n", "p/m.py": "", "p/n.py": "", "p/o.py": ""},
        {"p/o.py"},
    ),
    "from a package": (PACKAGE, set()),
    "with a star": ({**PACKAGE, "a.py": "from p import *", "p/__init__.py": "__all__ = ['m']"}, set()),
    "relative": (
        {"a.py": "import p.q.m", "p/__init__.py": "", "p/n.py": "", "p/r/__init__.py": "", "p/r/s.py": "t = 1"}
        | {"p/q/__init__.py": "", "p/q/m.py": "from .. import n\nfrom .o import x"}
        | {"p/q/o.py": "from ..r.s import t as x"},
        set(),
    ),
    "of a namespace": ({"a.py": "import n.m", "n/m.py": "from . import o", "n/o.py": "", "n/p.py": ""}, {"n/p.py"}),
    "of a module before a folder": ({"a.py": "import b", "b.py": "", "b/c.txt": ""}, {"b/c.txt"}),
    "of a package before a module": ({"a.py": "import b", "b.py": "", "b/__init__.py": ""}, {"b.py"}),
    "of libraries": ({"a.py": "import os.path, torch.nn, robust_ext.core.errors\nfrom json import loads"}, set()),
    "broken": ({"a.py": "try:\n    import b\nexcept SyntaxError:\n    pass", "b.py": "print 1"}, set()),
}
LOADED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import a
files = [str(getattr(one, "__file__", "")) for one in sys.modules.values()]
print(json.dumps([file for file in files if file.startswith(sys.argv[1])]))
"""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def digests(file):
    found = SourceFiles()
    found.add_file(file)
    return found.digests


@pytest.mark.parametrize("name", CASES)
def test_the_files_that_a_file_imports(tmp_path, name):
    files, others = CASES[name]
    write(tmp_path, files)
    expected = set(files) - others
    found = digests(tmp_path / "a.py")
    assert set(found) == expected
    for name in files:
        (tmp_path / name).touch()
    assert digests(tmp_path / "a.py") == found
    for name in files:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n# changed\n")
        changed = digests(tmp_path / "a.py")
        assert {one for one in found if changed[one] != found[one]} == {name} & expected
        (tmp_path / name).write_text(text)


def test_what_python_imports(tmp_path):
    """Of all cases at once, in processes of their own: at least what is loaded there."""
    for number, name in enumerate(set(CASES) - {"of libraries", "broken"}):
        folder = tmp_path / str(number)
        write(folder, CASES[name][0])
        command = [sys.executable, "-S", "-c", LOADED, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded = {str(Path(one).relative_to(folder)) for one in json.loads(done.stdout)}
        assert {"a.py"} <= loaded <= set(digests(folder / "a.py"))


def test_a_helper_that_is_gone_or_new_counts_and_nothing_is_run(tmp_path):
    code = {"a.py": "import b", "b.py": f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit"}
    write(tmp_path, code)
    found = digests(tmp_path / "a.py")
    assert set(found) == {"a.py", "b.py"}
    (tmp_path / "b.py").unlink()
    assert set(digests(tmp_path / "a.py")) == {"a.py"}
    write(tmp_path, code)
    assert digests(tmp_path / "a.py") == found
    assert not (tmp_path / "ran").exists()
