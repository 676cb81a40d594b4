"""LLVM IR texts to object files: cached by content, compiled on all processors.

The last compile-time stage before linking. LLVM's Python binding holds one lock, so a second
process takes half of what the cache does not have; it is a fresh interpreter, safe under threads.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from .cache import Cache
from .llvm_target import CpuTarget, compile_ir, parse_target

SHARED_FROM = 8
"""Texts to compile before a second process pays for its start of 0.2 s."""


def compile_all(
    texts: Sequence[str], target: CpuTarget, cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[bytes]:
    """One object file for every text, in order."""
    import llvmlite

    store = Cache() if cache else None
    out: dict[int, bytes] = {}
    keys = [f"{llvmlite.__version__}\n{target}\n{t}" for t in texts]
    if store is not None:
        for i, k in enumerate(keys):
            found = store.get(k)
            if found is not None:
                out[i] = found
    missing = sorted((i for i in range(len(texts)) if i not in out), key=lambda i: -len(texts[i]))

    def done(i: int, code: bytes) -> None:
        out[i] = code
        if store is not None:
            store.put(keys[i], code)
        if progress is not None:
            progress("object code", len(out), len(texts))

    others: list[tuple[list[int], subprocess.Popen[bytes]]] = []
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if len(missing) >= SHARED_FROM and count > 1:
        shares = [missing[k::count] for k in range(count)]
        missing = shares[0]
        for share in shares[1:]:
            try:
                others.append((share, _start(share, texts, target)))
            except OSError:
                missing = missing + share
    try:
        for i in missing:
            done(i, compile_ir(texts[i], target))
        for share, process in others:
            results = _results(process, len(share))
            for n, i in enumerate(share):
                # what the other process failed at fails here again, with its message
                done(i, results[n] if n < len(results) else compile_ir(texts[i], target))
    finally:
        for _, process in others:
            process.kill()
            process.wait()
    return [out[i] for i in range(len(texts))]


def _start(
    share: Sequence[int], texts: Sequence[str], target: CpuTarget
) -> subprocess.Popen[bytes]:
    # a file, not a pipe: the other process takes its time to start, and this one has work to do
    with tempfile.TemporaryFile() as work:
        _send(work, target.canonical.encode())
        for i in share:
            _send(work, texts[i].encode())
        work.seek(0)
        # -P: nothing is imported from the working directory that is not imported from it here
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tinyedge.codegen.objects"],
            stdin=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )


def _results(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    assert process.stdout is not None
    out: list[bytes] = []
    while len(out) < count and (code := _receive(process.stdout)) is not None:
        out.append(code)
    process.stdout.close()
    process.wait()
    return out


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<q", head)[0]
    data = pipe.read(size)
    return data if len(data) == size else None


def _worker() -> None:
    """Reads a target and texts, writes an object for each, until its input ends."""
    source: Any = sys.stdin.buffer
    name = _receive(source)
    if name is None:
        return
    target = parse_target(name.decode())
    texts = []
    while (text := _receive(source)) is not None:
        texts.append(text.decode())
    # all at the end: the other side reads when its own share is done, and a pipe holds 64 KiB
    for code in [compile_ir(t, target) for t in texts]:
        _send(sys.stdout.buffer, code)


if __name__ == "__main__":
    _worker()
