"""Memory against itself: is each table what follows from the one before it?

    names -> bags -> label sets -> identities -> desired rows

All of it is kept up to date change by change; here it is worked out anew, one name, row or set after the other. A mistake found
is one of ours: nothing but a start mends it. What is being changed this moment may be told although it is none, so what counts
is what is told twice (`Verify`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from agent.control.listings import scope_text
from agent.core.barrier import row_text
from agent.core.engine import Engine
from agent.core.policy import resolve
from agent.core.rules import Peer
from agent.core.types import (
    IDENTITY_ANY,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    OwnAddressKey,
    PolicyKey,
    Prefix,
    Table,
    Value,
    text_of,
)

_SO = "memory contradicts itself: start the agent again, and report it"


class Contradiction(NamedTuple):
    table: str
    row: str
    should_be: str
    is_now: str
    so: str = _SO


Step = Contradiction | None


def contradictions(engine: Engine) -> Iterator[Step]:
    """Step by step; None for a step at which nothing was found. Things may come and go between two steps."""
    yield from _names(engine)
    yield from _bags(engine)
    yield from _ipcache(engine)
    yield from _policy(engine)
    yield from _endpoints(engine)


def _names(engine: Engine) -> Iterator[Step]:
    """Each address of a name is in the bag of every selector that takes the name, and has their labels."""
    names, metadata = engine.names, engine.ipcache.metadata
    for pair in list(engine.dns_cache.lifetimes):
        yield None
        if pair not in engine.dns_cache.lifetimes:
            continue
        holding = [one for one in names.selectors_of(pair.name) if names.guard.forbids(pair.address, one.peer.allowed) is None]
        key = IpcacheKey(pair.scope, Prefix.of(pair.address))
        where = f"{pair.name} {key.prefix}, scope {scope_text(pair.scope)}"
        for selector in holding:
            bag = selector.bags.get(pair.scope)
            if bag is None or pair.name not in bag.of(pair.address):
                yield Contradiction("bags", where, f"in the bag of {selector.label}", "not in it")
        labels = frozenset(selector.label for selector in holding)
        attached = metadata.attached(key, pair.name) or frozenset()
        if attached != labels:
            yield Contradiction("labels", where, _words(labels), _words(attached))
        if labels and key not in engine.reconciler.ipcache.desired:
            yield Contradiction("ipcache", where, "a row that is wanted", "none is")


def _bags(engine: Engine) -> Iterator[Step]:
    """What a bag holds was brought by a name that is known."""
    for selector in list(engine.names.selectors.values()):
        for scope, bag in list(selector.bags.items()):
            for address in list(bag):
                yield None
                for name in bag.of(address):
                    if (scope, name, address) not in engine.dns_cache.lifetimes:
                        yield Contradiction("bags", f"{selector.label}, {text_of(address)}", f"brought by {name}", "not by it")


def _ipcache(engine: Engine) -> Iterator[Step]:
    """The identity of a wanted row stands for the label set of its prefix."""
    rows = engine.reconciler.ipcache.desired
    for key in list(rows):
        yield None
        row = rows.get(key)
        if row is None:
            continue
        assert isinstance(key, IpcacheKey)
        assert isinstance(row.value, int)
        labels = engine.ipcache.metadata.label_set(key)
        named = engine.identities.labels_by_identity.get(row.value)
        if labels != named:
            where = f"{key.prefix}, scope {scope_text(key.scope)}"
            yield Contradiction("identities", where, _words(labels), f"identity {row.value}: {_words(named)}")


def _policy(engine: Engine) -> Iterator[Step]:
    """A set in force has, for each identity it selects, the rows its rules say, and no others."""
    cache, table = engine.selector_cache, engine.reconciler.policy
    for number in {group.set for group in engine.groups.groups.values()}:
        policy_set = engine.sets.by_number.get(number)
        if policy_set is None:
            yield Contradiction("policy", f"set {number}", "in force", "not there")
            continue
        values = policy_set.compiled.values_by_peer
        selected: set[int] = {IDENTITY_ANY, *policy_set.rows_by_identity}
        for peer in policy_set.compiled.peers:
            selected |= cache.identities_by_selector.get(peer, set())
        for identity in sorted(selected):
            yield None
            labels = engine.identities.labels_by_identity.get(identity)
            if identity in table.incomplete or (labels is None and identity != IDENTITY_ANY):
                continue
            peers: list[Peer | None] = [None] if labels is None else [*cache.selectors_of(labels)]
            rows = resolve(pair for peer in peers for pair in values.get(peer, ()))
            wanted: dict[Key, Value] = {PolicyKey(number, identity, *block): value for block, value in rows.items()}
            has = {key: row.value for key in policy_set.rows_by_identity.get(identity, ()) if (row := table.desired.get(key))}
            if wanted != has:
                lacking, surplus = wanted.items() - has.items(), has.items() - wanted.items()
                yield Contradiction("policy", f"set {number}, identity {identity}", _rows(lacking), _rows(surplus))


def _endpoints(engine: Engine) -> Iterator[Step]:
    """Groups, the endpoints in them, and the addresses these send from."""
    tables = engine.reconciler.tables
    wanted: list[tuple[Table, Key, Value]] = []
    for group in engine.groups.groups.values():
        closed = group.compiled.default_deny_egress, group.compiled.default_deny_ingress
        wanted.append((Table.GROUPS, group.number, GroupValue(group.set, *closed, group.compiled.audit)))
    for number, endpoint in engine.groups.endpoints.items():
        added = endpoint.added
        wanted += [
            (Table.OWN_ADDRESSES, OwnAddressKey(number, address), True) for address in (*added.addresses, *added.also_from)
        ]
        if endpoint.group is not None:
            where = endpoint.group.number, endpoint.scope, added.orientation
            wanted.append((Table.ENDPOINTS, added.ifindex, EndpointValue(number, *where, added.dhcp, added.silent)))
    for table, key, value in wanted:
        yield None
        row = tables[table].desired.get(key)
        if row is None or row.value != value:
            yield Contradiction(str(table), row_text(key), str(value), str(row.value) if row is not None else "not wanted")


def _words(labels: frozenset[str] | None) -> str:
    return ", ".join(sorted(labels)) if labels else "no labels"


def _rows(rows: Iterable[tuple[Key, Value]]) -> str:
    return "; ".join(f"{row_text(key)}: {value}" for key, value in sorted(rows, key=str)) or "no other rows"
