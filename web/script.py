"""Source text without what only its readers need: comments, indentation, empty lines.

Line ends stay, so that JavaScript's automatic semicolons do too. Strings, template literals and
regular expressions are copied as they are.
"""

from __future__ import annotations

import re

_JAVASCRIPT = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)"""
    r"""|(?P<kept>'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<template>`)"""
    r"""|(?P<regex>(?<=[(,=:\[!&|?{};])\s*/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*)""",
    re.DOTALL | re.VERBOSE)

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async |class |const |function ))", re.MULTILINE)


def strip(text: str) -> str:
    """JavaScript that does the same; ValueError for a literal without an end."""
    out: list[str] = []
    at = 0
    while at < len(text):
        found = _JAVASCRIPT.search(text, at)
        if found is None:
            out.append(text[at:])
            break
        out.append(text[at:found.start()])
        at = found.end()
        if found["template"]:
            at = _template_end(text, found.start())
            out.append("\0" + text[found.start():at].replace("\n", "\1") + "\0")
        elif not found["comment"]:
            out.append(found[0])
        elif "\n" in found[0]:
            out.append("\n")
    lines = (line.strip() for line in "".join(out).split("\n"))
    kept = "\n".join(line for line in lines if line)
    return kept.replace("\0", "").replace("\1", "\n") + "\n"


def _template_end(text: str, start: int) -> int:
    """Where the template literal that begins at `start` ends, with those inside of it."""
    at, depth = start + 1, 0
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c == "`":
            if not depth:
                return at + 1
            at = _template_end(text, at) - 1
        elif c == "$" and text[at + 1:at + 2] == "{" and not depth or c == "{" and depth:
            depth += 1
            at += c == "$"
        elif c == "}" and depth:
            depth -= 1
        at += 1
    raise ValueError("a template literal has no end")


def joined(modules: list[str]) -> str:
    """Modules that import only from each other as one, in the order in which they are needed."""
    return "".join(strip(_EXPORT.sub("", _IMPORT.sub("", text))) for text in modules)


def strip_wgsl(text: str) -> str:
    """WGSL that does the same; it has neither strings nor nested line comments."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return "\n".join(line for line in (line.strip() for line in text.split("\n")) if line) + "\n"
