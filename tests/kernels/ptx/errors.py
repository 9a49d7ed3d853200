"""The ways in which a kernel fails in the emulator."""

from __future__ import annotations


class EmulatorError(Exception):
    """The emulator does not know an instruction, or the kernel uses one in a way that PTX does not define."""


class BoundsError(EmulatorError):
    """An access outside of all tensors, outside of the shared memory, or at an address that is not aligned."""


class RaceError(EmulatorError):
    """Two accesses of the same bytes, one of them a write, that nothing orders."""


class DependenceError(EmulatorError):
    """A launch with programmatic dependent launch does something before it waits that it must not."""


class DeadlockError(EmulatorError):
    """No warp can go on: all that are left wait."""
