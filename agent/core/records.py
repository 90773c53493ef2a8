"""What has to be known again after a restart, beside what the kernel's own tables say.

The kernel holds numbers; only we know what they stand for. A record is saved before the rows it explains are written, so that
whatever is found in the kernel can be explained (I7).
"""

from __future__ import annotations

from typing import NamedTuple

from agent.core.types import Address, Label


class PairRecord(NamedTuple):
    """(name, address) is known in this scope; the two ends are those of `dns_cache.Lifetime`. The last one counts."""

    scope: int
    name: str
    address: Address
    lives_until: float
    kept_until: float


class PairGone(NamedTuple):
    scope: int
    name: str
    address: Address


class IdentityRecord(NamedTuple):
    """The number stands for this label set, for ever."""

    identity: int
    labels: tuple[Label, ...]


class IdentityGone(NamedTuple):
    """Released: nothing in the kernel names it any more."""

    identity: int


class EndpointRecord(NamedTuple):
    """The interface has this number, as long as it has this index."""

    endpoint: int
    interface: str
    ifindex: int


class NumbersRecord(NamedTuple):
    """The next number of each kind: one that was given is never given again while the pinned maps live."""

    identity: int
    set: int
    group: int
    cookie: int


Record = NumbersRecord | PairRecord | PairGone | IdentityRecord | IdentityGone | EndpointRecord
