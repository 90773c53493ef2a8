"""Faults for the test suites, made where a real kernel would make them: between the engine and the maps."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import NamedTuple

from agent.core.types import IpcacheKey, Table, Write


class _Fault(NamedTuple):
    """row: as `Prefix` or a key prints, None for every row of the table."""

    table: Table
    row: str | None
    errno: int
    times: int


class Injection:
    """What is to fail, and how much later than asked for writes are made."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._faults: list[_Fault] = []

    def take(self, arguments: Mapping[str, object]) -> None:
        """fail: {table, errno, times, key}; delay: seconds before each write; clear: no fault any more."""
        if arguments.get("clear"):
            self._faults.clear()
        fail = arguments.get("fail")
        if isinstance(fail, Mapping):
            row = fail.get("key")
            code = getattr(errno, str(fail["errno"]))
            times = int(str(fail.get("times", 1)))
            self._faults.append(_Fault(Table(str(fail["table"])), None if row is None else str(row), code, times))
        if "delay" in arguments:
            self.delay_s = float(str(arguments["delay"]))

    def error_for(self, write: Write) -> int:
        for place, fault in enumerate(self._faults):
            if fault.table is write.table and fault.row in (None, row_of(write)):
                if fault.times > 1:
                    self._faults[place] = fault._replace(times=fault.times - 1)
                else:
                    del self._faults[place]
                return fault.errno
        return 0


def row_of(write: Write) -> str:
    return str(write.key.prefix) if isinstance(write.key, IpcacheKey) else repr(write.key)
