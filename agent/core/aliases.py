"""Targets of allowed chains, for `cname: follow` (DECISIONS 12): who was led to a name may ask for it, as for the one that led
there. Without it a target asked directly is judged on its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class _Led(NamedTuple):
    origin: str
    until: float


class Aliases:
    """Bounded: over `targets_max` the one not heard of for longest goes."""

    def __init__(self, targets_max: int) -> None:
        self._targets_max = targets_max
        self._led: OrderedDict[str, _Led] = OrderedDict()

    def note(self, origin: str, targets: Iterable[str], until: float) -> None:
        """An answer led from the origin to these names; what is known lives until the later end."""
        for target in targets:
            before = self._led.pop(target, None)
            keep = before is not None and before.origin == origin
            self._led[target] = _Led(origin, max(until, before.until) if keep and before is not None else until)
        while len(self._led) > self._targets_max:
            self._led.popitem(last=False)

    def origin_of(self, target: str, now: float) -> str | None:
        """The name that led there, while the chain lives."""
        led = self._led.get(target)
        if led is None:
            return None
        if led.until < now:
            del self._led[target]
            return None
        return led.origin
