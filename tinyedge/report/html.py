"""One HTML file, without scripts or anything from outside, that shows the facts of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, ROOM = 1000, 340, 56
"""Pixels of the memory chart, and of its margin on the left."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #667085; --line: #d7dbe2; --paper: #fff;
        --bar: #3b6ef5; --tint: #eef2ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #9aa3b5; --line: #343a46;
        --paper: #14171d; --bar: #6f95ff; --tint: #1d2433; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 2rem auto; padding: 0 1.5rem; max-width: 68rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p, .soft { color: var(--soft); margin: .2rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; }
dl div { background: var(--tint); border-radius: .5rem; padding: .6rem .8rem; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.share { background: linear-gradient(var(--bar), var(--bar)) left bottom / var(--w) 3px no-repeat; }
code { font-size: .85em; } .share { white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
svg rect { stroke: var(--paper); stroke-width: .6; } svg line { stroke: var(--line); }
"""


def page(facts: dict[str, Any]) -> str:
    """The page for `tinyedge.report.facts`."""
    title = facts["name"] or "A plan"
    memory = facts["memory"]
    tiles = [
        ("a run", f"{facts['flops'] / 1e9:.3g} GFLOP"), ("steps", str(facts["steps"])),
        ("kernels", str(len(facts["kernels"]))), ("constants", amount(memory["constants"])),
        ("scratch", amount(memory["scratch"])), ("states", amount(memory["states"])),
        ("code", amount(memory["code"])),
    ]
    if facts["us"] is not None:
        tiles.insert(0, ("time of a run", f"{facts['us'] / 1e3:.3g} ms"))
    ports = [(kind[:-1], p["name"], p["dtype"], p["shape"])
             for kind in ("inputs", "outputs", "states") for p in facts[kind]]
    saved = memory["unpacked"] / memory["scratch"] if memory["scratch"] else 0
    return "\n".join([
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p>for <code>{escape(facts['target'])}</code>, by {escape(facts['producer'])}</p>",
        "<dl>", *(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles), "</dl>",
        "<h2>Inputs and outputs</h2>",
        _table(("", "name", "type", "shape"), ports),
        "<h2>Scratch memory over time</h2>",
        f"<p>Every box is a buffer: steps from left to right, addresses upwards. The arena of "
        f"{amount(memory['scratch'])} holds {amount(memory['unpacked'])} of buffers"
        + (f", {saved:.1f} times its size." if saved else ".") + "</p>",
        _chart(facts),
        "<h2>Kernels</h2>", _kernels(facts),
        "<h2>Provenance</h2>",
        _table(("", ""), [(k, str(v)) for k, v in
                          {**facts["provenance"], **facts["metadata"]}.items()]),
        "</html>", ""])


def _chart(facts: dict[str, Any]) -> str:
    lives, total = facts["memory"]["lifetimes"], facts["memory"]["scratch"]
    if not lives or not total:
        return "<p>There are no intermediate buffers.</p>"
    across = (WIDTH - ROOM) / max(1, facts["steps"])
    up = HEIGHT / total
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 24}" role="img" aria-label="buffers over time">']
    for quarter in range(5):
        y = HEIGHT - quarter * HEIGHT / 4
        out.append(f'<line x1="{ROOM}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/><text x="{ROOM - 6}"'
                   f' y="{min(HEIGHT, y + 10):.1f}" text-anchor="end">{amount(total * quarter / 4)}'
                   '</text>')
    for i, life in enumerate(lives):
        width = max(1.0, (life["last"] - life["first"] + 1) * across)
        height = max(0.8, life["size"] * up)
        what = (f"{life['by']}: {amount(life['size'])} at {life['offset']}, steps {life['first']} "
                f"to {life['last']}")
        out.append(
            f'<rect x="{ROOM + life["first"] * across:.2f}" '
            f'y="{HEIGHT - life["offset"] * up - height:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}" fill="hsl({i * 67 % 360} 55% 58%)"><title>{escape(what)}'
            '</title></rect>')
    out.append(f'<text x="{ROOM}" y="{HEIGHT + 16}">step 0</text><text x="{WIDTH}" '
               f'y="{HEIGHT + 16}" text-anchor="end">step {facts["steps"] - 1}</text></svg>')
    return f'<div class="scroll">{"".join(out)}</div>'


def _kernels(facts: dict[str, Any]) -> str:
    timed = facts["us"] is not None
    key = "us" if timed else "flops"
    total = sum((k[key] or 0) * (1 if timed else k["launches"]) for k in facts["kernels"]) or 1
    head = ["kernel", "launches", "MFLOP", "memory", *(["us", "GFLOP/s"] if timed else []), "nodes"]
    rows = []
    for k in facts["kernels"]:
        share = (k[key] or 0) * (1 if timed else k["launches"]) / total
        row = [f'<td class="share" style="--w:{share:.1%}"><code>{escape(k["name"])}</code></td>',
               _number(k["launches"]), _number(f"{k['flops'] / 1e6:.3g}"),
               _number(amount(k["bytes"]))]
        if timed:
            us = k["us"] or 0
            speed = k["flops"] * k["launches"] / us / 1e3 if us else 0
            row += [_number(f"{us:.1f}"), _number(f"{speed:.1f}")]
        row.append(f"<td>{escape(', '.join(k['nodes']))}</td>")
        rows.append(f"<tr>{''.join(row)}</tr>")
    heads = "".join(f'<th{"" if h in ("kernel", "nodes") else " class=n"}>{h}</th>' for h in head)
    what = "time" if timed else "operations"
    return (f"<p>The bar under a name is its share of all {what}.</p>"
            f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>')


def _number(value: object) -> str:
    return f'<td class="n">{value}</td>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(h)}</th>" for h in head)] if any(head) else []
    lines += ["".join(f"<td>{escape(c)}</td>" for c in row) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{r}</tr>" for r in lines) + \
        "</table></div>"


def amount(value: float, unit: str = "B") -> str:
    """``12.3 MB``"""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            return f"{value:.0f} {unit}" if not prefix else f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError


__all__ = ["amount", "page"]
