"""Which bits of the packet mark are the agent's on this host.

The mark is one number for everybody on a host: routing rules, firewalls, tunnels and container networks divide its bits among
themselves by nothing but custom. So the agent looks who uses which, and takes the first candidate whose bits nobody has. A
start that finds the device of the process before takes what that one chose, whoever came since: the programs in force, the
sockets that are kept and the compiled bytecode all have it in them.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from typing import Final, NamedTuple

from agent.config import DatapathSettings
from agent.datapath import device
from agent.datapath.errors import DatapathError
from agent.host.firewall import Firewall, Unreadable

_ALL_BITS: Final = 0xFFFF_FFFF


class Mark(NamedTuple):
    value: int
    mask: int

    def __str__(self) -> str:
        return f"{self.value:#x}/{self.mask:#x}"


# In this order. Known to be in use by others: 0xf00 (Cilium), 0x4000 and 0x8000 (kube-proxy), 0xff0000 (Tailscale), 0xffff0000
# (Calico), 0xca6c (WireGuard's wg-quick), small numbers (by hand).
CANDIDATES: Final = (
    Mark(0xA00, 0xF00),
    Mark(0x2000, 0x3000),
    Mark(0xA000_0000, 0xF000_0000),
    Mark(0xA00_0000, 0xF00_0000),
    Mark(0xA0_0000, 0xF0_0000),
    Mark(0xA0, 0xF0),
)


def settled(settings: DatapathSettings) -> DatapathSettings:
    """With a mark, where it says `auto`; raises DatapathError: none is free, or the one it says is in use by a routing rule."""
    if settings.mark:
        stated = Mark(settings.mark, settings.mark_mask)
        if users := _users_of(stated.mask, users_in_rules()):
            raise DatapathError(
                errno.EBUSY, f"datapath.mark {stated} has bits of {', '.join(users)}: choose others, or leave it to `auto`"
            )
        return settings
    chosen = chosen_before(settings) or _first_free(users_everywhere())
    return dataclasses.replace(settings, mark=chosen.value, mark_mask=chosen.mask)


def chosen_before(settings: DatapathSettings) -> Mark | None:
    """The choice of the process before, or of the one that runs; None where there is no device of ours."""
    found = re.search(r"mark (0x[0-9a-f]+)/(0x[0-9a-f]+)$", device.noted(device.Device(settings.device)))
    return Mark(int(found[1], 16), int(found[2], 16)) if found else None


def _first_free(users: dict[str, int]) -> Mark:
    for mark in CANDIDATES:
        if not _users_of(mark.mask, users):
            return mark
    raise DatapathError(
        errno.EBUSY,
        f"no bits of the packet mark are free on this host ({', '.join(users)}): say `datapath.mark` and `datapath.mark-mask` "
        "with at least two bits that no packet of an endpoint has",
    )


def _users_of(mask: int, users: dict[str, int]) -> list[str]:
    return [user for user, bits in users.items() if bits & mask]


def users_in_rules() -> dict[str, int]:
    """Routing rules to the bits they look at. One that compares the whole mark uses those that its mark has."""
    found = {}
    for rule in device.rules():
        if rule.mask:
            found[f"the rule `{rule}`"] = rule.mark if rule.mask == _ALL_BITS else rule.mask
    return found


def users_everywhere() -> dict[str, int]:
    """Of the firewall too, as far as it can be read."""
    try:
        return users_in_rules() | Firewall.read().marks()
    except Unreadable:
        return users_in_rules()
