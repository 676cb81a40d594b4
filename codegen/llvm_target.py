"""Targets and LLVM: a target string to a target machine, IR text to an object file; of processors
and of WebAssembly.

Compile time only; the run time checks the canonical target string by itself
(`tinyedge.drivers.cpu.features`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tinyedge.dtype import BFLOAT16, INT8, UINT8, DType
from tinyedge.errors import InputError, UnsupportedError

LEVELS = {"x86-64-v4": 64, "x86-64-v3": 32, "x86-64-v2": 16}
"""x86-64 microarchitecture levels (System V psABI, section 3.1.1) -> vector width in bytes."""


@dataclass(frozen=True)
class Gpu:
    """What schedules and drivers of a GPU have to keep to.

    buffers: most storage buffers of one kernel. alignment: of a buffer's place, in bytes.
    workgroup: invocations of a workgroup. registers: vectors of four that an invocation may hold in
    a register tile. occupancy: invocations from which on the device is busy.
    """

    buffers: int
    alignment: int
    workgroup: int
    registers: int
    occupancy: int


WEBGPU = Gpu(buffers=8, alignment=256, workgroup=64, registers=16, occupancy=4096)
"""What every WebGPU adapter can do (WebGPU, "limits"). The rest are choices that suit adapters from
integrated ones up: 64 invocations are a whole number of every vendor's subgroups."""


@dataclass(frozen=True)
class CpuTarget:
    """What LLVM needs to know, and what the schedule does.

    canonical: the target string that a plan carries. vector_bytes: width of a vector register.
    registers: how many of them there are. gpu: limits, where it is a GPU that runs the kernels.
    """

    canonical: str
    arch: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    gpu: Gpu | None = None

    @property
    def family(self) -> str:
        """What stands before the colon: which driver runs it."""
        return self.canonical.partition(":")[0]

    @property
    def language(self) -> str:
        """What its kernels are written in: a module of `codegen.render`, whose render(kernel,
        target) gives a function named @ and the kernel's name."""
        return {"c": "c", "webgpu": "wgsl"}.get(self.family, "llvm")

    @property
    def madd(self) -> str:
        """LLVM's name for a fused or unfused multiply-add of floats, where it finds none itself."""
        return "llvm.wasm.relaxed.madd" if self.canonical == "wasm:relaxed" else ""

    @property
    def prefetches(self) -> bool:
        """Whether memory can be asked for before it is read."""
        return self.family == "cpu"

    @property
    def dots(self) -> dict[tuple[DType, DType], str]:
        """Types of operands -> the instruction, as the renderer knows it, that multiplies as many
        neighbours of them as fill 32 bits, and adds the products to a sum."""
        extra = self.canonical.split(",")[1:]
        return dict(DOTS[f] for f in extra if f in DOTS)


_WASM = "+atomics,+bulk-memory,+mutable-globals,+nontrapping-fptoint,+sign-ext,+simd128"
WASM = {"relaxed": f"{_WASM},+relaxed-simd", "simd128": _WASM}
"""Sets of instructions that code for WebAssembly is made for, the better one first."""

DOTS = {
    "avx512vnni": ((UINT8, INT8), "vpdpbusd"), "avxvnni": ((UINT8, INT8), "vpdpbusd"),
    "i8mm": ((UINT8, INT8), "usdot"), "avx512bf16": ((BFLOAT16, BFLOAT16), "dpbf16ps"),
}
"""Features that multiply and add neighbours at once: the operands' types, and the instruction as
the renderer knows it."""

EXTRAS = {
    "x86-64": "adx aes avx512bf16 avx512bitalg avx512fp16 avx512ifma avx512vbmi avx512vbmi2 "
              "avx512vnni avx512vpopcntdq avxifma avxvnni avxvnniint8 bmi bmi2 f16c fma gfni lzcnt "
              "movbe pclmul popcnt sha vaes vpclmulqdq",
    "aarch64": "aes bf16 complxnum crc dotprod fp16fml fullfp16 i8mm lse neon rcpc rdm sha2 sve "
               "sve2",
}
"""Features, in LLVM's names, that a target may ask for beyond those of its ARCH."""


def extras(arch: str) -> list[str]:
    """The features that a target of an architecture may ask for."""
    return EXTRAS.get(arch, "").split()


def parse_target(text: str) -> CpuTarget:
    """The target that ``cpu[:ARCH[,FEATURE...]]`` names; the default is this machine.

    ARCH is aarch64, x86-64 (the same as -v2), x86-64-v2, -v3 or -v4. InputError for any other.
    """
    family, _, rest = text.partition(":")
    if family == "wasm":
        if rest not in WASM:
            raise InputError(f"target {text}: use wasm, or one of wasm:{' and wasm:'.join(WASM)}")
        # of 16 vector registers on x86-64, V8 has the use of 12 before it spills: measured, tiles
        # of 4 x 2 run ResNet-50 at 1.3 to 1.6 times the speed of larger ones
        return CpuTarget(f"wasm:{rest}", "wasm32", "wasm32-unknown-unknown", "generic",
                         WASM[rest], 16, 12)
    if text == "c":  # short vectors, which every compiler can unroll
        return CpuTarget("c", "c", "", "", "", 16, 16)
    if family == "webgpu":
        if rest not in ("", "f16"):
            raise InputError(f"target {text}: use webgpu or webgpu:f16")
        return CpuTarget(text, "wgsl", "", "", rest, 16, WEBGPU.registers, WEBGPU)
    if family != "cpu":
        raise InputError(f"target {text}: there are cpu, wasm, webgpu and c; use "
                         "cpu[:ARCH[,FEATURE]]")
    arch, *extra = [p for p in rest.split(",") if p] or [host_arch()]
    if arch == "x86-64":
        arch = "x86-64-v2"
    known = extras("x86-64" if arch in LEVELS else arch)
    if (arch in LEVELS or arch == "aarch64") and (odd := sorted(set(extra) - set(known))):
        raise InputError(f"target {text}: {odd[0]} is not a feature of {arch}; use some of "
                         f"{', '.join(known)}")
    if arch in LEVELS:
        features = ",".join(["-prefer-256-bit", *(f"+{f}" for f in extra)])
        return CpuTarget(",".join([f"cpu:{arch}", *extra]), "x86-64", "x86_64-unknown-linux-gnu",
                         arch, features, LEVELS[arch], 32 if LEVELS[arch] == 64 else 16)
    if arch == "aarch64":
        return CpuTarget(",".join(["cpu:aarch64", *extra]), "aarch64", "aarch64-unknown-linux-gnu",
                         "generic", ",".join(["-outline-atomics", *(f"+{f}" for f in extra)]), 16,
                         32)
    raise InputError(f"target {text}: {arch} is not a known architecture; use aarch64 or one of "
                     f"{', '.join(sorted(LEVELS))}")


def parse_targets(text: str) -> list[CpuTarget]:
    """The targets that ``cpu:ARCH+ARCH...`` names, the widest vectors first. After an x86-64 level
    another may be given as ``v4``. InputError."""
    family, colon, rest = text.partition(":")
    if text == "wasm":
        return [parse_target(f"wasm:{name}") for name in WASM]
    parts = rest.split("+")
    if len(parts) == 1:
        return [parse_target(text)]
    if not all(parts):
        raise InputError(f"target {text}: nothing stands on one side of a +")
    found = [parse_target(f"{family}:{'x86-64-' if p[:1] == 'v' else ''}{p}") for p in parts]
    if len({t.canonical for t in found}) != len(found):
        raise InputError(f"target {text}: one of them is named twice")
    return sorted(found, key=lambda t: (-t.vector_bytes, -len(t.features)))


HALF = """
define float @__extendhfsf2(half %h) nounwind {
  %b = bitcast half %h to i16
  %w = zext i16 %b to i32
  %s = and i32 %w, 32768
  %sign = shl i32 %s, 16
  %em = and i32 %w, 32767
  %up = shl i32 %em, 13
  %f = bitcast i32 %up to float
  %scaled = fmul float %f, 0x46F0000000000000
  %n = bitcast float %scaled to i32
  %special = icmp uge i32 %em, 31744
  %inf = or i32 %up, 2139095040
  %r = select i1 %special, i32 %inf, i32 %n
  %all = or i32 %r, %sign
  %out = bitcast i32 %all to float
  ret float %out
}

define half @__truncsfhf2(float %x) nounwind {
  %w = bitcast float %x to i32
  %a = and i32 %w, 2147483647
  %s = lshr i32 %w, 16
  %sign = and i32 %s, 32768
  %shift = lshr i32 %a, 13
  %lsb = and i32 %shift, 1
  %r1 = add i32 %a, -939520001
  %r2 = add i32 %r1, %lsb
  %normal = lshr i32 %r2, 13
  %af = bitcast i32 %a to float
  %tiny1 = fadd float %af, 5.000000e-01
  %tiny2 = bitcast float %tiny1 to i32
  %tiny = add i32 %tiny2, -1056964608
  %is.tiny = icmp ult i32 %a, 947912704
  %v1 = select i1 %is.tiny, i32 %tiny, i32 %normal
  %is.big = icmp uge i32 %a, 1199570944
  %v2 = select i1 %is.big, i32 31744, i32 %v1
  %is.nan = icmp ugt i32 %a, 2139095040
  %v3 = select i1 %is.nan, i32 32256, i32 %v2
  %all = or i32 %v3, %sign
  %t = trunc i32 %all to i16
  %out = bitcast i16 %t to half
  ret half %out
}
"""
"""float16 conversions for processors without F16C, under the names that LLVM calls."""


def support_ir(target: CpuTarget) -> list[str]:
    """Texts to compile with a plan's kernels: what LLVM may call on this target."""
    return [HALF] if target.cpu == "x86-64-v2" or target.arch == "wasm32" else []


@cache
def host_arch() -> str:
    """The best ARCH that this machine runs."""
    import platform

    from tinyedge.drivers.cpu.features import missing

    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return "aarch64"
    if machine not in ("x86_64", "AMD64"):
        raise UnsupportedError(f"this machine is a {machine}; name a target, for example "
                               "cpu:aarch64")
    return next((a for a in LEVELS if not missing(a)), "x86-64-v2")


@cache
def _machine(target: CpuTarget) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3,
        reloc="static" if target.arch == "wasm32" else "pic", codemodel="small")


def compile_ir(text: str, target: CpuTarget) -> bytes:
    """An ELF object from LLVM IR text; the text is expected to need no optimisation passes."""
    import llvmlite.binding as llvm

    machine = _machine(target)
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise AssertionError(f"the rendered kernel is not valid LLVM IR: {error}") from error
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    code: bytes = machine.emit_object(module)
    return code
