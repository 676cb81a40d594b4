"""A plan for c as C11 source: NAME.c and NAME.h, constants inside, no memory from the heap.

The end of the pipeline where there is neither a driver nor a loader: the steps become calls. The
model's function is as its inputs, outputs and open dimensions are; its scratch memory and its
states are static, so it is not to be called from two threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .codegen.render.c import PAD, SEPARATOR, c_type
from .dtype import DTYPES
from .plan import (
    CONSTANTS,
    FIRST_EXTERNAL,
    SCRATCH,
    STATES,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Port,
    Ref,
    Size,
    Step,
    flat,
    show_shape,
)

RESERVED = frozenset(
    "auto bool break case char const continue default do double else enum extern false float for "
    "goto if inline int long register restrict return short signed sizeof static struct switch "
    "true typedef union unsigned void volatile while main".split())

LINE = 96
"""Bytes of constants in a line of source."""


def identifier(text: str) -> str:
    """A name in C for a name in a model."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "model"
    return f"_{name}" if name[0].isdigit() else f"{name}_" if name in RESERVED else name


def unique(names: Iterable[str]) -> list[str]:
    """The identifiers of names, all of them different."""
    out: list[str] = []
    for name in map(identifier, names):
        number, one = 2, name
        while one in out:
            one, number = f"{name}_{number}", number + 1
        out.append(one)
    return out


def sources(plan: Plan, name: str) -> tuple[str, str]:
    """(the source, the header) of a plan for c; `name` is the function's and the files'."""
    writer = _Writer(plan, name)
    return writer.source(), writer.header()


class _Writer:
    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        ports = [*plan.inputs, *plan.outputs]
        names = unique([*(p.name for p in ports), *plan.symbols])
        self.ports = names[:len(ports)]
        loops = [s.symbol for s in flat(plan.steps) if isinstance(s, Loop)]
        self.symbols = {**dict(zip(plan.symbols, names[len(ports):])),
                        **{s: f"turn{i}" for i, s in enumerate(loops)}}
        self.count = 0

    # the header

    def prototype(self) -> str:
        plan = self.plan
        parts = [f"{'const ' if i < len(plan.inputs) else ''}{c_type(DTYPES[p.dtype])} *{name}"
                 for i, (name, p) in enumerate(zip(self.ports, (*plan.inputs, *plan.outputs)))]
        parts += [f"int64_t {self.symbols[s]}" for s in plan.symbols]
        return f"int {self.name}({', '.join(parts) or 'void'})"

    def header(self) -> str:
        plan, guard = self.plan, f"{self.name.upper()}_H"

        def line(name: str, port: Port, what: str) -> str:
            return f" * {name}: {what} {port.dtype}{show_shape(port.shape)}"

        about = [line(n, p, "input" if i < len(plan.inputs) else "output")
                 for i, (n, p) in enumerate(zip(self.ports, (*plan.inputs, *plan.outputs)))]
        about += [f" * {self.symbols[s]}: the dimension {s}, {low}..{high}"
                  for s, (low, high) in plan.symbols.items()]
        reset = (f"\n/* Sets the model's states to zero, as they are at first. */\n"
                 f"void {self.name}_reset(void);\n") if plan.arenas[STATES] else ""
        return (f"/* {plan.name or 'A model'}, compiled by {plan.producer or 'tinyedge'}. */\n"
                f"#ifndef {guard}\n#define {guard}\n\n#include <stdbool.h>\n#include <stdint.h>\n\n"
                "#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n"
                "/* Runs the model once. Arrays are in C order.\n" + "\n".join(about) +
                "\n * Returns 0, or -1 where a dimension is out of its bounds. Not to be called"
                " from two\n * threads at once: memory for intermediate values is static. */\n"
                f"{self.prototype()};\n{reset}\n#ifdef __cplusplus\n}}\n#endif\n\n#endif\n")

    # the source

    def source(self) -> str:
        plan = self.plan
        helpers: dict[str, str] = {}
        kernels = []
        for k in plan.kernels:
            *parts, text = k.source.split(SEPARATOR)
            helpers |= dict.fromkeys(parts)  # type: ignore[arg-type]
            kernels.append(text.replace("@", "", 1))
        body = "\n".join(self.steps(plan.steps, "    "))
        loops = any(isinstance(s, Loop) for s in flat(plan.steps))
        used = {"constants": CONSTANTS, "scratch": SCRATCH, "states": STATES}
        memory = [f"static _Alignas(64) unsigned char {name}[{plan.arenas[arena] + PAD}];"
                  for name, arena in used.items() if arena != CONSTANTS and plan.arenas[arena]]
        if plan.arenas[CONSTANTS]:
            size = plan.arenas[CONSTANTS] + PAD
            memory.insert(0, f"static const _Alignas(64) unsigned char constants[{size}] =\n"
                             f"{_text(plan.constants)};\n")
        counter = ("static int64_t trips_of(const unsigned char *p)\n{\n    int64_t v;\n    "
                   "memcpy(&v, p, sizeof v);\n    return v;\n}\n") if loops else ""
        reset = (f"\nvoid {self.name}_reset(void)\n{{\n    memset(states, 0, sizeof states);\n}}\n"
                 ) if plan.arenas[STATES] else ""
        checks = [f"    if ({self.symbols[s]} < {low} || {self.symbols[s]} > {high})\n"
                  "        return -1;\n" for s, (low, high) in plan.symbols.items()]
        pointers = "".join(
            f"    {'const ' * (i < len(plan.inputs))}unsigned char *p{i} = "
            f"({'const ' * (i < len(plan.inputs))}unsigned char *){n};\n"
            for i, n in enumerate(self.ports) if re.search(rf"\bp{i}\b", body))
        unused = "".join(f"    (void){n};\n" for i, n in enumerate(self.ports)
                         if not re.search(rf"\bp{i}\b", body))
        return "\n".join([
            f"/* {plan.name or 'A model'}, compiled by {plan.producer or 'tinyedge'}. */",
            f'#include "{self.name}.h"', "", "#include <math.h>", "#include <string.h>", "",
            *memory, "", *helpers, counter, *kernels,
            self.prototype(), "{", "".join([*checks, pointers, unused]) + body,
            "    return 0;", "}", reset])

    def at(self, ref: Ref) -> str:
        names = {CONSTANTS: "constants", SCRATCH: "scratch", STATES: "states"}
        name = names.get(ref.arena) or f"p{ref.arena - FIRST_EXTERNAL}"
        return f"{name} + {ref.offset}" if ref.offset else name

    def size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        if size[0] == "sym":
            return self.symbols[size[1]]
        a, b = self.size(size[1]), self.size(size[2])
        if size[0] in ("min", "max"):
            return f"({a} {'<' if size[0] == 'min' else '>'} {b} ? {a} : {b})"
        # dimensions are not negative, so that rounding down is C's
        return f"({a} { {'add': '+', 'mul': '*', 'floordiv': '/', 'mod': '%'}[size[0]] } {b})"

    def steps(self, steps: Iterable[Step], pad: str) -> list[str]:
        out: list[str] = []
        for s in steps:
            if isinstance(s, Launch):
                parts = [*map(self.at, s.buffers), *(self.symbols[x] for x in s.scalars),
                         self.size(s.grid)]
                out.append(f"{pad}{self.plan.kernels[s.kernel].name}({', '.join(parts)});")
            elif isinstance(s, Copy):
                out.append(f"{pad}memmove({self.at(s.target)}, {self.at(s.source)}, "
                           f"(size_t){self.size(s.source.size)});")
            elif isinstance(s, If):
                out += [f"{pad}if (*({self.at(s.cond)})) {{", *self.steps(s.then, pad + "    "),
                        f"{pad}}} else {{", *self.steps(s.other, pad + "    "), f"{pad}}}"]
            else:
                i, n = self.symbols[s.symbol], f"trips{self.count}"
                self.count += 1
                out += [f"{pad}const int64_t {n} = trips_of({self.at(s.trips)});",
                        f"{pad}for (int64_t {i} = 0; {i} < {n} && *({self.at(s.cond)}); {i}++) {{",
                        *self.steps(s.body, pad + "    "), f"{pad}}}"]
        return out


_PLAIN = frozenset(range(32, 127)) - frozenset(b'"\\?')  # a question mark may begin a trigraph
_BYTE = [chr(b) if b in _PLAIN else f"\\{b:03o}" for b in range(256)]


def _text(data: bytes | memoryview) -> str:
    """Bytes as string literals, which compilers read faster than lists of numbers."""
    return "\n".join('    "' + "".join(map(_BYTE.__getitem__, data[at:at + LINE])) + '"'
                     for at in range(0, len(data), LINE))


__all__ = ["identifier", "sources"]
