"""Python for aarch64 under QEMU's user mode: what the tests of aarch64 plans run on.

The root file system is made of Debian's arm64 packages, fetched by apt into folders of its own (the
host's package state is not touched), and of numpy's aarch64 wheel; it is kept in the cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from examples.files import CACHE, locked

HERE = Path(__file__).resolve().parent.parent
FOLDER = CACHE.parent / "aarch64"
QEMU = "qemu-aarch64"
TOOLS = (QEMU, "apt-get", "dpkg-deb")
PACKAGES = ("python3", "libstdc++6")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")

PREAMBLE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import tinyedge
# the other folders of the package stand beside it
tinyedge.__path__.append({str(HERE)!r})
"""


class Unavailable(Exception):
    """The rig can't be had on this machine, and why."""


def root() -> Path:
    """Folder of a root file system with Python and numpy; made at the first call.

    Raises Unavailable when a tool is missing or the packages can't be fetched.
    """
    found = _root()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@cache
def _root() -> Path | str:
    """The folder, or why there is none: what fails once is not tried again."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    path = FOLDER / "root"
    with locked(FOLDER):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
                made = Path(temporary) / "root"
                try:
                    _make(Path(temporary), made)
                except (Unavailable, subprocess.TimeoutExpired) as error:
                    return str(error)
                made.rename(path)
    return path


def run(script: str, *arguments: str | Path, timeout: float = 120) -> str:
    """What `script` prints under the aarch64 Python; tinyedge can be imported there.

    AssertionError with its error output when it fails.
    """
    where = root()
    done = subprocess.run(
        [*_python(where), "-c", PREAMBLE + script, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False, env=_environment(where))
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def _python(where: Path) -> list[str]:
    return [QEMU, "-L", str(where), str((where / "usr/bin/python3").resolve())]


def _environment(where: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_", "QEMU_"))}
    # compiled modules stay with the root, so that they are neither lost nor left in the checkout
    return {**kept, "PYTHONHOME": str(where / "usr"), "PYTHONPATH": str(where / "site"),
            "PYTHONPYCACHEPREFIX": str(where / "pycache"), "OPENBLAS_NUM_THREADS": "1"}


def _make(temporary: Path, made: Path) -> None:
    for package in _packages(temporary):
        _call(["dpkg-deb", "-x", str(package), str(made)])
    for name in ("lib", "bin"):
        # Debian 13's packages count on the links that its base-files package brings
        if not (made / name).exists():
            (made / name).symlink_to(f"usr/{name}")
    version = (made / "usr/bin/python3").readlink().name.removeprefix("python")
    if tuple(map(int, version.split("."))) < (3, 11):
        raise Unavailable(f"the distribution's Python is {version}, tinyedge needs 3.11")
    wheels = temporary / "wheels"
    _call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
           "--python-version", version, *(f"--platform={p}" for p in PLATFORMS),
           "--dest", str(wheels), "numpy"])
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as z:
            z.extractall(made / "site")
    # proves the whole rig before it is kept; modules are compiled where they will lie
    _call([*_python(made), "-c", "import ctypes, mmap, numpy"],
          {**_environment(made), "PYTHONDONTWRITEBYTECODE": "1"})


def _packages(temporary: Path) -> list[Path]:
    """Debian's packages and all that they need."""
    state, store = temporary / "state", temporary / "store"
    for folder in (state / "lists/partial", store / "archives/partial"):
        folder.mkdir(parents=True)
    (temporary / "status").touch()
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "",
        "Dir::State": state, "Dir::State::status": temporary / "status", "Dir::Cache": store,
        "Acquire::Languages": "none", "Acquire::Retries": 0, "Acquire::http::Timeout": 20,
    }
    apt = ["apt-get", "-qq", *(f"-o{k}={v}" for k, v in settings.items())]
    # a source without arm64 fails here, and does no harm if the packages are in another
    subprocess.run([*apt, "update"], capture_output=True, check=False, timeout=300)
    _call([*apt, "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES])
    return sorted((store / "archives").glob("*.deb"))


def _call(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600,
                          env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Unavailable(f"{Path(command[0]).name} failed: {reason}")
