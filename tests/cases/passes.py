"""A world where flows are seen by passes, as the cases have it.

In the cases a collector passes over the flows now and then: it marks the addresses that are in use, and that an address is not
in use is known only after two passes that began after its lifetime's end (a flow that opened behind the first pass is marked by
the second). Here the datapath writes down when each address was last seen, and the engine asks for that when a lifetime ends
(decision 15). So the engine's question stays open until two passes have told what it asks for, and the mark is the answer. The
minute for which a packet keeps an address is shortened to half a second (a setting), the cases' steps being whole seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from agent.core.events import Event, LastSeen, Tick
from agent.core.settings import Settings
from agent.core.types import Address
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World

KEEP_S = 0.5
FOR_EVER = 1e9


def settings_of(*, ttl_floor_s: float = 0.0, addresses_max: int = 0) -> Settings:
    """addresses_max: of one name; 0 is no bound."""
    return Settings(
        upstreams=(UPSTREAM,),
        allow_addresses=EVERY_ADDRESS,
        ttl_floor_s=ttl_floor_s,
        ttl_cap_s=FOR_EVER,
        keep_while_flow_seen_s=KEEP_S,
        keep_past_lifetime_s=FOR_EVER,
        addresses_per_name_max=addresses_max or 1_000_000,
    )


@dataclass(slots=True)
class WorldOfPasses(World):
    """Times of its methods are the cases' seconds; `origin` is where they begin."""

    origin: float = 1_000_000.0
    passes_over: int = 0
    marks: dict[Address, float] = field(default_factory=dict)
    passes_before: dict[Address, int] = field(default_factory=dict)  # address past its lifetime -> passes by then
    open_looks: list[LastSeen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.origin
        World.__post_init__(self)

    def _looked(self, event: Event) -> None:
        if isinstance(event, LastSeen):
            self.open_looks.append(event)
            self.passes_before.setdefault(event.address, self.passes_over)
        else:
            self.engine.handle(event, self.now)

    def at(self, t: float) -> float:
        return self.origin + t

    def go_to(self, t: float) -> None:
        """Time never goes back, whatever the steps say."""
        self.advance(max(0.0, self.at(t) - self.now))

    def mark(self, address: Address, t: float) -> None:
        """A pass saw a packet of this address."""
        self.marks[address] = max(t, self.marks.get(address, t))

    def pass_over(self, t: float, live: Iterable[Address] = ()) -> None:
        """A pass that began at t has finished, and saw these addresses in use."""
        for address in live:
            self.mark(address, t)
        self.go_to(t)
        self.passes_over += 1
        looks, self.open_looks = self.open_looks, []
        for scope, address in dict.fromkeys((look.scope, look.address) for look in looks):
            if self.passes_over - self.passes_before[address] < 2:
                self.open_looks.append(LastSeen(scope, address, None))
                continue
            seen = self.marks.get(address)
            self.handle(LastSeen(scope, address, None if seen is None else self.at(seen)))
            if not self.engine.dns_cache.pairs_by_address.of(address):
                del self.passes_before[address]
        self.handle(Tick())

    def start_again(self) -> None:
        """The process ends and another one reads its journal and the kernel's tables."""
        self.journal = list(self.engine.records())
        self.open_looks.clear()
        self.passes_before.clear()
        self.restart()
