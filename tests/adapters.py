"""WebGPU adapters in software for tests: lavapipe through wgpu, SwiftShader through Dawn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LAVAPIPE = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"), None)
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")


@contextmanager
def loader(driver: Path | None) -> Iterator[None]:
    """The Vulkan loader finds this driver only, as long as the first adapters are looked for."""
    if driver is None or not driver.exists():
        pytest.skip("the software adapter is missing: apt-get install mesa-vulkan-drivers chromium")
    names = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES", "XDG_RUNTIME_DIR")
    before = {n: os.environ.get(n) for n in names}
    os.environ.update(VK_ICD_FILENAMES=str(driver), VK_DRIVER_FILES=str(driver),
                      XDG_RUNTIME_DIR="/tmp")
    try:
        yield
    finally:
        for n, v in before.items():
            if v is None:
                os.environ.pop(n, None)
            else:
                os.environ[n] = v


@pytest.fixture(scope="session")
def lavapipe() -> str:
    """The name of the device of lavapipe."""
    pytest.importorskip("wgpu")
    from tinyedge.drivers import webgpu

    with loader(LAVAPIPE):
        assert any(f.usable and "llvmpipe" in f.description for f in webgpu.probe())
    return "webgpu:llvmpipe"


@pytest.fixture(scope="session")
def swiftshader() -> str:
    """The name of the device of SwiftShader, with Tint as the compiler."""
    pytest.importorskip("wgpudawn")
    from tinyedge.drivers import webgpu

    with loader(SWIFTSHADER):
        webgpu.open("webgpu", "webgpu:dawn:swiftshader")
    return "webgpu:dawn:swiftshader"
