"""System calls that Python 3.11 has no function for, through the C library. Each raises OSError.

unshare(2), setns(2), mount(2), prctl(2), capget(2), signalfd(2)
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWNET: Final = 0x4000_0000
CLONE_NEWPID: Final = 0x2000_0000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x4_0000
_MNT_DETACH: Final = 2

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_CAPABILITY_VERSION_3: Final = 0x2008_0522
_CAPABILITIES: Final = struct.Struct("=6I")  # effective, permitted, inheritable of the low 32; the same of the high

_SFD_CLOEXEC: Final = os.O_CLOEXEC
_SIGNALFD_SIGINFO: Final = struct.Struct("=Iii116x")  # signal:32 errno:32 code:32 …, 128 octets

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def unshare(flags: int) -> None:
    _call("unshare", flags)


def setns(fd: int, kind: int) -> None:
    _call("setns", fd, kind)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)


def bind(source: str, target: str) -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND), None)


def detach_mount(target: str) -> None:
    """The name goes; what was bound from it elsewhere stays."""
    _call("umount2", os.fsencode(target), _MNT_DETACH)


def _prctl(option: int, *arguments: int) -> None:
    _call("prctl", option, *(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]))


def die_with_parent() -> None:
    """With the thread that made this process; a parent that is gone already sends nothing any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def be_undumpable() -> None:
    """No core file, and /proc/self is root's."""
    _prctl(_PR_SET_DUMPABLE, 0)


def keep_capabilities(kept: Iterable[int]) -> None:
    """What a later program of root's can have at most; of a program of somebody else's nothing is inherited."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for capability in {*range(last + 1)} - {*kept}:
        _prctl(_PR_CAPBSET_DROP, capability)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(_CAPABILITIES.size)
    _call("capget", header, sets)
    effective, permitted, _, effective_high, permitted_high, _ = _CAPABILITIES.unpack(sets.raw)
    _call("capset", header, _CAPABILITIES.pack(effective, permitted, 0, effective_high, permitted_high, 0))


class Received(NamedTuple):
    """is_told: somebody sent it with kill(2) or its like; else it is the kernel's own, the terminal's above all."""

    number: int
    is_told: bool


class Signals:
    """Blocked signals, as something to poll. fd: readable when one is there."""

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = bytearray(128)  # sigset_t of the C library
        for number in numbers:
            mask[(number - 1) // 8] |= 1 << (number - 1) % 8
        self.fd = _call("signalfd", -1, bytes(mask), _SFD_CLOEXEC)

    def read(self) -> Received:
        number, _, code = _SIGNALFD_SIGINFO.unpack(os.read(self.fd, _SIGNALFD_SIGINFO.size))
        return Received(number, is_told=code <= 0)
