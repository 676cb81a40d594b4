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
