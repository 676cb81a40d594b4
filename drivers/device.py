"""The contracts between the run time and every device driver, and the table of drivers.

A driver is a module with `open(target, device) -> Device` and `probe() -> list[Found]`; it is
imported when its family is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tinyedge.errors import InputError, PlanError
from tinyedge.plan import Plan

FAMILIES = {"cpu": "tinyedge.drivers.cpu", "wasm": "tinyedge.drivers.wasm",
            "webgpu": "tinyedge.drivers.webgpu"}
"""Target family -> module of its driver."""


@dataclass(frozen=True)
class Found:
    """One device that `probe` saw: usable, or why not."""

    name: str
    description: str
    usable: bool
    reason: str = ""


class Executable(Protocol):
    """A plan bound to a device: constants uploaded, memory allocated, commands built."""

    def __call__(self, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        """Runs once. addresses: of C-order memory for every input, then every output, in the
        plan's order; it must stay valid until the call returns. symbols: values in the order of
        ``plan.symbols``. Nothing is compiled, allocated or parsed here. One call at a time.
        DeviceTimeout and DeviceLost end a wait that takes too long."""

    def profile(self, addresses: Sequence[int], symbols: Sequence[int]) -> list[int]:
        """Like a call; nanoseconds spent in each step, by its place in `flat(plan.steps)`."""

    def states(self) -> memoryview:
        """The states arena, writable, in place."""

    def close(self) -> None:
        """Frees everything; may be repeated."""


class Device(Protocol):
    """An opened device."""

    name: str

    def bind(self, plan: Plan, threads: int | None = None) -> Executable:
        """PlanError if the plan needs what the device lacks; nothing of it has run then."""

    def close(self) -> None:
        """Gives the device back; may be repeated."""


def open_device(target: str, device: str | None = None) -> Device:
    """Opens the device for plans of `target`; `device` picks one by name ("cpu").

    PlanError for a target that no driver serves, InputError for a device that is not there.
    """
    family = target.partition(":")[0]
    if family not in FAMILIES:
        raise PlanError(f"the plan is for {target}, and this version has drivers for "
                        f"{', '.join(FAMILIES)} only")
    if device is not None and device.partition(":")[0] != family:
        raise InputError(f"device {device} can't run a plan for {target}; use --device {family}")
    driver: Any = import_module(FAMILIES[family])
    opened: Device = driver.open(target, device)
    return opened


def probe() -> list[Found]:
    """Every device that any driver sees, without claiming it."""
    return [f for module in FAMILIES.values() for f in import_module(module).probe()]
