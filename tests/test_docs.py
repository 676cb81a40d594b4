"""The documents: their code runs, it shows what they say, and their links lead somewhere.

Every ``python`` block of a page in docs/ (of README.md: every ``python run`` block) runs in order,
in one namespace a page and a folder of its own. What it prints stands in a ``text`` block right
behind it; a number with a decimal point may differ by one in its last digit, since processors round
differently. ``python -m tests.test_docs`` writes those blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

FENCE = re.compile(r"```(.*)\n((?:.*\n)*?)```\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)]*\)")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block. language: the words behind the fence. line: its first line's number; start,
    end: where its content lies in the page's text."""

    language: str
    line: int
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    return [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m.start(2), m.end(2))
            for m in FENCE.finditer(text)]


def outputs(page: Path) -> Iterator[tuple[Block, Block | None, str]]:
    """Runs a page: each block of code, the block behind it that shows its output, the output."""
    text = page.read_text(encoding="utf-8")
    runs = "python run" if page.parent == ROOT else "python"
    namespace: dict[str, Any] = {"__name__": page.stem}
    found = blocks(text)
    for n, block in enumerate(found):
        if block.language != runs:
            continue
        shown = found[n + 1] if n + 1 < len(found) and found[n + 1].language == "text" and \
            not text[block.end + 4:found[n + 1].start - 8].strip() else None
        printed = io.StringIO()
        # the lines before it, so that a traceback names the page's line
        code = "\n" * (block.line - 1) + text[block.start:block.end]
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        yield block, shown, "".join(f"{s.rstrip()}\n" for s in printed.getvalue().splitlines())


def alike(a: str, b: str) -> bool:
    """Whether two texts are the same but for the last digit of numbers with a decimal point."""
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return False
    for x, y in zip(NUMBER.findall(a), NUMBER.findall(b)):
        digits, _, exponent = x.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        if abs(float(x) - float(y)) > 1.001 * unit:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(text)), f"{page.name}: a block is not closed"
    for block, shown, printed in outputs(page):
        expected = "" if shown is None else text[shown.start:shown.end]
        if not alike(printed, expected):
            assert printed == expected, f"{page.name}, line {block.line}: another output"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"


def test_alike() -> None:
    assert alike("a 0.25 3", "a 0.26 3")
    assert not alike("a 0.25 3", "a 0.27 3")
    assert not alike("a 0.25 3", "a 0.25 4")
    assert alike("1.5e-07", "1.6e-07")


def main() -> None:
    """Writes what the pages' code prints into them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            ran = list(outputs(page))
        for block, shown, printed in reversed(ran):
            if shown is not None:
                text = text[:shown.start] + printed + text[shown.end:]
            elif printed:
                text = f"{text[:block.end]}```\n```text\n{printed}{text[block.end:]}"
        temporary = page.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, page)


if __name__ == "__main__":
    main()
