"""bpf(2), as far as it is needed and neither BCC 0.26 nor libbpf 1.1 give it to Python.

Rule 1: the attribute is always zero beyond what a command sets; the kernel refuses anything else.
Rule 2: nothing here knows the agent's tables. A function is a command; it raises OSError.
Rule 3: pretend_without() is for the test suites alone: it makes this kernel answer as one that lacks a feature.

Layouts are those of `union bpf_attr` in <linux/bpf.h>; they never change, they only grow.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NUMBERS: Final = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_NUMBER: Final = _NUMBERS.get(platform.machine(), 0)
_ATTRIBUTE_SIZE: Final = 160  # as of Linux 6.6; larger than any command here needs, and zero is always accepted

_MAP_CREATE: Final = 0
MAP_LOOKUP: Final = 1
MAP_UPDATE: Final = 2
MAP_DELETE: Final = 3
_MAP_NEXT_KEY: Final = 4
_PROG_LOAD: Final = 5
_OBJ_PIN: Final = 6
_OBJ_GET: Final = 7
_PROG_TEST_RUN: Final = 10
_PROG_FD_BY_ID: Final = 13
_OBJ_INFO: Final = 15
_PROG_QUERY: Final = 16
_MAP_LOOKUP_BATCH: Final = 24
_LINK_CREATE: Final = 28
_LINK_UPDATE: Final = 29
_LINK_DETACH: Final = 34

PROGRAM_SCHED_CLS: Final = 3
TCX_INGRESS: Final = 46
TCX_EGRESS: Final = 47
_BEFORE: Final = 1 << 3

_LOG_SIZE: Final = 1 << 22

_missing: set[str] = set()  # features that this kernel is said to lack


def pretend_without(features: Iterable[str]) -> None:
    """From now on `tcx`, `batch` or both are answered as by a kernel before them."""
    _missing.clear()
    _missing.update(features)


def _require(feature: str) -> None:
    if feature in _missing:
        raise OSError(errno.EINVAL, f"as on a kernel without {feature}")


def call(command: int, attribute: ctypes.Array[ctypes.c_char]) -> int:
    """One bpf(2); the kernel may write into the attribute. Returns what it returns, or minus the errno."""
    result: int = _LIBC.syscall(_NUMBER, command, attribute, len(attribute))
    return result if result >= 0 else -ctypes.get_errno()


def new_attribute(fields: bytes) -> ctypes.Array[ctypes.c_char]:
    """For call(): these fields, and zero behind them."""
    return ctypes.create_string_buffer(fields, _ATTRIBUTE_SIZE)


def shared(memory: bytearray) -> ctypes.Array[ctypes.c_char]:
    """The same memory, as something with an address; while it is in use the bytearray cannot be resized."""
    return (ctypes.c_char * len(memory)).from_buffer(memory)


def _bpf(command: int, fields: bytes) -> tuple[int, bytes]:
    if not _NUMBER:
        raise OSError(errno.ENOSYS, f"bpf(2) has no known number on {platform.machine()}")
    attribute = ctypes.create_string_buffer(fields, _ATTRIBUTE_SIZE)
    result = call(command, attribute)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result, attribute.raw


def address_of(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, max(len(data), 1))


class MapInfo(NamedTuple):
    type: int
    id: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class ProgramInfo(NamedTuple):
    type: int
    id: int
    digest: str  # of its instructions; equal ones are the same program
    name: str  # the first 15 characters of it
    maps: frozenset[int]  # ids of those it refers to


class LinkInfo(NamedTuple):
    id: int
    program_id: int
    ifindex: int  # of a TCX link; 0 when its interface is gone
    attach_type: int


class ProgramRun(NamedTuple):
    action: int
    frame: bytes
    nanoseconds: int
    context: bytes


def map_create(kind: int, key_size: int, value_size: int, max_entries: int, flags: int, name: str) -> int:
    fields = struct.pack("=IIIIIII16s", kind, key_size, value_size, max_entries, flags, 0, 0, name.encode()[:15])
    return _bpf(_MAP_CREATE, fields)[0]


def map_lookup(fd: int, key: bytes, value_size: int) -> bytes | None:
    """value_size: for a per-CPU map, of all processors together, each rounded up to 8."""
    key_buffer, value = _buffer(key), ctypes.create_string_buffer(value_size)
    try:
        _bpf(MAP_LOOKUP, struct.pack("=I4xQQQ", fd, address_of(key_buffer), address_of(value), 0))
    except FileNotFoundError:
        return None
    return value.raw


def map_update(fd: int, key: bytes, value: bytes, flags: int = 0) -> None:
    key_buffer, value_buffer = _buffer(key), _buffer(value)
    _bpf(MAP_UPDATE, struct.pack("=I4xQQQ", fd, address_of(key_buffer), address_of(value_buffer), flags))


def map_delete(fd: int, key: bytes) -> None:
    key_buffer = _buffer(key)
    _bpf(MAP_DELETE, struct.pack("=I4xQQQ", fd, address_of(key_buffer), 0, 0))


def map_next_key(fd: int, key: bytes | None, key_size: int) -> bytes | None:
    """The key after this one; None: the first one. None at the end."""
    before, after = _buffer(key or b""), ctypes.create_string_buffer(key_size)
    try:
        _bpf(_MAP_NEXT_KEY, struct.pack("=I4xQQQ", fd, address_of(before) if key is not None else 0, address_of(after), 0))
    except FileNotFoundError:
        return None
    return after.raw


class Batch(NamedTuple):
    keys: bytes
    values: bytes
    length: int  # in rows
    position: bytes | None  # where the next batch begins; None: this was the last one


def map_lookup_batch(fd: int, position: bytes | None, position_size: int, key_size: int, value_size: int, limit: int) -> Batch:
    """Up to `limit` rows. position_size: a key's for a trie, 4 for a hash, and at least either.

    Raises OSError: ENOSPC when a hash bucket holds more than `limit`; EINVAL or EOPNOTSUPP where the kernel has no batch for
    this kind of map.
    """
    _require("batch")
    before = _buffer((position or b"").ljust(position_size, b"\0"))
    after = ctypes.create_string_buffer(position_size)
    keys, values = ctypes.create_string_buffer(limit * key_size), ctypes.create_string_buffer(limit * value_size)
    fields = struct.pack(
        "=QQQQIIQQ",
        address_of(before) if position is not None else 0,
        address_of(after),
        address_of(keys),
        address_of(values),
        limit,
        fd,
        0,
        0,
    )
    attribute = ctypes.create_string_buffer(fields, _ATTRIBUTE_SIZE)
    result = call(_MAP_LOOKUP_BATCH, attribute)
    if result < 0 and result != -errno.ENOENT:
        raise OSError(-result, os.strerror(-result))
    (count,) = struct.unpack_from("=I", attribute.raw, 32)
    return Batch(keys.raw[: count * key_size], values.raw[: count * value_size], count, after.raw if result == 0 else None)


def pin(fd: int, path: str) -> None:
    name = _buffer(path.encode() + b"\0")
    _bpf(_OBJ_PIN, struct.pack("=QII", address_of(name), fd, 0))


def get_pinned(path: str) -> int:
    name = _buffer(path.encode() + b"\0")
    return _bpf(_OBJ_GET, struct.pack("=QII", address_of(name), 0, 0))[0]


def program_load(instructions: bytes, name: str) -> int:
    """Loads a tc classifier. On refusal the OSError's text ends with what the verifier said last."""
    code, licence = _buffer(instructions), _buffer(b"Dual BSD/GPL\0")

    def load(log: ctypes.Array[ctypes.c_char] | None) -> int:
        fields = struct.pack(
            "=IIQQIIQII16s",
            PROGRAM_SCHED_CLS,
            len(instructions) // 8,
            address_of(code),
            address_of(licence),
            1 if log else 0,
            len(log) if log else 0,
            address_of(log) if log else 0,
            0,
            0,
            name.encode()[:15],
        )
        return _bpf(_PROG_LOAD, fields)[0]

    try:
        return load(None)
    except OSError as refusal:
        first = refusal
    log = ctypes.create_string_buffer(_LOG_SIZE)
    try:
        return load(log)
    except OSError:
        said = log.value.decode(errors="replace").strip().splitlines()
        raise OSError(first.errno, "; ".join(said[-3:]) or os.strerror(first.errno or 0)) from None


_SK_BUFF_SIZE_MAX: Final = 512  # 192 until now


def program_run(fd: int, frame: bytes, context: bytes = b"", repeat: int = 1) -> ProgramRun:
    """BPF_PROG_TEST_RUN.

    context: a `struct __sk_buff`, of which the kernel takes ifindex, ingress_ifindex, mark and a few more, and gives them back
    as they are after the run.
    """
    size = len(frame) + 256
    data_in, data_out = _buffer(frame), ctypes.create_string_buffer(size)
    # Where it does not hold all of it, the run fails after it was done.
    context_in, context_out = _buffer(context), ctypes.create_string_buffer(max(len(context), _SK_BUFF_SIZE_MAX))
    fields = struct.pack(
        "=IIIIQQIIIIQQIII",
        fd,
        0,
        len(frame),
        size,
        address_of(data_in),
        address_of(data_out),
        repeat,
        0,
        len(context),
        len(context_out) if context else 0,
        address_of(context_in) if context else 0,
        address_of(context_out) if context else 0,
        0,
        0,
        0,
    )
    _, out = _bpf(_PROG_TEST_RUN, fields)
    action, _, length = struct.unpack_from("=iII", out, 4)
    (nanoseconds,) = struct.unpack_from("=I", out, 36)
    return ProgramRun(action, data_out.raw[: min(length, size)], nanoseconds, context_out.raw[: len(context)])


def _info(fd: int, size: int) -> bytes:
    info = ctypes.create_string_buffer(size)
    _bpf(_OBJ_INFO, struct.pack("=IIQ", fd, size, address_of(info)))
    return info.raw


def map_info(fd: int) -> MapInfo:
    return MapInfo(*struct.unpack_from("=IIIIII", _info(fd, 80)))


def program_info(fd: int) -> ProgramInfo:
    maps = ctypes.create_string_buffer(_MAPS_MAX * 4)
    info = ctypes.create_string_buffer(struct.pack("=52xIQ", _MAPS_MAX, address_of(maps)), 128)
    _bpf(_OBJ_INFO, struct.pack("=IIQ", fd, len(info), address_of(info)))
    kind, number, digest = struct.unpack_from("=II8s", info)
    (count,) = struct.unpack_from("=I", info, 52)
    (name,) = struct.unpack_from("=16s", info, 64)
    used = struct.unpack_from(f"={min(count, _MAPS_MAX)}I", maps)
    return ProgramInfo(kind, number, digest.hex(), name.rstrip(b"\0").decode(errors="replace"), frozenset(used))


_MAPS_MAX: Final = 64  # BPF's MAX_USED_MAPS


def program_of(number: int) -> int:
    """A descriptor of the program with this id. Raises OSError: ENOENT when it is gone."""
    return _bpf(_PROG_FD_BY_ID, struct.pack("=III", number, 0, 0))[0]


def link_info(fd: int) -> LinkInfo:
    _kind, number, program, ifindex, attach_type = struct.unpack_from("=III4xII", _info(fd, 64))
    return LinkInfo(number, program, ifindex, attach_type)


def tcx_attach(program: int, ifindex: int, attach_type: int) -> int:
    """A link that makes the program the first of the hook. The interface is looked up in the caller's network namespace.

    Raises OSError: EINVAL where the kernel has no TCX (before 6.6).
    """
    _require("tcx")
    return _bpf(_LINK_CREATE, struct.pack("=IIIIIIQ", program, ifindex, attach_type, _BEFORE, 0, 0, 0))[0]


def link_update(link: int, program: int) -> None:
    """The next packet is judged by this program. Raises OSError: ENOLINK when the interface is gone."""
    _bpf(_LINK_UPDATE, struct.pack("=IIII", link, program, 0, 0))


def link_detach(link: int) -> None:
    """At once; the release of a last reference is put off to a worker, and packets are judged till then."""
    _bpf(_LINK_DETACH, struct.pack("=I", link))


_PROGRAMS_MAX: Final = 64  # BPF_MPROG_MAX


def tcx_programs(ifindex: int, attach_type: int) -> tuple[int, ...]:
    """Program ids of the hook, in the order in which they run. Raises OSError: EINVAL where the kernel has no TCX."""
    _require("tcx")
    ids = ctypes.create_string_buffer(_PROGRAMS_MAX * 4)
    fields = struct.pack("=IIIIQIIQQQQ", ifindex, attach_type, 0, 0, address_of(ids), _PROGRAMS_MAX, 0, 0, 0, 0, 0)
    _, out = _bpf(_PROG_QUERY, fields)
    (count,) = struct.unpack_from("=I", out, 24)
    return struct.unpack_from(f"={count}I", ids.raw)
