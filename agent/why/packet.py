"""All that is known about one packet and its verdict, as a row of JSON."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from agent.control.listings import peer_text, port_text, scope_text
from agent.core.barrier import row_text
from agent.core.engine import Engine
from agent.core.events import EndpointAdded
from agent.core.history import Seen
from agent.core.policy import COOKIE_NONE, Block, CompiledPolicy
from agent.core.rules import Fqdn, Policy, Rule
from agent.core.types import (
    IDENTITY_ANY,
    PROTOCOL_NAMES,
    SCOPE_STATIC,
    Address,
    Direction,
    LabelSet,
    PolicyKey,
    PolicyValue,
    Table,
    Verdict,
    text_of,
)
from agent.datapath.abi import FlowState, Reason
from agent.datapath.maps import Flow as KernelFlow
from agent.datapath.model import NS, Flow, FlowKey, parse
from agent.why.asked import ACK, Asked, frame_of
from agent.why.reasons import meaning, without_a_rule
from agent.why.rows import Grounds, Judged, Rows, judge, judge_packet, local_of

Row = dict[str, object]

FLOWS_MAX = 5
WOULD_OPEN_MAX = 20


def packet_row(grounds: Grounds, added: EndpointAdded, asked: Asked, now: float) -> Row:
    """Question and verdict; what the judge met on its way; every rule that speaks of the packet."""
    judged = judge(grounds.rows, added, asked, now)
    judgement = judged.judgement
    engine, identity = grounds.engine, judgement.identity
    labels = engine.identities.labels_by_identity.get(identity, frozenset())
    said = rule_text(engine, judgement.cookie) if judgement.reason in _BY_RULES else None
    is_unsaid = judgement.reason in {Reason.PASS_POLICY, Reason.DROP_POLICY} and judgement.cookie == COOKIE_NONE
    sentence = without_a_rule(judgement.reason, asked.direction) if is_unsaid else meaning(judgement.reason).sentence
    return {
        "question": {
            "endpoint": added.endpoint,
            "interface": added.interface,
            "direction": asked.direction.name.lower(),
            "local": text_of(local_of(added, asked)),
            "remote": text_of(asked.remote),
            "protocol": PROTOCOL_NAMES.get(asked.protocol, str(asked.protocol)),
            "port": asked.port,
            "what": asked.what,
        },
        "allowed": judgement.passes,
        "audited": judgement.audited,
        "verdict": "redirected" if judgement.reason is Reason.PASS_REDIRECT else "allowed" if judgement.passes else "denied",
        "reason": judgement.reason.text,
        "number": meaning(judgement.reason).number,
        "sentence": sentence,
        "rule": said,
        "policy": _policy_of(engine, judgement.cookie) if said is not None else None,
        "rules": rules_about(grounds, added, judged, labels) if judgement.reason in _BY_RULES else [],
        "identity": identity,
        "labels": sorted(labels),
        "scope": scope_text(judged.endpoint.scope) if judged.endpoint is not None else None,
        "set": judged.group.set if judged.group is not None else None,
        "selectors": selectors_of(engine, labels, asked.remote),
        "rows": list(_rows(engine, judged)),
    }


# Of these a rule decides, or that there is none.
_BY_RULES = frozenset(
    (Reason.PASS_POLICY, Reason.PASS_REDIRECT, Reason.DROP_POLICY, Reason.DROP_DENY, Reason.DROP_NOT_FOR_GATE)
)


def rule_text(engine: Engine, cookie: int) -> str:
    """File and line, or that no rule of a file decided."""
    rule = engine.cookies.rule_by_cookie.get(cookie)
    return str(rule.origin) if rule is not None else "no rule"


def _policy_of(engine: Engine, cookie: int) -> str | None:
    rule = engine.cookies.rule_by_cookie.get(cookie)
    return rule.origin.policy if rule is not None else None


def compiled_of(engine: Engine, added: EndpointAdded) -> CompiledPolicy | None:
    endpoint = engine.groups.endpoints.get(added.endpoint)
    return endpoint.compiled if endpoint is not None else None


def rules_about(grounds: Grounds, added: EndpointAdded, judged: Judged, labels: LabelSet) -> list[Row]:
    """Every rule whose peers and ports hold the packet, the one that decides first."""
    compiled = compiled_of(grounds.engine, added)
    if compiled is None:
        return []
    found: dict[tuple[Verdict, int], Row] = {}
    for peer in (None, *grounds.engine.selector_cache.selectors_of(labels)):
        for block, value in compiled.values_by_peer.get(peer, ()):
            if value.cookie != COOKIE_NONE and _holds(block, judged):
                row: Row = {
                    "verdict": value.verdict.name.lower(),
                    "rule": rule_text(grounds.engine, value.cookie),
                    "policy": _policy_of(grounds.engine, value.cookie),
                    "selector": "everybody" if peer is None else peer_text(peer),
                    "decides": value.cookie == judged.judgement.cookie,
                }
                found.setdefault((value.verdict, value.cookie), row)
    in_order = sorted(found, key=lambda key: (key[1] != judged.judgement.cookie, -key[0], key[1]))
    return [found[key] for key in in_order]


def would_open(policies: Iterable[Policy], asked: Asked) -> list[Row]:
    """Names by which the address would be open, were it one of theirs, and not held by them now."""
    rows: Iterator[Row] = (
        {"selector": f"fqdn:{peer.pattern}", "rule": str(rule.origin)}
        for policy in policies
        for rule in policy.rules
        if rule.direction is asked.direction and not rule.deny and rule.names is None and _opens(rule, asked)
        for peer in rule.peers or ()
        if isinstance(peer, Fqdn)
    )
    return list(islice(rows, WOULD_OPEN_MAX))


def _opens(rule: Rule, asked: Asked) -> bool:
    ports = rule.ports
    return ports is None or any(each.protocol == asked.protocol and each.first <= asked.port <= each.last for each in ports)


def _holds(block: Block, judged: Judged) -> bool:
    packet = judged.packet
    shift = 16 - block.port_bits
    return (
        block.direction is judged.direction
        and block.protocol in (0, packet.protocol)
        and packet.policy_port >> shift == block.port >> shift
    )


def selectors_of(engine: Engine, labels: LabelSet, address: Address) -> list[Row]:
    """What holds this label set, and of a bag its size and the names that brought the address."""
    rows: list[Row] = []
    for peer in engine.selector_cache.selectors_of(labels):
        row: Row = {"selector": peer_text(peer)}
        selector = engine.names.selectors.get(peer) if isinstance(peer, Fqdn) else None
        if selector is not None:
            row["bag"] = sum(len(bag) for bag in selector.bags.values())
            row["names"] = sorted({name for bag in selector.bags.values() for name in bag.of(address)})
        rows.append(row)
    return rows


def _rows(engine: Engine, judged: Judged) -> Iterator[Row]:
    """The rows that hold the packet, as they are where the judge looked; `decides`: by which it was judged."""
    model, judgement = judged.model, judged.judgement
    if judged.endpoint is None or judged.group is None:
        return
    is_found = False
    for scope in (judged.endpoint.scope, SCOPE_STATIC):
        for key in reversed([key for key in model.ipcache if key.scope == scope]):
            yield {
                "table": str(Table.IPCACHE),
                "row": row_text(key),
                "prefix": str(key.prefix),
                "scope": scope_text(scope),
                "identity": model.ipcache[key],
                "decides": not is_found,
            }
            is_found = True
    if judgement.reason not in _BY_RULES:
        return
    closest = [judged.closest_row(identity) for identity in (judgement.identity, IDENTITY_ANY)]
    strongest = model.strongest(
        judged.group.set, judgement.identity, judged.direction, judged.packet.protocol, judged.packet.policy_port
    )
    for row in closest:
        if row is not None:
            yield policy_row(engine, *row) | {"decides": row[1] == strongest}


def policy_row(engine: Engine, key: PolicyKey, value: PolicyValue) -> Row:
    return {
        "table": str(Table.POLICY),
        "row": row_text(key),
        "set": key.set,
        "identity": "any" if key.identity == IDENTITY_ANY else key.identity,
        "direction": key.direction.name.lower(),
        "protocol": "any" if key.protocol == 0 else PROTOCOL_NAMES.get(key.protocol, str(key.protocol)),
        "port": port_text(key),
        "verdict": value.verdict.name.lower(),
        "rule": rule_text(engine, value.cookie),
    }


# --- names -----------------------------------------------------------------------------------------------------------


def names_row(engine: Engine, address: Address, now: float, *, scopes: Collection[int] = ()) -> list[Row]:
    """Names seen on the address, the last one first; with what is left of their lifetime in these scopes (none: in all)."""
    return [seen_row(engine, seen, now, scopes) for seen in engine.proxy.history.on(address, now)]


def seen_row(engine: Engine, seen: Seen, now: float, scopes: Collection[int] = ()) -> Row:
    """Who was answered with it, and when."""
    return {
        "name": seen.name,
        "address": text_of(seen.address),
        "endpoint": seen.endpoint,
        "interface": _interface(engine, seen.endpoint),
        "chain": list(seen.chain),
        "first": _wall(seen.first_at, now),
        "last": _wall(seen.last_at, now),
        "expires_in": life_left(engine, seen.name, seen.address, now, scopes),
    }


def life_left(engine: Engine, name: str, address: Address, now: float, scopes: Collection[int]) -> float | None:
    """Seconds, in these scopes or in all; None where it is over."""
    pairs = [pair for pair in engine.dns_cache.pairs_by_address.of(address) if pair.name == name]
    left = [engine.dns_cache.lifetimes[pair].kept_until - now for pair in pairs if not scopes or pair.scope in scopes]
    return round(max(left), 1) if left else None


def _interface(engine: Engine, number: int | None) -> str | None:
    endpoint = engine.groups.endpoints.get(number) if number is not None else None
    return endpoint.added.interface if endpoint is not None else None


def _wall(at: float, now: float) -> str:
    """Of a time of CLOCK_BOOTTIME."""
    then = dt.datetime.now().astimezone() - dt.timedelta(seconds=now - at)
    return then.isoformat(timespec="seconds")


# --- flows -----------------------------------------------------------------------------------------------------------


def is_about(flow: KernelFlow, endpoint: int, asked: Asked) -> bool:
    """Was it opened by such a packet?"""
    flows = (flow.endpoint, flow.remote, flow.protocol, flow.direction, flow.policy_port)
    return flows == (endpoint, asked.remote, asked.protocol, asked.direction, asked.port)


def flow_row(rows: Rows, engine: Engine, added: EndpointAdded, flow: KernelFlow, now: float) -> Row:
    """What the kernel remembers of a flow, and what becomes of its next packet."""
    key = FlowKey(flow.endpoint, flow.local, flow.remote, flow.local_port, flow.remote_port, flow.protocol)
    remembered = Flow(
        int(flow.last * NS),
        flow.identity,
        flow.set,
        flow.cookie,
        flow.policy_port,
        flow.direction,
        flow.state,
        flow.is_settled,
        frozenset(Direction) if flow.is_closed else frozenset(),
        flow.audited,
        flow.exempt,
    )
    ports = (flow.local_port, flow.remote_port)
    frame = frame_of(flow.direction, flow.local, flow.remote, flow.protocol, ports, kind=flow.policy_port, flags=ACK)
    judgement = judge_packet(rows, added.ifindex, flow.direction, parse(frame), now, (key, remembered)).judgement
    return {
        "local": _end(flow.local, flow.local_port),
        "remote": _end(flow.remote, flow.remote_port),
        "opened": flow.direction.name.lower(),
        "identity": flow.identity,
        "set": flow.set,
        "rule": rule_text(engine, flow.cookie),
        "state": "ended" if flow.state is FlowState.ENDED else "live" if flow.ends > now else "over",
        "audited": flow.audited,
        "idle": round(max(0.0, now - flow.last), 1),
        "next_packet": judgement.reason.text,
        "number": meaning(judgement.reason).number,
        "next_passes": judgement.passes,
    }


def _end(address: Address, port: int) -> str:
    text = text_of(address)
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
