"""What every test runs under: a compile cache of its own, and hypothesis without deadlines."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("tinyedge", deadline=None, print_blob=True)
settings.load_profile("tinyedge")

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """A fresh cache a run, shared by the run's processes, so that nothing stale hides a fault."""
    if not hasattr(config, "workerinput"):
        config.stash[_cache] = os.environ["TINYEDGE_CACHE"] = tempfile.mkdtemp(prefix="tinyedge-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if (cache := config.stash.get(_cache, None)) is not None:
        shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A test's random numbers follow from its name, not from which tests ran before it."""
    for name in ("rng", "RNG", "RANDOM"):
        shared = getattr(request.module, name, None)
        if isinstance(shared, np.random.Generator):
            own = np.random.default_rng(zlib.crc32(request.node.name.encode()))
            shared.bit_generator.state = own.bit_generator.state
