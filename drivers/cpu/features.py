"""What this machine's processor can do, against what a plan's target string asks for."""

from __future__ import annotations

import platform

from tinyedge.errors import DeviceError, PlanError

# x86-64 psABI, table 3.1, in the names of /proc/cpuinfo
V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split()
V3 = V2 + "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()
V4 = V3 + "avx512f avx512bw avx512cd avx512dq avx512vl".split()
NEEDS = {"x86-64-v2": V2, "x86-64-v3": V3, "x86-64-v4": V4, "aarch64": []}

# LLVM's names of features, which targets use, where the kernel's differ by more than punctuation
# (arch/arm64/kernel/cpuinfo.c; arch/x86/include/asm/cpufeatures.h)
KERNEL_NAMES = {
    "neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "fp16fml": "asimdfhm",
    "rdm": "asimdrdm", "lse": "atomics", "rcpc": "lrcpc", "complxnum": "fcma", "jsconv": "jscvt",
    "crc": "crc32", "lzcnt": "abm", "pclmul": "pclmulqdq", "rdrnd": "rdrand", "sahf": "lahf_lm",
    "sha": "sha_ni", "prfchw": "3dnowprefetch",
}


def flags() -> frozenset[str]:
    """The feature names that the kernel reports; DeviceError if they can't be read."""
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DeviceError("open /proc/cpuinfo", "the processor's features can't be read",
                          error.errno or 0) from None
    return frozenset()


def machine() -> str:
    """"x86-64", "aarch64" or the kernel's own name."""
    name = platform.machine()
    return {"x86_64": "x86-64", "AMD64": "x86-64", "arm64": "aarch64"}.get(name, name)


def missing(arch: str, extra: tuple[str, ...] = ()) -> list[str]:
    """Feature names that code for `arch` needs and this machine lacks."""
    if not arch.startswith(machine()):
        return [arch]
    have = {_plain(f) for f in flags()}
    return [f for f in (*NEEDS.get(arch, [arch]), *extra)
            if _plain(f) not in have and _plain(KERNEL_NAMES.get(f, f)) not in have]


def _plain(name: str) -> str:
    """A feature's name without what LLVM (sse4.1, avx512vnni) and the kernel (sse4_1,
    avx512_vnni) write differently."""
    return name.translate({ord(c): None for c in "._-"})


def check(target: str) -> None:
    """PlanError when this machine can't run code for `target`."""
    family, _, rest = target.partition(":")
    arch, *extra = rest.split(",")
    if family != "cpu" or arch not in NEEDS:
        raise PlanError(f"the plan was built for {target}, which this version's CPU driver does "
                        "not know; build it again for this machine")
    lack = missing(arch, tuple(extra))
    if lack:
        raise PlanError(f"the plan was built for {target}; this {machine()} machine lacks "
                        f"{', '.join(lack)}; build it again with a target that fits")
