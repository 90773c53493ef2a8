"""Writing rows to the kernel: KernelTables beside the bare system call, on the real maps of a real load.

The floor is bpf(2) called through ctypes with buffers that exist already and keys that are finished: the difference is what
turning a row of the core into bytes costs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from agent.core.types import IpcacheKey, Prefix, Table, Write
from agent.datapath import loader, syscall
from agent.datapath.maps import KernelTables
from tests.bench.harness import Bench, Contestant, Race

# As many addresses as a busy endpoint knows; a power of two, so that turning round is a mask.
_ROWS = 1024
_SCOPE = 1
_IDENTITY = 1 << 24
_PREFIX_LENGTH = 64  # 32 bits of scope, 32 of address
_FIRST_ADDRESS = 0xC612_0000  # 198.18.0.0


def _writes(value: int | None) -> list[Write]:
    addresses = ((_FIRST_ADDRESS + i).to_bytes(4, "big") for i in range(_ROWS))
    return [Write(Table.IPCACHE, IpcacheKey(_SCOPE, Prefix.of(address)), value) for address in addresses]


def _with_tables(tables: KernelTables, value: int | None) -> Callable[[int], None]:
    calls = [[write] for write in _writes(value)]

    def run(count: int) -> None:
        for i in range(count):
            tables.apply(calls[i & _ROWS - 1])

    return run


def _with_tables_together(tables: KernelTables, size: int) -> Callable[[int], None]:
    writes = _writes(_IDENTITY)
    calls = [writes[i : i + size] for i in range(0, _ROWS, size)]

    def run(count: int) -> None:
        for i in range(-(-count // size)):
            tables.apply(calls[i % len(calls)])

    return run


class _Bare:
    """The system call again and again; holds the memory whose addresses the kernel is given."""

    def __init__(self, fd: int, command: int) -> None:
        self._command = command
        self._key, self._value = bytearray(12), bytearray(struct.pack("=I", _IDENTITY))
        self._buffers = [syscall.shared(memory) for memory in (self._key, self._value)]
        key_at, value_at = map(syscall.address_of, self._buffers)
        fields = struct.pack("=I4xQQ", fd, key_at, value_at if command == syscall.MAP_UPDATE else 0)
        self._attribute = syscall.new_attribute(fields)
        addresses = ((_FIRST_ADDRESS + i).to_bytes(4, "big") for i in range(_ROWS))
        self._keys = [struct.pack("=II", _PREFIX_LENGTH, _SCOPE) + address for address in addresses]

    def run(self, count: int) -> None:
        key, keys, command, attribute = self._key, self._keys, self._command, self._attribute
        for i in range(count):
            key[:] = keys[i & _ROWS - 1]
            syscall.call(command, attribute)


@contextmanager
def _races() -> Iterator[Sequence[Race]]:
    with closing(loader.load(loader.bytecode({}))) as loaded:
        tables = KernelTables(loaded.fds_by_map)
        fd = loaded.fds_by_map["ipcache4"]
        update, delete = _Bare(fd, syscall.MAP_UPDATE).run, _Bare(fd, syscall.MAP_DELETE).run
        # Both sides write the same rows: what one put, the other takes away.
        update(_ROWS)
        assert tables.fill(Table.IPCACHE).used == _ROWS
        assert set(tables.apply(_writes(None))) == {0}
        assert tables.fill(Table.IPCACHE).used == 0
        assert set(tables.apply(_writes(_IDENTITY))) == {0}
        delete(_ROWS)
        assert tables.fill(Table.IPCACHE).used == 0
        yield [
            Race(
                f"put one ipcache row ({_ROWS} of them in turn)",
                "bpf(2)",
                [
                    Contestant("namegate", _with_tables(tables, _IDENTITY)),
                    Contestant("namegate, 16 at once", _with_tables_together(tables, 16)),
                    Contestant("bpf(2)", update),
                ],
            ),
            Race(
                "delete one ipcache row that is not there",
                "bpf(2)",
                [Contestant("namegate", _with_tables(tables, None)), Contestant("bpf(2)", delete)],
            ),
        ]


MAP_WRITE = Bench("map-write", "what writing a row to the kernel costs, beside the bare system call", _races, needs_root=True)
