"""A content-addressed store on disk for what is expensive to make: schedules and object code.

Entries carry a checksum; one that is damaged is dropped and made again. A folder that can't be
written is no error: nothing is stored then. The store can be copied to another machine.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import blake2b
from pathlib import Path

LIMIT = 1 << 30
"""Bytes; above it the entries used longest ago are removed."""

PRUNE_AT = "00"
"""End of an entry's name at which the size is looked at: after one new entry of 256, whichever
process stores it."""


def folder() -> Path:
    """TINYEDGE_CACHE, or tinyedge's folder in the user's cache."""
    named = os.environ.get("TINYEDGE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tinyedge"


class Cache:
    """See the module's page."""

    def __init__(self, where: Path | None = None) -> None:
        self.where = folder() if where is None else where

    def _path(self, key: str) -> Path:
        name = blake2b(key.encode(), digest_size=20).hexdigest()
        return self.where / name[:2] / name[2:]

    def get(self, key: str) -> bytes | None:
        """What was stored under `key`, or None."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if _checksum(key, data[16:]) == data[:16]:
            return data[16:]
        _remove(path)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Stores `value`; whoever reads sees all of it or nothing."""
        path, part = self._path(key), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as f:
                f.write(_checksum(key, value) + value)
            os.replace(part, path)
        except OSError:
            if part is not None:
                _remove(Path(part))
            return
        if path.name.endswith(PRUNE_AT):
            self.prune()

    def prune(self, limit: int = LIMIT) -> None:
        """Removes the entries used longest ago until `limit` bytes are left."""
        entries = []
        for p in self.where.glob("??/*"):
            try:
                s = p.stat()
            except OSError:
                continue
            entries.append((max(s.st_atime, s.st_mtime), s.st_size, p))
        total = sum(size for _, size, _ in entries)
        for _, size, p in sorted(entries):
            if total <= limit:
                break
            _remove(p)
            total -= size


def _checksum(key: str, value: bytes) -> bytes:
    """Of both, so that an entry under another's name is not taken for it."""
    name = blake2b(key.encode(), digest_size=32).digest()
    return blake2b(value, digest_size=16, key=name).digest()


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass
