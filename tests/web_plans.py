"""Plans made by hand, small enough to see what a bundle has to compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinyedge.plan import If, Kernel, Launch, Loop, Plan, Port, Ref, State

COUNT = 3 << 16
BYTES = 4 * COUNT
WEIGHTS = np.random.default_rng(7).standard_normal(COUNT).astype(np.float32)

SCALE = """
@group(0) @binding(0) var<storage, read> x: array<f32>; // the input
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read_write> t: array<f32>;
/* one invocation
   an element */
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
    t[id.x] = x[id.x] * w[id.x];
}
"""
ADD = """
@group(0) @binding(0) var<storage, read> t: array<f32>;
@group(0) @binding(1) var<storage, read_write> h: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
    h[id.x] += t[id.x];
    y[id.x] = h[id.x];
}
"""


def recurrent() -> Plan:
    """y = h = h + x * WEIGHTS, where h is a state; of WebGPU."""
    return Plan(
        "webgpu", (Port("x", (COUNT,), "float32"),), (Port("y", (COUNT,), "float32"),),
        (State("h", "h.next", (COUNT,), "float32", Ref(2, 0, BYTES)),), {}, (BYTES, BYTES, BYTES),
        (Kernel("scale", 0, source=SCALE, resources={"workgroup": 64}, writes=(2,)),
         Kernel("add", 0, source=ADD, resources={"workgroup": 64}, writes=(1, 2))),
        (Launch(0, (Ref(3, 0, BYTES), Ref(0, 0, BYTES), Ref(1, 0, BYTES)), (), COUNT // 64),
         Launch(1, (Ref(1, 0, BYTES), Ref(2, 0, BYTES), Ref(4, 0, BYTES)), (), COUNT // 64)),
        b"", WEIGHTS.tobytes(), name="recurrent",
        provenance={"weights": ((0, COUNT, 3, ((1 << 16, 3, 1),)),)})


DECIDE = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> trips: array<vec2u>;
@group(0) @binding(2) var<storage, read_write> more: array<u32>;
@compute @workgroup_size(1)
fn main() {
    trips[0] = vec2u(3u, 0u);
    more[0] = select(0u, 1u, x[0] > 0);
}
"""
CLEAR = """
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
struct Symbols { n: i32 }
@group(0) @binding(1) var<uniform> symbols: Symbols;
@compute @workgroup_size(1)
fn main(@builtin(global_invocation_id) id: vec3u) {
    y[id.x] = f32(symbols.n);
}
"""
TURN = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
struct Symbols { n: i32, turn: i32 }
@group(0) @binding(2) var<uniform> symbols: Symbols;
@compute @workgroup_size(1)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if (id.x < u32(2 * symbols.n)) { y[id.x] += f32(symbols.turn + 1) * x[id.x]; }
}
"""


def branching() -> Plan:
    """y[n, 2] = n + x * (1 + 2 + 3), or n where x[0, 0] <= 0; n in 1..8."""
    size = ("mul", 8, ("sym", "n"))
    x, y, trips, more = Ref(3, 0, size), Ref(4, 0, size), Ref(1, 0, 8), Ref(1, 256, 1)
    # a buffer is read in one dispatch or written, never both: the two conditions lie apart
    room = Ref(1, 0, 256), Ref(1, 256, 256)
    grid = ("mul", 2, ("sym", "n"))
    one = {"workgroup": 1}
    return Plan(
        "webgpu", (Port("x", (("sym", "n"), 2), "float32"),),
        (Port("y", (("sym", "n"), 2), "float32"),), (), {"n": (1, 8)}, (0, 512, 0),
        (Kernel("decide", 0, source=DECIDE, resources=one, writes=(1, 2)),
         Kernel("clear", 0, source=CLEAR, resources=one, writes=(0,)),
         Kernel("turn", 0, source=TURN, resources=one, writes=(1,))),
        (Launch(0, (x, *room), (), 1), Launch(1, (y,), ("n",), grid),
         If(more, (Loop("turn", trips, more, (Launch(2, (x, y), ("n", "turn"), grid),)),), ())),
        b"", b"", name="branching")


def recurrence(x: npt.NDArray[np.float32], runs: int) -> npt.NDArray[np.float32]:
    """What `recurrent` gives after so many runs on x."""
    h = np.zeros(COUNT, np.float32)
    for _ in range(runs):
        h = h + x * WEIGHTS
    return h


SIDE = 32
AVERAGE = f"""
@group(0) @binding(0) var<storage, read> image: array<f32>;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;
@compute @workgroup_size(1)
fn main(@builtin(global_invocation_id) id: vec3u) {{
    var sum = 0.0;
    for (var i = 0u; i < {SIDE * SIDE}u; i++) {{ sum += image[id.x * {SIDE * SIDE}u + i]; }}
    scores[id.x] = sum / {SIDE * SIDE}.0 * 5.0;
}}
"""


def colours() -> Plan:
    """Scores for red, green and blue: five times a picture's averages from 0 to 1."""
    size = 4 * 3 * SIDE * SIDE
    return Plan(
        "webgpu", (Port("image", (1, 3, SIDE, SIDE), "float32"),),
        (Port("scores", (1, 3), "float32"),), (), {}, (0, 0, 0),
        (Kernel("average", 0, source=AVERAGE, resources={"workgroup": 1}, writes=(1,)),),
        (Launch(0, (Ref(3, 0, size), Ref(4, 0, 12)), (), 3),), b"", b"", name="colours")


# WebAssembly, written byte by byte. Addresses:
JOINED, STOP, TICKET, MARKS, STACKS, STACK = 0, 4, 8, 64, 4096, 4096
W, H, X, Y = (0x10000 + i * BYTES for i in range(4))
I32, V128 = 0x7F, 0x7B


def _leb(n: int) -> bytes:
    """LEB128, signed: right for all constants here."""
    out = bytearray()
    while True:
        low = n & 0x7F
        n >>= 7
        if n == (-1 if low & 0x40 else 0):
            return bytes([*out, low])
        out.append(low | 0x80)


def _uleb(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _vector(items: list[bytes]) -> bytes:
    return _uleb(len(items)) + b"".join(items)


def _section(number: int, content: bytes) -> bytes:
    return bytes([number]) + _uleb(len(content)) + content


def _module(relaxed: bool, pages: int) -> tuple[bytes, int]:
    """(a module that computes `recurrent`, where the flag of its memory stands)."""
    def i32(n: int) -> bytes:
        return b"\x41" + _leb(n)

    def get(n: int) -> bytes:
        return b"\x20" + _uleb(n)

    def at(op: str, offset: int = 0) -> bytes:  # align 4
        return bytes.fromhex(op) + b"\x02" + _uleb(offset)

    joined = i32(JOINED) + at("fe10") + get(0) + i32(1) + bytes.fromhex("6b 4e 0d 01")
    patience = (get(2) + i32(1) + bytes.fromhex("6a 22 02") + i32(1 << 28)
                + bytes.fromhex("49 0d 00"))
    element = (get(1) + b"".join(get(1) + at("2a", a) for a in (H, X, W))
               + bytes.fromhex("94 92") + at("38", H) + get(1) + get(1) + at("2a", H) + at("38", Y))
    following = get(1) + i32(4) + bytes.fromhex("6a 22 01") + i32(BYTES) + bytes.fromhex("49 0d 00")
    run = (bytes.fromhex("02 40 03 40") + joined + patience + i32(1) + bytes.fromhex("0f 0b 0b")
           + bytes.fromhex("03 40") + element + following + b"\x0b"
           + i32(0) + i32(relaxed) + at("36", MARKS) + i32(0))
    work = (i32(TICKET) + i32(1) + at("fe1e") + i32(1) + bytes.fromhex("6a") + i32(2)
            + bytes.fromhex("74 23 00") + at("36", MARKS)
            + i32(JOINED) + i32(1) + at("fe1e") + b"\x1a" + bytes.fromhex("03 40")
            + i32(STOP) + i32(0) + bytes.fromhex("42 7f") + at("fe01") + b"\x1a"
            + i32(STOP) + at("fe10") + bytes.fromhex("45 0d 00 0b"))
    stop = i32(STOP) + i32(1) + at("fe17") + i32(STOP) + i32(-1) + at("fe00") + b"\x1a"
    zero = i32(0) + bytes.fromhex("fd 0f")
    unused = (3 * zero + bytes.fromhex("fd 85 02 1a")) if relaxed else zero + b"\x1a"

    def body(code: bytes, locals_: int = 0) -> bytes:
        whole = (_vector([_uleb(locals_) + bytes([I32])]) if locals_ else b"\0") + code + b"\x0b"
        return _uleb(len(whole)) + whole

    types = [bytes([0x60, 1, I32, 1, I32]), bytes([0x60, 1, I32, 0]), bytes([0x60, 0, 0])]
    memory = b"\x03env\x06memory\x02"
    names = ["run", "work", "stop", "unused"]
    exports = [_uleb(len(n)) + n.encode() + b"\0" + bytes([i]) for i, n in enumerate(names)]
    head = b"\0asm\1\0\0\0" + _section(1, _vector(types))
    imports = _vector([memory + b"\x01" + _uleb(pages) + _uleb(pages)])
    flag = len(head) + 1 + len(_uleb(len(imports))) + 1 + len(memory)
    code = head + _section(2, imports) + _section(3, _vector([b"\0", b"\1", b"\2", b"\2"])) \
        + _section(6, _vector([bytes([I32, 1]) + i32(STACKS + STACK) + b"\x0b"])) \
        + _section(7, _vector([*exports, b"\x0dstack_pointer\x03\x00"])) \
        + _section(10, _vector([body(run, 2), body(work), body(stop), body(unused)]))
    return code, flag


def threaded() -> Plan:
    """`recurrent` for WebAssembly, with and without relaxed SIMD; another output says which, and
    where the stacks of other threads are."""
    pages = (Y + BYTES) // 65536
    plans = []
    for relaxed in (True, False):
        code, flag = _module(relaxed, pages)
        plans.append(Plan(
            f"wasm:{'relaxed' if relaxed else 'simd128'}", (Port("x", (COUNT,), "float32"),),
            (Port("y", (COUNT,), "float32"), Port("marks", (4,), "int32")),
            (State("h", "h.next", (COUNT,), "float32", Ref(2, 0, BYTES)),), {}, (BYTES, 0, BYTES),
            (), (), code, WEIGHTS.tobytes(),
            {"memory_flag": flag, "pages": pages, "constants": W, "scratch": 0, "states": H,
             "symbols": 1024, "input0": X, "output0": Y, "output1": MARKS, "stacks": STACKS,
             "stack_size": STACK}, name="threaded",
            provenance={"weights": ((0, COUNT, 3, ((1 << 16, 3, 1),)),)}))
    plans[0].variants = (plans[1],)
    return plans[0]
