"""Source code as the reference shows it: references as links, declared settings as attributes with their words."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
_DATACLASS = re.compile(r"^@(settings_class|module_class)$", re.MULTILINE)
_FUTURE = "from __future__ import annotations"


def with_links(text: str, known: Mapping[str, str]) -> str:
    """Sphinx's roles as Markdown: a link where the name, or the class of a method, is public, else code."""

    def link(found: re.Match[str]) -> str:
        target = found[1]
        owner, _, last = target.rpartition(".")
        public = known.get(target) or known.get(owner)
        of_class = owner.rpartition(".")[2]
        shown = f"{of_class}.{last}" if of_class[:1].isupper() else last
        return f"[`{shown}`][{public}]" if public else f"`{shown}`"

    return _PAGE.sub(r"[\1](../\1.md)", _ROLE.sub(link, text))


def for_the_site(code: str, known: Mapping[str, str]) -> str:
    """A module with docstrings in Markdown, and classes of settings as dataclasses with their words as ``Args:``."""
    lines = code.splitlines()
    for node in sorted(_changed(ast.parse(code)), key=lambda one: -one.lineno):
        place = slice(node.lineno - 1, node.end_lineno)
        if isinstance(node, ast.AnnAssign):
            lines[place] = [_attribute(node)]
        else:
            lines[place] = _docstring("\n".join(lines[place]), _words(node), known)
    made = "\n".join(lines) + "\n"
    as_dataclasses = _DATACLASS.sub("@_dataclass(kw_only=True)", made)
    return as_dataclasses.replace(_FUTURE, f"{_FUTURE}; from dataclasses import dataclass as _dataclass", 1)


def _changed(tree: ast.Module) -> list[ast.AnnAssign | ast.Expr]:
    """Declared settings, and all docstrings; that of a class knows its class."""
    found: list[ast.AnnAssign | ast.Expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body[0].owner = node
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) or (isinstance(node, ast.AnnAssign) and _given(node) is not None):
            found.append(node)
    return found


def _given(node: ast.AnnAssign) -> dict[str, ast.expr] | None:
    """The arguments of ``setting(...)`` by name; None of anything else."""
    call = node.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "setting"):
        return None
    return dict(zip(("default", "help"), call.args, strict=False)) | {str(one.arg): one.value for one in call.keywords}


def _attribute(node: ast.AnnAssign) -> str:
    """A declared setting as a plain attribute with its default."""
    given = _given(node) or {}
    default = f" = {ast.unparse(given['default'])}" if "default" in given else ""
    return f"{' ' * node.col_offset}{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def _words(docstring: ast.Expr) -> list[str]:
    """Lines of ``Args:`` for the settings that the class of a docstring declares; none of other docstrings."""
    owner = getattr(docstring, "owner", None)
    lines = []
    for node in owner.body if owner is not None else ():
        given = _given(node) if isinstance(node, ast.AnnAssign) else None
        words = (given or {}).get("help")
        if isinstance(words, ast.Constant):
            lines.append(f"    {ast.unparse(node.target)}: {words.value}")
        elif words is not None:
            # Words that are put together when the module is imported are in the settings' tables alone.
            lines.append(f"    {ast.unparse(node.target)}: See docs/settings.md.")
    return ["Args:", *lines] if lines else []


def _docstring(text: str, words: list[str], known: Mapping[str, str]) -> list[str]:
    """Its lines, with literal blocks and examples in the words of Markdown and griffe, and settings before these."""
    text = re.sub(r"::(\n\n)", r":\1", text)
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    if words and "Args:" not in text:
        # At the first section, or at the end.
        written = "\n".join(f"    {line}" for line in words).replace("\\", "\\\\")
        section = re.search(r"\n(?=    (?:Attributes|Returns|Raises|Examples):\n)", text)
        place = section.start() if section else text.rindex('"""')
        text = f"{text[:place].rstrip()}\n\n{written}\n{text[place:] if section else '    ' + text[place:]}"
    return with_links(text, known).splitlines()
