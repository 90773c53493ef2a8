"""The tables' names in the bpf file system, by which they outlive the process.

    DIRECTORY/maps/LAYOUT/NAME        the tables that count; LAYOUT is a digest of their declarations
    DIRECTORY/maps-new/LAYOUT/NAME    those of a start that has no program on a hook yet

Rule 1: `maps` is whole at every moment. It is replaced by one rename, and nothing in it is ever replaced.
Rule 2: tables are taken over together or not at all: a row means something only beside the rows of the other tables.
Rule 3: the kernel gives whatever is pinned under a name to whoever asks, and loads a program against it. So every shape is
compared first; rows of equal size and another meaning are told apart by LAYOUT.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.datapath import abi, syscall
from agent.datapath.errors import DatapathError, refused
from agent.datapath.loader import Bytecode, MapShape

_MAPS: Final = "maps"
_MAPS_NEW: Final = "maps-new"

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 1 << 1
_NO_EXCHANGE: Final = {errno.EINVAL, errno.ENOSYS}


def lock(directory: Path) -> int:
    """Makes the directory and holds it for this process, whose end lets it go; the descriptor is the caller's to close.

    Two agents with one pin directory would take each other's programs off the hooks, each by its own right.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise refused(f"use {directory} for pins", problem) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(fd)
        raise DatapathError(
            problem.errno or errno.EBUSY,
            f"another agent enforces by the pins in {directory}: stop it first, or give this one a `control.socket`, a "
            "`datapath.pin-directory` and, in the same network namespace, a `datapath.device` of its own",
        ) from None
    return fd


class UnfitError(Exception):
    """The pinned tables cannot be taken over. Its text says why, as a clause for the log."""


def take(directory: Path, code: Bytecode) -> dict[str, int]:
    """Opens the tables that count; the descriptors are the caller's to close. Raises UnfitError, and then opens nothing."""
    maps = directory / _MAPS
    place = maps / code.layout
    if not maps.is_dir():
        raise UnfitError("no maps are pinned")
    if not place.is_dir():
        raise UnfitError("the pinned maps have another layout")
    for path in (directory, maps, place):
        status = path.stat()
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
            raise UnfitError(f"others than root may write to {path}")
    with contextlib.ExitStack() as opened:
        fds = {}
        for name in abi.KEPT_MAPS:
            try:
                fds[name] = syscall.get_pinned(str(place / name))
            except OSError as problem:
                raise UnfitError(f"the map {name} is not among the pinned ones ({problem.strerror})") from None
            opened.callback(os.close, fds[name])
            _compare(name, fds[name], code.shapes_by_map[name])
        opened.pop_all()
    return fds


def _compare(name: str, fd: int, wanted: MapShape) -> None:
    info = syscall.map_info(fd)
    found = MapShape(info.type, info.key_size, info.value_size, info.max_entries, info.flags)
    if found._replace(max_entries=wanted.max_entries) != wanted:
        raise UnfitError(f"the pinned map {name} has another shape")
    if found != wanted:
        raise UnfitError(f"the pinned map {name} is made for {found.max_entries} rows, not for {wanted.max_entries}")


def pin_new(directory: Path, layout: str, fds: Mapping[str, int]) -> None:
    """Pins the tables where they do not count yet; raises DatapathError, and then leaves nothing."""
    remove_new(directory)
    place = directory / _MAPS_NEW / layout
    try:
        place.parent.mkdir(mode=0o700)
        place.mkdir(mode=0o700)
        for name in abi.KEPT_MAPS:
            syscall.pin(fds[name], str(place / name))
    except OSError as problem:
        remove_new(directory)
        raise refused(f"pin the maps in {place}", problem) from None


def publish_new(directory: Path) -> None:
    """The new tables are those that count; the old ones are let go. Raises DatapathError."""
    new, maps = directory / _MAPS_NEW, directory / _MAPS
    try:
        if maps.is_dir():
            _replace(new, maps)
        else:
            new.rename(maps)
    except OSError as problem:
        raise refused(f"rename {new} to {maps}", problem) from None


def _replace(new: Path, maps: Path) -> None:
    """At once where bpffs can exchange names (Linux 5.16). Below, whoever dies between two unlinks leaves less than all, and
    the next start makes new tables."""
    if not _LIBC.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(maps), _RENAME_EXCHANGE):
        remove(new)
        return
    problem = ctypes.get_errno()
    if problem not in _NO_EXCHANGE:
        raise OSError(problem, os.strerror(problem))
    remove(maps)
    new.rename(maps)


def remove_new(directory: Path) -> None:
    """What a start that took over no hook has left there is of no use to anybody. The directory itself is the lock."""
    remove(directory / _MAPS_NEW)


def remove_all(directory: Path) -> None:
    """Every pin of a table or a program, whoever put it there; and the directory, when nothing of others is in it."""
    for name in (_MAPS, _MAPS_NEW, "links", "filters"):
        remove(directory / name)
    remove_if_empty(directory)


def remove(path: Path) -> None:
    """Of the bpf file system, with all that is below."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for child in path.iterdir():
        remove(child)
    path.rmdir()


def remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
