"""The shorthand: a list of what may be talked to, one entry a line, `#` begins a comment.

    entry   target[:port[-port]][/protocol]     allow; protocol is tcp, udp, sctp, icmp or any
            !network…                           deny
            !pattern                            never ask for these names, never learn them
    target  name, pattern, address or CIDR; `fqdn:` or `cidr:` in front says which; IPv6 in brackets when a port follows

A target alone is every port of every protocol. A port without a protocol is that port of every protocol that has ports; a
protocol without a port is every port of it. A list is one policy, which selects every endpoint and closes egress.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from agent.core.rules import Cidr, Fqdn, LabelSelector, Origin, Policy, Ports, Rule
from agent.core.types import (
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    PROTOCOLS_WITH_PORTS,
    Direction,
)
from agent.documents.remarks import Remarks
from agent.policy.values import PORT_MAX, read_excepted, read_pattern, read_port, read_prefix

ENTRY_CHARACTERS_MAX = 1_000

_PROTOCOLS = {
    "tcp": (PROTOCOL_TCP,),
    "udp": (PROTOCOL_UDP,),
    "sctp": (PROTOCOL_SCTP,),
    "icmp": (PROTOCOL_ICMP, PROTOCOL_ICMPV6),
}
_LENGTH = re.compile(r"/[0-9]+")
_ONLY_AN_ADDRESS = re.compile(r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")


class _Entry(NamedTuple):
    """An entry taken apart; kind is "cidr" or "fqdn"."""

    is_denial: bool
    kind: str
    target: str
    ports: tuple[Ports, ...] | None


def read_list(text: str, remarks: Remarks, name: str) -> Policy:
    """The policy of a list; mistakes go to the remarks, each with its line."""
    lines = enumerate(text.split("\n"), start=1)
    entries = [(line, entry) for line, content in lines if (entry := content.partition("#")[0].strip())]
    return read_entries(entries, remarks, name)


def read_entries(entries: Iterable[tuple[int, str]], remarks: Remarks, name: str) -> Policy:
    """The policy of entries with their line numbers. No entry at all allows nothing."""
    rules: list[Rule] = []
    except_names: list[str] = []
    for line, text in entries:
        try:
            entry = _take_apart(text)
            doubt = _read_entry(entry, rules, except_names, Origin(remarks.file, line, name))
        except ValueError as error:
            remarks.mistake(line, "", str(error))
        else:
            if doubt is not None:
                remarks.caution(line, "", doubt)
    return Policy(
        name=name,
        subject=LabelSelector(),
        rules=tuple(rules),
        default_deny_egress=True,
        default_deny_ingress=False,
        except_names=tuple(dict.fromkeys(except_names)),
        origin=Origin(remarks.file, 1, name),
    )


def _read_entry(entry: _Entry, rules: list[Rule], except_names: list[str], origin: Origin) -> str | None:
    """Adds what the entry says; gives back what is doubtful about it."""
    if entry.kind == "cidr":
        prefix, doubt = read_prefix(entry.target)
        rules.append(Rule(Direction.EGRESS, (Cidr(prefix),), entry.ports, entry.is_denial, None, origin))
    elif not entry.is_denial:
        pattern, doubt = read_pattern(entry.target)
        rules.append(Rule(Direction.EGRESS, (Fqdn(pattern),), entry.ports, False, None, origin))
    elif entry.ports is None:
        pattern, doubt = read_excepted(entry.target)
        except_names.append(pattern)
    else:
        raise ValueError(f"a name is taken out for all ports and protocols; write !{entry.target}")
    return doubt


def _take_apart(text: str) -> _Entry:
    if len(text) > ENTRY_CHARACTERS_MAX:
        raise ValueError(f"the entry has {len(text)} characters; write one entry a line")
    rest = text.removeprefix("!").lstrip()
    if any(character.isspace() for character in rest):
        raise ValueError(f"{text!r} has white space in it; write one entry a line, such as api.example.com:443/tcp")
    kind = next((kind for kind in ("fqdn", "cidr") if rest.startswith(f"{kind}:")), None)
    if kind is not None:
        rest = rest.removeprefix(f"{kind}:")
    if "://" in rest:
        raise ValueError(f"{text!r} is a URL; write the name and port in it, such as api.example.com:443")
    target, port, protocol = _split(rest)
    if not target:
        raise ValueError(f"{text!r} has no target; write a name, an address or a network")
    if kind is None:
        is_network = _LENGTH.search(target) or _ONLY_AN_ADDRESS.fullmatch(target)
        kind = "cidr" if is_network else "fqdn"
    return _Entry(text.startswith("!"), kind, target, _read_ports(port, protocol))


def _split(text: str) -> tuple[str, str | None, str | None]:
    """Target, port and protocol. A slash and digits belong to a network, a slash and letters are the protocol."""
    protocol = None
    before, slash, after = text.rpartition("/")
    if slash and not after[:1].isdigit():
        text, protocol = before, after
    if text.startswith("["):
        inner, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise ValueError(f"{text!r} has no closing bracket; write [2001:db8::7]:443")
        length = _LENGTH.match(rest)
        if length is not None:
            inner, rest = inner + length[0], rest[length.end() :]
        if rest and not rest.startswith(":"):
            raise ValueError(f"{rest!r} stands behind the bracket; write [2001:db8::7]:443")
        return inner, rest[1:] if rest else None, protocol
    if text.count(":") == 1:
        target, _, port = text.partition(":")
        return target, port, protocol
    return text, None, protocol


def _read_ports(port: str | None, protocol: str | None) -> tuple[Ports, ...] | None:
    """None is every protocol and port."""
    if protocol is not None and protocol.lower() not in {*_PROTOCOLS, "any"}:
        raise ValueError(f"{protocol!r} is no protocol; write tcp, udp, sctp, icmp or any")
    protocols = PROTOCOLS_WITH_PORTS if protocol is None else _PROTOCOLS.get(protocol.lower(), PROTOCOLS_WITH_PORTS)
    if port is None:
        if protocol is None or protocol.lower() == "any":
            return None
        return tuple(Ports(number, 0, PORT_MAX) for number in protocols)
    if PROTOCOL_ICMP in protocols:
        raise ValueError("icmp has no ports; write the entry without one")
    if "," in port:
        raise ValueError(f"{port!r} is more than one port; write an entry for each, or a range such as 80-90")
    first_text, dash, last_text = port.partition("-")
    first = read_port(first_text)
    last = read_port(last_text) if dash else first
    if not first:
        raise ValueError("there is no port 0; leave the port out where every port is meant")
    if last < first:
        raise ValueError(f"the range {port} ends before it begins; write {last}-{first}")
    return tuple(Ports(number, first, last) for number in protocols)
