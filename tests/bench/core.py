"""The pure core at two sizes of everything: what a reply costs must not grow with what is known already.

No kernel and no sockets: a shell that acknowledges every row at once and throws the journal's records away, so that what is
compared is the core's own work. Map writes come on top, about 4 us a row (bench map-write).
"""

from __future__ import annotations

import gc
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agent.core.dns_cache import Pair
from agent.core.engine import SOURCES, Engine
from agent.core.events import (
    AskUpstream,
    EndpointAdded,
    Event,
    FlowsSeen,
    LastSeen,
    PassOverFlows,
    PoliciesChanged,
    Query,
    ReadLastSeen,
    Reply,
    RowsWritten,
    SendReply,
    Settled,
    SourceReported,
    Tick,
    WriteRows,
)
from agent.core.reconciler import BATCH_ROWS_MAX
from agent.core.rules import Expression, Fqdn, LabelSelector, Operator, Origin, Policy, Ports, Rule
from agent.core.settings import Settings, Upstream
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, SCOPE_SHARED, Address, Direction, Prefix, packed
from tests.bench.harness import Bench, Contestant, Figure, Race

RATIO_MAX = 1.5
BYTES_PER_ADDRESS_MAX = 1_200
PAUSE_MS_MAX = 20

_SERVER = packed("203.0.113.1")
_FIRST_CLIENT = int.from_bytes(packed("198.18.0.1"), "big")
_ADDRESSES = 1 << 24  # of 10.0.0.0/8
_SPREAD = 11_400_714_819_323_198_485  # odd, so a permutation of the addresses in which neighbours are far apart
_FRESH_FIRST = 1 << 23  # numbers of names that are not known in advance
_LETTERS = "abcdefgh"


@dataclass(frozen=True, slots=True)
class Sizes:
    few_selectors: int
    many_selectors: int
    few_addresses: int
    many_addresses: int
    many_endpoints: int


FULL = Sizes(10, 10_000, 1_000, 1_000_000, 1_000)


class Core:
    """An engine with a shell around it, and endpoints at 198.18.0.1 and the addresses that follow."""

    def __init__(self, policies: Iterable[Policy], apps: Sequence[str] = ("a",)) -> None:
        self.now = 1_000.0
        self.released = 0
        self.clients = [(_FIRST_CLIENT + place).to_bytes(4, "big") for place in range(len(apps))]
        self.fresh: list[Pair] = []  # learned by the bench, to be forgotten before the next round
        self._transactions: list[int] = []
        self._settled: dict[object, str | None] = {}
        settings = Settings(
            upstreams=(Upstream(packed("203.0.113.53")),), allow_addresses=(Prefix.parse("10.0.0.0/8"),), names_max=1 << 22
        )
        self.engine = Engine(settings, self.now)
        for number, (client, app) in enumerate(zip(self.clients, apps, strict=True), 1):
            self.handle(EndpointAdded(number, f"veth{number}", 100 + number, {"app": app}, (client,)))
        for source in sorted(SOURCES):
            self.handle(SourceReported(source))
        self.apply(policies)

    def apply(self, policies: Iterable[Policy]) -> list[float]:
        """Policies in force, and what was taken back by them gone; gives back how long each pass took, in milliseconds."""
        self._settled.clear()
        pauses = self.pauses(PoliciesChanged(tuple(policies), "bench"))
        self.now += 1.1
        pauses += self.pauses(Tick())
        assert self._settled == {"bench": None}, self._settled
        return pauses

    def handle(self, event: Event) -> None:
        for _ in self._passes(event):
            pass

    def pauses(self, event: Event) -> list[float]:
        """How long nobody else's question could have been heard, each time: milliseconds of CPU time."""
        found: list[float] = []
        passes = self._passes(event)
        while True:
            began = time.process_time_ns()
            if next(passes, self) is self:
                return found
            found.append((time.process_time_ns() - began) / 1e6)

    def _passes(self, event: Event) -> Iterator[None]:
        """As the shell goes about it: between two passes it looks at its sockets."""
        engine, now = self.engine, self.now
        waiting: deque[Event] = deque((event,))
        while waiting:
            engine.handle(waiting.popleft(), now)
            while effects := engine.effects():
                for effect in effects:
                    match effect:
                        case SendReply():
                            self.released += 1
                        case WriteRows():
                            written = RowsWritten(tuple((write, 0) for write in effect.writes))
                            if len(effect.writes) < BATCH_ROWS_MAX:
                                engine.handle(written, now)
                            else:
                                waiting.append(written)
                        case AskUpstream():
                            self._transactions.append(effect.transaction)
                        case ReadLastSeen():
                            engine.handle(LastSeen(effect.scope, effect.address, None), now)
                        case PassOverFlows():
                            engine.handle(FlowsSeen(effect.pass_number, frozenset()), now)
                        case Settled():
                            self._settled[effect.ticket] = effect.error
            deadline = engine.next_deadline()
            if not waiting and deadline is not None and deadline <= now:
                waiting.append(Tick())
            yield

    def ask(self, query: bytes, place: int = 0) -> None:
        self.handle(Query(None, self.clients[place], _SERVER, 53, PROTOCOL_UDP, query))

    def exchange(self, query: bytes, reply: bytes, place: int = 0) -> None:
        """A question and its reply: asked, learned, written, released."""
        self.ask(query, place)
        self.handle(Reply(self._transactions.pop(), reply))

    def answer(self, reply: bytes) -> list[float]:
        return self.pauses(Reply(self._transactions.pop(), reply))

    def know(self, count: int) -> None:
        """So many names with an address each, all of one selector, as if answers had taught them a moment ago."""
        for number in range(count):
            records = [(address(number), 86_400)]
            self.engine.names.learn(name_of(number), records, SCOPE_SHARED, self.now + number / count)
            if number % 256 == 255:
                self.handle(Tick())
        self.handle(Tick())
        assert len(self.engine.dns_cache) == count
        assert len(self.engine.reconciler.ipcache.realized) == count + len(self.clients)

    def forget_fresh(self) -> None:
        for pair in self.fresh:
            self.engine.names.forget(pair)
        self.fresh.clear()
        self.handle(Tick())


def address(number: int) -> Address:
    return (0x0A00_0000 | number * _SPREAD % _ADDRESSES).to_bytes(4, "big")


def name_of(number: int) -> str:
    return f"h{number * _SPREAD % _ADDRESSES:06x}.wide.test."


def messages(name: str, *addresses: Address) -> tuple[bytes, bytes]:
    """A question for the name and its reply, as they are on the wire."""
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name[:-1].split("."))
    question = labels + b"\0\0\1\0\1"
    records = b"".join(struct.pack("!HHHIH4s", 0xC00C, 1, 1, 60, 4, each) for each in addresses)
    query = struct.pack("!6H", 1, 0x0100, 1, 0, 0, 0) + question
    return query, struct.pack("!6H", 1, 0x8180, 1, len(addresses), 0, 0) + question + records


def policy(*patterns: str, port: int = 443, app: str | None = None) -> Policy:
    """One TCP port to these names."""
    ports = (Ports(PROTOCOL_TCP, port, port),)
    rules = tuple(Rule(Direction.EGRESS, (Fqdn(p),), ports, origin=Origin("p", line)) for line, p in enumerate(patterns, 1))
    subject = LabelSelector((Expression("app", Operator.IN, frozenset({app})),) if app else ())
    return Policy(app or "p", subject, rules, default_deny_egress=True, default_deny_ingress=False)


def some_policy(count: int) -> Policy:
    """So many selectors: of every name here, of one exact name, and others like both, which match none of them."""
    others = ("n{}.exact.test.", "*.p{}.wide.test.", "p{}-*.wide.test.", "*.p{}.test.")
    return policy("*.wide.test.", "exact.test.", *(others[n % len(others)].format(n) for n in range(count - 2)))


# --- races -----------------------------------------------------------------------------------------------------------


def new_names(core: Core) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Run and prepare: questions for names never heard of, and their replies."""
    ready: list[tuple[bytes, bytes]] = []
    number = _FRESH_FIRST

    def prepare(count: int) -> None:
        nonlocal number
        core.forget_fresh()
        numbers = range(number, number + count)
        number += count
        core.fresh = [Pair(SCOPE_SHARED, name_of(n), address(n)) for n in numbers]
        ready[:] = [messages(pair.name, pair.address) for pair in core.fresh]

    def run(count: int) -> None:
        before = core.released
        for query, reply in ready:
            core.exchange(query, reply)
        assert core.released == before + count

    return run, prepare


def _exact_name(core: Core) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """A name with a selector of its own, learned and forgotten again each time."""
    pair = Pair(SCOPE_SHARED, "exact.test.", address(_FRESH_FIRST))
    query, reply = messages(pair.name, pair.address)

    def run(count: int) -> None:
        for _ in range(count):
            core.exchange(query, reply)
            core.engine.names.forget(pair)
            core.handle(Tick())

    return run, lambda count: core.forget_fresh()


def ends(core: Core) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Lifetimes that end one after the other, 10 ms apart."""
    number, first = _FRESH_FIRST, core.now

    def prepare(count: int) -> None:
        nonlocal number, first
        core.forget_fresh()
        core.now += 61  # what the cache remembers of forgotten names ends here
        core.handle(Tick())
        first = core.now
        for place in range(count):
            core.engine.names.learn(name_of(number), [(address(number), 60)], SCOPE_SHARED, first + place * 0.01)
            number += 1
        core.handle(Tick())

    def run(count: int) -> None:
        known = len(core.engine.dns_cache)
        for place in range(count):
            core.now = first + 60 + place * 0.01 + 0.002
            core.handle(Tick())
        assert len(core.engine.dns_cache) == known - count

    return run, prepare


def _warm(core: Core, addresses: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """One of so many addresses of a name, answered again and again."""
    name = f"warm{addresses}.wide.test."
    query, reply = messages(name, address(_FRESH_FIRST))

    def prepare(count: int) -> None:
        core.forget_fresh()
        records = [(address(_FRESH_FIRST + n), 60) for n in range(addresses)]
        core.engine.names.learn(name, records, SCOPE_SHARED, core.now)
        core.fresh = [Pair(SCOPE_SHARED, name, each) for each, _ in records]
        core.handle(Tick())

    def run(count: int) -> None:
        for _ in range(count):
            core.exchange(query, reply)

    return run, prepare


def scaling(sizes: Sizes) -> Iterator[Race | Figure]:
    """The races of a new reply and of an end, and how much memory an address takes."""
    few = Core([some_policy(sizes.few_selectors)])
    few.know(sizes.few_addresses)
    many_selectors = Core([some_policy(sizes.many_selectors)])
    many_selectors.know(sizes.few_addresses)
    many_endpoints = Core([some_policy(sizes.few_selectors)], ["a"] * sizes.many_endpoints)
    many_endpoints.know(sizes.few_addresses)
    gc.collect()
    before = _resident()
    many_addresses = Core([some_policy(sizes.few_selectors)])
    many_addresses.know(sizes.many_addresses)
    gc.collect()
    bytes_each = (_resident() - before) / sizes.many_addresses
    gc.freeze()
    selectors, addresses = f"{sizes.few_selectors:,} selectors", f"{sizes.few_addresses:,} addresses"
    for title, work in (
        ("a new name under a pattern", new_names),
        ("a new exact name, and its removal", _exact_name),
        ("a lifetime's end", ends),
    ):
        yield _two(title, work, (selectors, few), (f"{sizes.many_selectors:,} selectors", many_selectors))
        yield _two(title, work, (addresses, few), (f"{sizes.many_addresses:,} addresses", many_addresses))
        yield _two(title, work, ("1 endpoint", few), (f"{sizes.many_endpoints:,} endpoints", many_endpoints))
    warm = [Contestant(f"{count:,} of the name", *_warm(few, count)) for count in (1, 900)]
    yield Race("a known address again", warm[0].name, warm, RATIO_MAX)
    yield Figure(
        f"resident memory of an address, each of a name of its own, at {sizes.many_addresses:,}",
        bytes_each,
        "bytes",
        BYTES_PER_ADDRESS_MAX,
    )


def _two(
    title: str,
    work: Callable[[Core], tuple[Callable[[int], None], Callable[[int], None]]],
    few: tuple[str, Core],
    many: tuple[str, Core],
) -> Race:
    contestants = [Contestant(name, *work(core)) for name, core in (few, many)]
    return Race(title, few[0], contestants, RATIO_MAX)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- pauses ------------------------------------------------------------------------------------------------------------


def combinations(sets: int, rounds: int) -> Iterator[Figure]:
    """Names that several selectors take in a way nobody has seen yet: a new identity, whose rows every set needs."""
    apps = [f"a{n}" for n in range(sets)]
    patterns = [f"*{letter}*.wide.test." for letter in _LETTERS]
    core = Core([policy(*patterns, port=1_000 + n, app=app) for n, app in enumerate(apps)], apps)
    assert len(core.engine.groups.groups) == sets
    longest, waits = [], []
    for turn in range(rounds):
        letters = "".join(letter for place, letter in enumerate(_LETTERS) if (turn * 2 + 3) >> place & 1)
        query, reply = messages(f"{letters}.wide.test.", address(turn))
        core.ask(query)
        identities, released = len(core.engine.identities), core.released
        pauses = core.answer(reply)
        assert len(core.engine.identities) == identities + 1
        assert core.released == released + 1
        longest.append(max(pauses))
        waits.append(sum(pauses))
    title = f"a combination new to {sets:,} sets"
    yield Figure(f"{title}: the longest that another reply waits", median(longest), "ms", PAUSE_MS_MAX)
    yield Figure(f"{title}: the asking reply's wait", median(waits), "ms")


def policy_changes(names: int) -> Iterator[Figure]:
    """A selector more, and one less again, where many names are known."""
    core = Core([policy("*.wide.test.")])
    core.know(names)
    core.engine.names.learn("one.x.wide.test.", [(address(_FRESH_FIRST), 86_400)], SCOPE_SHARED, core.now)
    core.handle(Tick())
    gc.collect()
    gc.freeze()
    for title, pattern in (("one name", "*.x.wide.test."), ("every name", "h*.wide.test.")):
        began = time.process_time()
        pauses = core.apply([policy("*.wide.test.", pattern)]) + core.apply([policy("*.wide.test.")])
        about = f"a selector for {title} of {names:,} comes and goes"
        # The longest of 60,000 is the machine's as often as ours.
        pauses.sort()
        yield Figure(f"{about}: 999 of 1,000 pauses are below", pauses[-1 - len(pauses) // 1_000], "ms", PAUSE_MS_MAX)
        yield Figure(f"{about}: the longest pause", pauses[-1], "ms")
        yield Figure(f"{about}: CPU time", (time.process_time() - began) * 1e3, "ms")


@contextmanager
def _races() -> Iterator[Iterator[Race | Figure]]:
    def everything() -> Iterator[Race | Figure]:
        yield from combinations(1_000, 31)
        yield from scaling(FULL)
        gc.unfreeze()
        gc.collect()
        yield from policy_changes(FULL.many_addresses)

    try:
        yield everything()
    finally:
        gc.unfreeze()


CORE = Bench("core", "does a reply cost the same, whatever is known already", _races, is_long=True)
