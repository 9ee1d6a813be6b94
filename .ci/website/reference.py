"""The reference of the site: a page for each part of the project, with every public name.

Public is what ``robust_ext`` and the ``__init__`` of its packages hand on (``import X as X``, or ``__all__``), the
project's attacks, and the Foolbox and ART classes. A name that several hand on stands under the shortest path. It is
found by reading the files, so that nothing is imported; mkdocstrings puts signatures and docstrings in.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from docstrings import with_links

# Parts by the modules in which names are defined; the first that fits.
PARTS = {
    "errors": ("Errors", ("robust_ext.core.errors",)),
    "foolbox": ("Foolbox models and attacks", ("robust_ext.adapters.foolbox",)),
    "art": ("ART classifiers and attacks", ("robust_ext.adapters.art",)),
    "attacks": ("Attacks", ("robust_ext.attacks",)),
    "detectors": ("Detectors", ("robust_ext.detectors",)),
    "defenses": (
        "Test-time defenses, BPDA and EoT",
        (
            "robust_ext.defenses",
            *(f"robust_ext.models.{one}" for one in ("adaptive", "bpda", "eot", "function_purifier", "purifier")),
        ),
    ),
    "models": ("Models, features and readouts", ("robust_ext.models",)),
    "registry": ("Names and objects", ("robust_ext.registry",)),
    "executors": ("Executors", ("robust_ext.engine.executors", "robust_ext.engine.isolation")),
    "casestudies": ("Case studies", ("robust_ext.casestudies",)),
    "datasets": ("Datasets", ("robust_ext.datasets",)),
    "reports": ("Reports", ("robust_ext.reports",)),
    "testing": ("Testing attacks", ("robust_ext.testing",)),
    "evaluations": ("Evaluations and results", ("robust_ext",)),
}
# Modules that are public as a whole: host libraries' classes and executors are imported from them.
WHOLE = {
    "robust_ext.adapters.foolbox.models": "foolbox",
    "robust_ext.adapters.foolbox.attacks": "foolbox",
    "robust_ext.adapters.art.estimators": "art",
    "robust_ext.adapters.art.attacks": "art",
    "robust_ext.engine.executors": "executors",
}


@dataclass(frozen=True)
class Public:
    """A public name: the path to import it from, the module that defines it, and its first sentence."""

    path: str
    origin: str
    summary: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def part(self) -> str:
        """The page that it stands on."""
        return next(
            part
            for part, (_, modules) in PARTS.items()
            if any(self.origin == one or self.origin.startswith(f"{one}.") for one in modules)
        )


def public_names(root: Path) -> list[Public]:
    """Every public name once, by the shortest path."""
    faces = [path for top in ("robust_ext", "adapters") for path in (root / top).rglob("__init__.py")]
    found: dict[tuple[str, str], str] = {}
    for face in sorted(faces, key=lambda path: (len(path.parts), path)):
        package = _module(face.parent, root)
        for name, origin in _handed_on(ast.parse(face.read_text(encoding="utf-8"))):
            found.setdefault((origin, name), f"{package}.{name}")
    catalogue = ast.parse((root / "robust_ext" / "attacks" / "catalogue.py").read_text(encoding="utf-8"))
    for node in catalogue.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("robust_ext.attacks"):
            for one in node.names:
                found.setdefault((str(node.module), one.name), f"{node.module}.{one.name}")
    public = [Public(path, origin, _summary(root, origin, name)) for (origin, name), path in found.items()]
    # Functions come first, then classes and constants, results and settings.
    return sorted(public, key=lambda one: (not one.name.islower(), one.name.endswith(("Result", "Settings")), one.path))


def _module(folder: Path, root: Path) -> str:
    parts = folder.relative_to(root).parts
    return ".".join(("robust_ext", *parts) if parts[0] == "adapters" else parts)


def _handed_on(tree: ast.Module) -> list[tuple[str, str]]:
    """Names that a face hands on, with the modules that they come from."""
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = set(listed[0]) if listed else set()
    return [
        (one.name, str(node.module))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if not one.name.startswith("_") and (one.asname == one.name or one.name in names)
    ]


def _summary(root: Path, origin: str, name: str) -> str:
    """The first sentence of the docstring, on one line; "" for values."""
    tree = ast.parse(_file(root, origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return ""


def _file(root: Path, module: str) -> Path:
    inside = module.split(".")
    base = root.joinpath(*inside[1:] if inside[:2] == ["robust_ext", "adapters"] else inside)
    return base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"


def reference_pages(root: Path) -> dict[str, str]:
    """The pages by name: ``index.md``, and one a part."""
    public = public_names(root)
    pages = {}
    for part, (title, _) in PARTS.items():
        entries = [f"::: {one.path}\n" for one in public if one.part == part]
        entries += [f"::: {module}\n" for module, at in WHOLE.items() if at == part]
        pages[f"{part}.md"] = f"# {title}\n\n" + "\n".join(entries)
    return {"index.md": _index(public), **pages}


def links(public: list[Public]) -> dict[str, str]:
    """Paths of public names by all that docstrings call them: the path, where it is defined, the name alone."""
    found = {one.name: one.path for one in public}
    return found | {path: one.path for one in public for path in (one.path, f"{one.origin}.{one.name}")}


def _index(public: list[Public]) -> str:
    """All names with their first sentences, by part."""
    lines = [
        "# Reference\n",
        "Every public name, by the shortest path that it can be imported from. "
        "[Settings](../settings.md) are in tables.\n",
    ]
    for part, (title, _) in PARTS.items():
        lines += [f"\n## [{title}]({part}.md)\n", "| name | |", "|---|---|"]
        lines += [
            f"| [`{one.path}`][{one.path}] | {with_links(one.summary, links(public))} |"
            for one in public
            if one.part == part
        ]
        lines += [f"| [`{module}`][{module}] | {_summary_of(module)} |" for module, at in WHOLE.items() if at == part]
    return "\n".join(lines) + "\n"


def _summary_of(module: str) -> str:
    return {
        "models": "Planted and defended classifiers as Foolbox models.",
        "estimators": "Planted and defended classifiers as ART estimators.",
        "attacks": "The project's attacks as classes of the library.",
        "executors": "Executors by name, for blocks of samples that workers compute.",
    }[module.rpartition(".")[2]]
