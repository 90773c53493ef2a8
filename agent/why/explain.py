"""`namegate explain`: why, of a packet, a name, an address or a drop.

By the rows in the kernel, or as if other policies were in force. Everything is a generator that stops after a millisecond or
so: DNS goes on in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol, TypeVar

from agent.control import ControlError
from agent.control.listings import scope_text
from agent.core.engine import Engine
from agent.core.events import EndpointAdded
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import (
    IDENTITY_ANY,
    SCOPE_STATIC,
    Address,
    Direction,
    Key,
    PolicyKey,
    PolicyValue,
    Table,
    Value,
    Verdict,
    text_of,
)
from agent.datapath.abi import Reason
from agent.datapath.maps import Flow
from agent.documents.remarks import PolicyError
from agent.monitor.facts import is_endpoint
from agent.why.asked import Asked, read_address, read_name, read_packet
from agent.why.change import change, name_change, question_verdict
from agent.why.packet import (
    FLOWS_MAX,
    Row,
    compiled_of,
    flow_row,
    is_about,
    life_left,
    names_row,
    packet_row,
    policy_row,
    rule_text,
    seen_row,
    selectors_of,
    would_open,
)
from agent.why.reasons import meaning, reason_of
from agent.why.rows import (
    NOWHERE,
    Difference,
    Grounds,
    Rows,
    closest_identity,
    differences,
    differences_in,
    judge,
    wanted_rows,
)
from agent.why.supposed import Situation, others_that_matter, suppose

T = TypeVar("T")
Steps = Generator[None, None, T]

_FLOWS_AT_ONCE = 1_024
_SEEN_AT_ONCE = 4_096
# Each is tried for a change until one does; a name that does not is guarded, and the next one is too.
_NAMES_TRIED_MAX = 3
_TAKEN_OUT_MAX = 1_000


class Tables(Rows, Protocol):
    """`KernelTables` is one."""

    def flows(self) -> Iterator[Flow]: ...


async def in_slices(steps: Steps[T]) -> T:
    """In the agent's one thread."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def at_once(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Explain:
    """tables: the kernel's. host: the host's addresses now. drops: those that are kept, the last one last. read: policies by
    path, as `apply` reads them. clock: CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        host: Callable[[], frozenset[Address]],
        drops: Callable[[], list[Row]],
        read: Callable[[Sequence[str]], tuple[Policy, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._host = host
        self._drops = drops
        self._read = read
        self._clock = clock
        self._taken_out: dict[str, tuple[float, Mapping[str, object]]] = {}  # the one that was told last is the last

    async def answer(self, arguments: Mapping[str, object]) -> Row:
        """One request of the control socket: `drop`, or `target` and perhaps `packet`."""
        return await in_slices(self.explained(arguments))

    def explained(self, arguments: Mapping[str, object]) -> Steps[Row]:
        files, policies = arguments.get("policies"), None
        if isinstance(files, list):
            try:
                policies = self._read([str(file) for file in files])
            except PolicyError as error:
                raise ControlError(f"these policies cannot be in force:\n{error}") from None
        endpoint = _text(arguments, "endpoint")
        drop = arguments.get("drop")
        if drop is not None:
            return (yield from self.drop(self._kept(drop) if isinstance(drop, int) else drop, policies))
        target, packet = _text(arguments, "target"), _text(arguments, "packet")
        if target is None:
            raise ControlError("say what to explain: an address and tcp/443, a name, an address, or --drop 1")
        direction = Direction.INGRESS if arguments.get("ingress") else Direction.EGRESS
        address = read_address(target)
        if address is None:
            return (yield from self.name(read_name(target), packet, self._endpoints(endpoint), policies))
        if packet is None:
            return (yield from self.address(address, self._endpoints(endpoint), policies))
        return (yield from self.packet(self._endpoint(endpoint), read_packet(target, packet, direction), policies))

    # --- endpoints ---------------------------------------------------------------------------------------------------

    def _endpoints(self, text: str | None) -> list[EndpointAdded]:
        """Those that are meant: by number, interface or label; None: all. Raises ControlError where there is none."""
        known = [endpoint.added for endpoint in self._engine.groups.endpoints.values() if endpoint.group is not None]
        if text is None:
            found = known
        else:
            found = [
                added
                for added in known
                if is_endpoint({"endpoint": added.endpoint, "interface": added.interface, "labels": added.labels}, text)
            ]
        if not found:
            what = "no endpoint is policed yet" if text is None else f"no endpoint is {text!r}"
            meant = dict.fromkeys(f"{key}={text}?" for added in known for key, value in added.labels.items() if value == text)
            raise ControlError(f"{what}: {' '.join([*meant, '`namegate endpoints` shows those there are'])}")
        return found

    def _endpoint(self, text: str | None) -> EndpointAdded:
        found = self._endpoints(text)
        if len(found) > 1:
            names = ", ".join(added.interface for added in found[:8])
            raise ControlError(f"say which endpoint: --endpoint with one of {names}")
        return found[0]

    def _still_there(self, endpoints: Iterable[EndpointAdded]) -> Iterator[EndpointAdded]:
        """One by one: between two slices an endpoint may go."""
        return (added for added in endpoints if added.endpoint in self._engine.groups.endpoints)

    def _situation(self, added: EndpointAdded, about: Asked | Address | str, policies: tuple[Policy, ...] | None) -> Situation:
        """about: a packet, everything about an address, or a name. policies: None for those in force."""
        engine, remote = self._engine, about.remote if isinstance(about, Asked) else about
        given = engine.groups.policies if policies is None else policies
        if added.policies is not None:
            given = added.policies if policies is None else policies  # its own alone judge it
        else:
            given = tuple(policy for policy in given if policy.selects(added.labels))
        scopes = engine.groups.scopes_of(added.endpoint)
        pairs = engine.dns_cache.pairs_by_address.of(remote) if isinstance(remote, bytes) else ()
        others = (endpoint.added for endpoint in engine.groups.endpoints.values())
        return Situation(
            engine.settings,
            added,
            others_that_matter(others, added, given, remote if isinstance(remote, bytes) else None),
            self._host(),
            given,
            frozenset(pair for pair in pairs if pair.scope in scopes),
            self._clock(),
            about if isinstance(about, Asked | str) else None,
        )

    # --- a packet ----------------------------------------------------------------------------------------------------

    def packet(self, added: EndpointAdded, asked: Asked, policies: tuple[Policy, ...] | None = None) -> Steps[Row]:
        """policies: None for those in force."""
        situation = self._situation(added, asked, policies)
        names = names_row(self._engine, asked.remote, situation.now, scopes=self._engine.groups.scopes_of(added.endpoint))
        row = yield from self._verdict(situation, asked, is_in_force=policies is None)
        in_order = sorted(names, key=lambda seen: seen["expires_in"] is None)  # those that are open first
        found = yield from change(situation, asked, [str(seen["name"]) for seen in in_order][:_NAMES_TRIED_MAX])
        row["names"] = names
        row["would_open"] = would_open(situation.policies, asked) if row["reason"] == Reason.DROP_POLICY.text else []
        row["flows"] = (yield from self._flows(added, asked)) if policies is None else []
        row["change"] = found.row() if found is not None else None
        return row

    def _verdict(self, situation: Situation, asked: Asked, *, is_in_force: bool) -> Steps[Row]:
        added, now = situation.added, self._clock()
        if not is_in_force:
            return supposed_row((yield from suppose(situation)), added, asked, now)
        there, wanted = judge(self._tables, added, asked, now), judge(wanted_rows(self._engine), added, asked, now)
        row = packet_row(Grounds(self._engine, self._tables), added, asked, now)
        row["differences"] = [str(each) for each in differences(self._engine, there.model, wanted.model)]
        return row

    def _flows(self, added: EndpointAdded, asked: Asked) -> Steps[list[Row]]:
        """The ones used last."""
        found: list[Flow] = []
        rest = self._tables.flows()
        while slice_ := list(islice(rest, _FLOWS_AT_ONCE)):
            found += (flow for flow in slice_ if is_about(flow, added.endpoint, asked))
            yield
        found.sort(key=lambda flow: -flow.last)
        return [flow_row(self._tables, self._engine, added, flow, self._clock()) for flow in found[:FLOWS_MAX]]

    # --- an address --------------------------------------------------------------------------------------------------

    def address(
        self, address: Address, endpoints: list[EndpointAdded], policies: tuple[Policy, ...] | None = None
    ) -> Steps[Row]:
        """What it is to each endpoint, and what is open."""
        rows: list[Row] = []
        differing: list[Difference] = []
        for added in self._still_there(endpoints):
            if policies is None:
                grounds = Grounds(self._engine, self._tables)
                differing += self._differences_about(added, address)
            else:
                grounds = yield from suppose(self._situation(added, address, policies))
            rows.append(address_row(grounds, added, address))
            yield
        return {
            "address": text_of(address),
            "allowed": any(row["open"] for row in rows),
            "endpoints": rows,
            "names": names_row(self._engine, address, self._clock()),
            "differences": list(dict.fromkeys(map(str, differing))),
        }

    def _differences_about(self, added: EndpointAdded, address: Address) -> list[Difference]:
        """In the rows that `address_row` shows."""
        engine, wanted = self._engine, wanted_rows(self._engine)
        scope, keys = engine.groups.endpoints[added.endpoint].scope, policy_keys(Grounds(engine, wanted), added, address)
        found = []
        for table in (Table.IPCACHE, Table.POLICY):
            there, meant = (_rows_about(rows, table, scope, address, keys) for rows in (self._tables, wanted))
            found += differences_in(engine, table, there, meant)
        return found

    # --- a name ------------------------------------------------------------------------------------------------------

    def name(
        self,
        name: str,
        packet: str | None,
        endpoints: list[EndpointAdded],
        policies: tuple[Policy, ...] | None = None,
    ) -> Steps[Row]:
        """May it be asked, who did, and what came of it; with a protocol and port: whether its addresses are open for them."""
        engine, now = self._engine, self._clock()
        pairs = sorted(engine.dns_cache.pairs_of(name))
        rows: list[Row] = []
        differing: list[str] = []
        for added in self._still_there(endpoints):
            situation, scopes = self._situation(added, name, policies), engine.groups.scopes_of(added.endpoint)
            addresses = dict.fromkeys(pair.address for pair in pairs if packet is not None and pair.scope in scopes)
            asked = [read_packet(text_of(address), str(packet), Direction.EGRESS) for address in addresses]
            abouts = [(self._situation(added, each, policies), each) for each in asked]
            grounds = Grounds(engine, self._tables) if policies is None else (yield from suppose(situation))
            row = question_row(grounds, added, name)
            packets: list[Row] = []
            for about, each in abouts:
                packets.append((yield from self._verdict(about, each, is_in_force=policies is None)))
                differing += _strings(packets[-1]["differences"])
            opened = read_packet("192.0.2.1", packet, Direction.EGRESS) if packet is not None else None
            found = yield from name_change(situation, name, opened)
            row["packets"] = packets
            row["allowed"] = bool(row["may_ask"]) and all(each["allowed"] for each in packets)
            row["change"] = found.row() if found is not None else None
            rows.append(row)
        seen: list[Row] = []
        entries = iter(engine.proxy.history.entries())
        while slice_ := list(islice(entries, _SEEN_AT_ONCE)):
            seen += [seen_row(engine, one, now) for one in slice_ if one.name == name]
            yield
        return {
            "name": name,
            "packet": packet,
            "allowed": any(row["allowed"] for row in rows),
            "endpoints": rows,
            "addresses": [
                {
                    "address": text_of(pair.address),
                    "scope": scope_text(pair.scope),
                    "expires_in": life_left(engine, name, pair.address, now, {pair.scope}),
                    "labels": sorted(engine.ipcache.label_set(pair.scope, pair.address)),
                }
                for pair in pairs
            ],
            "selectors": [
                {"selector": selector.label, "bag": sum(len(bag) for bag in selector.bags.values())}
                for selector in engine.names.selectors_of(name)
            ],
            "seen": seen[::-1],
            "taken_out": self._taken_out_row(name),
            "differences": differing,
        }

    def hear_of_guard(self, fields: Mapping[str, object], at: float) -> None:
        """Addresses were taken out of a reply, or under audit would have been."""
        name = str(fields["name"])
        self._taken_out.pop(name, None)
        self._taken_out[name] = (at, fields)
        if len(self._taken_out) > _TAKEN_OUT_MAX:
            del self._taken_out[next(iter(self._taken_out))]

    def _taken_out_row(self, name: str) -> Row | None:
        """What the address guard took out of a reply for it last."""
        if name not in self._taken_out:
            return None
        at, fields = self._taken_out[name]
        return {"ago": round(self._clock() - at, 1), **{key: fields[key] for key in ("endpoint", "addresses", "audited")}}

    # --- a drop ------------------------------------------------------------------------------------------------------

    def _kept(self, place: int) -> Row:
        drops = self._drops()
        if not 0 < place <= len(drops):
            raise ControlError(f"{len(drops)} drops are kept: --drop 1 is the last one, and there is no {place}")
        return drops[-place]

    def drop(self, drop: object, policies: tuple[Policy, ...] | None = None) -> Steps[Row]:
        """What was said of it then, and what would become of the same packet now."""
        if not isinstance(drop, Mapping):
            raise ControlError("a drop is an object, as `namegate drops -o json` prints them")
        try:
            then, asked = read_drop(drop)
        except (KeyError, ValueError) as error:
            raise ControlError(f"this is no drop as `namegate drops -o json` prints them: {error}") from None
        added = next(
            (e.added for n, e in self._engine.groups.endpoints.items() if n == drop.get("endpoint") and e.group is not None),
            None,
        )
        now: Row | None = None
        if asked is not None and added is not None:
            now = yield from self.packet(added, asked, policies)
        return {
            "drop": dict(drop),
            "then": then,
            "now": now,
            "allowed": now is not None and now["allowed"],
            "differences": now["differences"] if now is not None else [],
        }


def offline(target: str, packet: str, direction: Direction, labels: Mapping[str, str], policies: tuple[Policy, ...]) -> Row:
    """A packet under these policies, where no agent is asked: of an endpoint with these labels, and no name is known."""
    asked = read_packet(target, packet, direction)
    own = tuple(address for address in NOWHERE.values() if len(address) == len(asked.remote))
    added = EndpointAdded(1, "an endpoint", 1, labels, own)
    selecting = tuple(policy for policy in policies if policy.selects(labels))
    situation = Situation(Settings(), added, (), frozenset(), selecting, frozenset(), 0.0, asked)

    def steps() -> Steps[Row]:
        row = supposed_row((yield from suppose(situation)), added, asked, 0.0)
        found = yield from change(situation, asked, ())
        row["would_open"] = would_open(selecting, asked) if row["reason"] == Reason.DROP_POLICY.text else []
        return row | {"names": [], "flows": [], "change": found.row() if found is not None else None, "is_offline": True}

    return at_once(steps())


def supposed_row(grounds: Grounds, added: EndpointAdded, asked: Asked, now: float) -> Row:
    """As if; numbers of sets and identities are given when policies are put in force, so there are none to show."""
    return packet_row(grounds, added, asked, now) | {"identity": None, "set": None, "rows": [], "differences": []}


def read_drop(drop: Mapping[str, object]) -> tuple[Row, Asked | None]:
    """What is known of a drop without an agent: reason and rule; and the packet, where rules decide over such ones.

    Raises KeyError or ValueError where it is none.
    """
    reason = reason_of(str(drop["reason"]))
    if reason is None:
        raise ValueError(f"no packet is dropped for {drop['reason']!r}")
    is_out = drop["direction"] == "egress"
    source, destination = read_address(str(drop["source"])), read_address(str(drop["destination"]))
    if source is None or destination is None:
        raise ValueError("it has no source or no destination")
    local, remote = (source, destination) if is_out else (destination, source)
    said = meaning(reason)
    then: Row = {
        "reason": reason.text,
        "number": said.number,
        "sentence": said.sentence,
        "rule": drop.get("rule") or "no rule",
        "why": drop.get("why"),
    }
    if reason in _OF_THE_FRAME:
        return then, None
    protocol, port = str(drop["protocol"]), int(str(drop.get("port") or 0))
    direction = Direction.EGRESS if is_out else Direction.INGRESS
    for text in (f"{protocol}/{port}", protocol):
        try:
            asked = read_packet(text_of(remote), text, direction)
        except ControlError:
            continue
        return then, replace(asked, local=local)
    return then, None


# What was wrong is in the frame, which the event does not tell whole.
_OF_THE_FRAME = frozenset((
    Reason.DROP_NEIGHBOUR_CLAIM, Reason.DROP_ETHERTYPE, Reason.DROP_VLAN, Reason.DROP_VLAN_REDIRECT, Reason.DROP_MALFORMED,
    Reason.DROP_EXTENSIONS, Reason.DROP_FRAGMENT, Reason.DROP_UNRELATED, Reason.DROP_SOURCE_ROUTE, Reason.DROP_CANARY,
))  # fmt: skip


def question_row(grounds: Grounds, added: EndpointAdded, name: str) -> Row:
    """May this endpoint ask for the name, of a server that no rule names?"""
    verdict = question_verdict(grounds, added, name)
    compiled = compiled_of(grounds.engine, added)
    if compiled is not None and not compiled.default_deny_egress and not compiled.dns:
        is_allowed, sentence = True, "no policy speaks of what it sends, so no question of it is judged"
    else:
        is_allowed = verdict.allowed
        sentence = "a rule lets it be asked" if is_allowed else "no rule lets it be asked"
        if not is_allowed and compiled is not None and compiled.asks_named_servers:
            sentence += " of a server that no rule names"
    return {
        "endpoint": added.endpoint,
        "interface": added.interface,
        "may_ask": is_allowed,
        "sentence": sentence,
        "rule": rule_text(grounds.engine, verdict.cookie),
        "pattern": verdict.pattern,
    }


def policy_keys(grounds: Grounds, added: EndpointAdded, address: Address) -> list[PolicyKey]:
    """Of the rows that the endpoint's set has for the address, and for any."""
    endpoint = grounds.engine.groups.endpoints[added.endpoint]
    policy_set = grounds.engine.sets.by_number[endpoint.group.set] if endpoint.group is not None else None
    if policy_set is None:
        return []
    identity = closest_identity(grounds.rows, endpoint.scope, address)
    return [key for each in (identity, IDENTITY_ANY) for key in policy_set.rows_by_identity.get(each, ())]


def address_row(grounds: Grounds, added: EndpointAdded, address: Address) -> Row:
    """What an address is to one endpoint. open: to the first packet of some protocol and port."""
    engine, rows = grounds.engine, grounds.rows
    endpoint = engine.groups.endpoints[added.endpoint]
    compiled = compiled_of(engine, added)
    identity = closest_identity(rows, endpoint.scope, address)
    labels = engine.identities.labels_by_identity.get(identity, frozenset())
    held = {**rows.identity_rows(SCOPE_STATIC, address), **rows.identity_rows(endpoint.scope, address)}
    found = ((key, rows.row(Table.POLICY, key)) for key in policy_keys(grounds, added, address))
    policy = [(key, value) for key, value in found if isinstance(value, PolicyValue)]
    is_closed = compiled is not None and compiled.default_deny_egress
    return {
        "endpoint": added.endpoint,
        "interface": added.interface,
        "scope": scope_text(endpoint.scope),
        "identity": identity,
        "labels": sorted(labels),
        "selectors": selectors_of(engine, labels, address),
        "rows": [
            {"prefix": str(key.prefix), "scope": scope_text(key.scope), "identity": number} for key, number in held.items()
        ],
        "policy": [policy_row(engine, key, value) for key, value in policy],
        "default": "denied" if is_closed else "allowed",
        "open": not is_closed
        or any(key.direction is Direction.EGRESS and value.verdict is Verdict.ALLOW for key, value in policy),
    }


def _rows_about(rows: Rows, table: Table, scope: int, address: Address, keys: Iterable[PolicyKey]) -> dict[Key, Value]:
    found: dict[Key, Value] = {}
    if table is Table.POLICY:
        found.update((key, value) for key in keys if (value := rows.row(table, key)) is not None)
    else:
        for each in (scope, SCOPE_STATIC):
            found.update(rows.identity_rows(each, address).items())
    return found


def _strings(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _text(arguments: Mapping[str, object], key: str) -> str | None:
    value = arguments.get(key)
    return None if value is None else str(value)
