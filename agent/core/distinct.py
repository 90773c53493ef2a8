"""How many different names each endpoint asks under each pattern (DECISIONS 23).

Who may ask every name below a pattern can write to its name server in the labels. Nothing of that is refused by default: it
shows, as a number of names. `dns.names-per-minute` refuses what is new in a minute when it has had so many.

Rule 1: a name that was counted in this minute costs one look into a set; one that the policy writes out carries nothing, and is
not counted.
Rule 2: what is held is bounded, whatever is asked: of a minute's names the hashes, up to so many (one that comes again after
that counts again); of all names since the endpoint came 256 octets, and so their number is an estimate (HyperLogLog, Flajolet
et al. 2007: off by 6.5 %).

Python's hash of a text has a key of the process: nobody can choose names that count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

MINUTE_S: Final = 60.0
NAMES_OF_A_MINUTE_MAX: Final = 8_192  # of an endpoint: a megabyte, for the few that ask so much
PATTERNS_MAX: Final = 256  # of an endpoint; policies that changed leave theirs, and the oldest go

_REGISTERS: Final = 256
_BITS: Final = 64 - 8
_HASH: Final = (1 << 64) - 1
_BIAS: Final = 0.7213 / (1 + 1.079 / _REGISTERS)


class Asked(NamedTuple):
    """Different names under one pattern. names: since the endpoint came, about. refused: questions."""

    endpoint: int
    pattern: str
    names: int
    in_this_minute: int
    most_in_a_minute: int
    refused: int


class DistinctNames:
    """names_per_minute: of one endpoint under one pattern; 0: any number."""

    def __init__(self, names_per_minute: int) -> None:
        self.names_per_minute = names_per_minute
        self._by_endpoint: dict[int, _Endpoint] = {}

    def may_ask(self, endpoint: int, pattern: str, name: str, now: float) -> bool:
        """A question that the policy allows by this pattern."""
        asking = self._by_endpoint.get(endpoint)
        if asking is None:
            asking = self._by_endpoint[endpoint] = _Endpoint()
        if now >= asking.minute_ends:
            asking.begin_minute(now)
        hashed = hash(name)
        if hashed in asking.names:
            return True
        if not asking.count(pattern, hashed, self.names_per_minute):
            return False
        if len(asking.names) < NAMES_OF_A_MINUTE_MAX:
            asking.names.add(hashed)
        return True

    def forget(self, endpoint: int) -> None:
        """The endpoint is gone."""
        self._by_endpoint.pop(endpoint, None)

    def asked(self, now: float) -> Iterator[Asked]:
        """What there is to show."""
        for endpoint, asking in self._by_endpoint.items():
            is_over = now >= asking.minute_ends
            for pattern, count in asking.patterns.items():
                most = max(count.most, count.in_minute)
                in_minute = 0 if is_over else count.in_minute
                yield Asked(endpoint, pattern, max(count.names, most), in_minute, most, count.refused)


class _Endpoint:
    __slots__ = ("minute_ends", "names", "patterns")

    def __init__(self) -> None:
        self.minute_ends = 0.0
        self.names: set[int] = set()  # hashes, of this minute
        self.patterns: dict[str, _Pattern] = {}

    def begin_minute(self, now: float) -> None:
        self.minute_ends = now + MINUTE_S
        self.names.clear()
        for pattern in self.patterns.values():
            pattern.most = max(pattern.most, pattern.in_minute)
            pattern.in_minute = 0

    def count(self, text: str, hashed: int, most: int) -> bool:
        pattern = self.patterns.get(text)
        if pattern is None:
            if len(self.patterns) >= PATTERNS_MAX:
                del self.patterns[next(iter(self.patterns))]
            pattern = self.patterns[text] = _Pattern()
        if most and pattern.in_minute >= most:
            pattern.refused += 1
            return False
        pattern.in_minute += 1
        pattern.add(hashed)
        return True


class _Pattern:
    __slots__ = ("_registers", "in_minute", "most", "refused")

    def __init__(self) -> None:
        self.in_minute = self.most = self.refused = 0
        self._registers = bytearray(_REGISTERS)

    def add(self, hashed: int) -> None:
        hashed &= _HASH
        place, rank = hashed % _REGISTERS, _BITS + 1 - (hashed // _REGISTERS).bit_length()
        self._registers[place] = max(self._registers[place], rank)

    @property
    def names(self) -> int:
        """An estimate."""
        untouched = self._registers.count(0)
        raw = _BIAS * _REGISTERS**2 / sum(2.0**-register for register in bytes(self._registers))
        is_small = raw <= 2.5 * _REGISTERS and untouched
        return round(_REGISTERS * math.log(_REGISTERS / untouched) if is_small else raw)
