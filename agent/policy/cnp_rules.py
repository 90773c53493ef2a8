"""Rules of a CiliumNetworkPolicy: one item of a section to rules of the core.

Rule 1: a list that is missing says nothing; a list that is there and empty selects nobody. So `toCIDR: []` opens nothing, and a
rule without peers and ports opens nothing either.
Rule 2: denials are read as strictly as allows. A denial that in silence denies nothing is the worst that can happen here.
Rule 3: one item becomes one rule of the core for its plain ports and one for each entry of `toPorts` that has `rules.dns`.

What Cilium knows and one host does not stands in the tables of refusals, each with what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from agent.core.names import EVERY_NAME
from agent.core.rules import Cidr, Endpoints, Entity, Expression, Fqdn, LabelSelector, Operator, Origin, Peer, Ports, Rule
from agent.core.types import (
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    PROTOCOLS_WITH_PORTS,
    Direction,
    Prefix,
)
from agent.documents.fields import Field
from agent.policy.values import PORT_MAX, read_name, read_pattern, read_port, read_prefix, read_service

LABEL_NAMESPACE = "namespace"
# Kubernetes' name of the same; policies for Cilium select by it.
LABEL_KUBERNETES_NAMESPACE = "io.kubernetes.pod.namespace"

# As in Cilium, which so keeps one rule from filling a policy map.
PORTS_MAX = 40

_PEERS_REFUSED = {
    "{}Services": "there are no Kubernetes services on one host; select addresses with {}CIDR",
    "{}Groups": "there are no cloud groups on one host; select addresses with {}CIDR",
    "{}Nodes": "there are no nodes on one host; select addresses with {}CIDR, or this host with {}Entities: [host]",
    "{}Requires": "it is deprecated; put its labels into the selectors of {}Endpoints",
    "authentication": "there is no mutual authentication on one host; leave it out",
    "auth": "there is no mutual authentication on one host; leave it out",
}
_PORTS_REFUSED = {
    "serverNames": "nothing looks into payloads; select names with toFQDNs",
    "terminatingTLS": "nothing looks into payloads; leave it out",
    "originatingTLS": "nothing looks into payloads; leave it out",
    "listener": "there is no Envoy on one host; leave it out",
}
_LAYER_7_REFUSED = dict.fromkeys(
    ("http", "kafka", "l7", "l7proto"), "nothing looks into payloads; allow the port alone, or only names with rules.dns"
)
_CIDR_REFUSED = {
    "cidrGroupRef": "there are no CiliumCIDRGroups on one host; write its networks out",
    "cidrGroupSelector": "there are no CiliumCIDRGroups on one host; write its networks out",
}
_ENTITIES_REFUSED = {
    "cluster": "there is no cluster on one host; select endpoints by their labels",
    "health": "there is no cluster on one host; leave it out",
    "ingress": "there is no cluster on one host; leave it out",
    "init": "an endpoint has its labels from the start here; leave it out",
    "kube-apiserver": "there is no cluster on one host; select its address with a CIDR",
    "remote-node": "there is no cluster on one host; select its address with a CIDR",
    "unmanaged": "there is no cluster on one host; select endpoints by their labels",
    "world-ipv4": "write world, or the CIDR 0.0.0.0/0",
    "world-ipv6": "write world, or the CIDR ::/0",
}
_PROTOCOLS = {"TCP": PROTOCOL_TCP, "UDP": PROTOCOL_UDP, "SCTP": PROTOCOL_SCTP}
_PROTOCOLS_OF_DNS = (PROTOCOL_TCP, PROTOCOL_UDP)

# Names as in Cilium; numbers: IANA, ICMP Type Numbers and ICMPv6 "type" Numbers.
_ICMP_TYPES = {
    "IPv4": {
        "EchoReply": 0,
        "DestinationUnreachable": 3,
        "Redirect": 5,
        "Echo": 8,
        "EchoRequest": 8,
        "RouterAdvertisement": 9,
        "RouterSelection": 10,
        "TimeExceeded": 11,
        "ParameterProblem": 12,
        "Timestamp": 13,
        "TimestampReply": 14,
        "Photuris": 40,
        "ExtendedEchoRequest": 42,
        "ExtendedEchoReply": 43,
    },
    "IPv6": {
        "DestinationUnreachable": 1,
        "PacketTooBig": 2,
        "TimeExceeded": 3,
        "ParameterProblem": 4,
        "EchoRequest": 128,
        "EchoReply": 129,
        "MulticastListenerQuery": 130,
        "MulticastListenerReport": 131,
        "MulticastListenerDone": 132,
        "RouterSolicitation": 133,
        "RouterAdvertisement": 134,
        "NeighborSolicitation": 135,
        "NeighborAdvertisement": 136,
        "RedirectMessage": 137,
        "RouterRenumbering": 138,
        "ICMPNodeInformationQuery": 139,
        "ICMPNodeInformationResponse": 140,
        "InverseNeighborDiscoverySolicitation": 141,
        "InverseNeighborDiscoveryAdvertisement": 142,
        "HomeAgentAddressDiscoveryRequest": 144,
        "HomeAgentAddressDiscoveryReply": 145,
        "MobilePrefixSolicitation": 146,
        "MobilePrefixAdvertisement": 147,
        "DuplicateAddressRequestCodeSuffix": 157,
        "DuplicateAddressConfirmationCodeSuffix": 158,
        "ExtendedEchoRequest": 160,
        "ExtendedEchoReply": 161,
    },
}
_PROTOCOL_BY_FAMILY = {"IPv4": PROTOCOL_ICMP, "IPv6": PROTOCOL_ICMPV6}


class Section(NamedTuple):
    """Where a rule stands in its spec."""

    key: str
    direction: Direction
    deny: bool

    @property
    def side(self) -> str:
        """What the keys of its peers begin with."""
        return "to" if self.direction is Direction.EGRESS else "from"


class _Opening(NamedTuple):
    """Ports of a rule, with the names that may be asked on them (None: nothing is said of DNS)."""

    ports: tuple[Ports, ...]
    names: tuple[str, ...] | None


def read_rule(item: Field, section: Section, policy: str, namespace: str | None) -> list[Rule]:
    """policy: its name, for the rules' origin. namespace: of the policy; its peers are of it unless they say otherwise."""
    side = section.side
    kinds = [f"{side}CIDR", f"{side}CIDRSet", f"{side}Entities", f"{side}Endpoints"]
    refused = {key.format(side): why.replace("{}", side) for key, why in _PEERS_REFUSED.items()}
    if section.direction is Direction.EGRESS and not section.deny:
        kinds.insert(0, "toFQDNs")
    elif section.deny:
        refused[f"{side}FQDNs"] = (
            "a denial by name is passed by not asking for the name; deny a network, or take names out with the annotation "
            "namegate/except-names"
        )
    else:
        refused["fromFQDNs"] = "who comes in has no name that could be trusted; select networks with fromCIDR"
    parts = item.parts((*kinds, "toPorts", "icmps"), refused)
    if parts is None:
        return []
    present = [kind for kind in kinds if kind in parts]
    if len(present) > 1:
        parts[present[1]].mistake(f"{present[0]} and {present[1]} stand in one rule; write a rule for each")
    peers = tuple(_read_peers(present[0], parts[present[0]], namespace)) if present else None
    openings = _read_openings(parts, section)
    if openings is None and peers is None:
        return []
    origin = Origin(item.remarks.file, item.line, policy)
    if openings is None:
        return [Rule(section.direction, peers, None, section.deny, None, origin)]
    return [Rule(section.direction, peers, ports, section.deny, names, origin) for ports, names in openings]


# --- peers -----------------------------------------------------------------------------------------------------------


def _read_peers(kind: str, field: Field, namespace: str | None) -> Iterator[Peer]:
    items = field.items()
    if items is None:
        return
    if kind == "toFQDNs" and not items:
        field.mistake("the list of names is empty; write - matchName: api.example.com, or take the rule out to allow nothing")
    for item in items:
        if kind == "toFQDNs":
            pattern = _read_match(item)
            peer: Peer | None = None if pattern is None else Fqdn(pattern)
        elif kind.endswith("CIDR"):
            prefix = item.value(read_prefix)
            peer = None if prefix is None else Cidr(prefix)
        elif kind.endswith("CIDRSet"):
            peer = _read_cidr_set(item)
        elif kind.endswith("Entities"):
            peer = _read_entity(item)
        else:
            peer = Endpoints(_in_namespace(read_selector(item), namespace))
        if peer is not None:
            yield peer


def _read_match(item: Field, *, is_question: bool = False) -> str | None:
    """An entry with `matchName` or `matchPattern`, as a pattern."""
    parts = item.parts(("matchName", "matchPattern"))
    if parts is None:
        return None
    if len(parts) == 2:
        item.mistake("matchName and matchPattern stand in one entry; write an entry for each")
        return None
    if "matchName" in parts:
        return parts["matchName"].value(read_name)
    if "matchPattern" in parts:
        return parts["matchPattern"].value(_read_question_pattern if is_question else read_pattern)
    if is_question:
        item.mistake('an empty entry matches no name; write matchPattern: "*", or dns: [], where every name may be asked')
    else:
        item.mistake('an empty entry selects nothing; write matchName: api.example.com, or matchPattern: "*.example.com"')
    return None


def _read_question_pattern(text: str) -> tuple[str, str | None]:
    pattern, doubt = read_pattern(text)
    if pattern == EVERY_NAME:
        doubt = "every name may be asked here, so data can leave in the names that are asked"
    return pattern, doubt


def _read_cidr_set(item: Field) -> Cidr | None:
    parts = item.parts(("cidr", "except"), _CIDR_REFUSED)
    if parts is None:
        return None
    if "cidr" not in parts:
        if not any(item.peek(key) for key in _CIDR_REFUSED):
            item.mistake("the entry has no cidr; write cidr: 192.0.2.0/24")
        return None
    prefix = parts["cidr"].value(_read_full_prefix)
    excepts = []
    for hole in (parts["except"].items() or ()) if "except" in parts else ():
        excepted = hole.value(_read_full_prefix)
        if excepted is None or prefix is None:
            continue
        if not prefix.contains(excepted):
            hole.mistake(f"{excepted} does not lie inside {prefix}; take it out, or mend one of them")
        elif excepted == prefix:
            hole.caution(f"this takes out all of {prefix}, so the entry selects nobody")
        excepts.append(excepted)
    return None if prefix is None else Cidr(prefix, tuple(excepts))


def _read_full_prefix(text: str) -> tuple[Prefix, str | None]:
    return read_prefix(text, needs_length=True)


def _read_entity(item: Field) -> Entity | None:
    text = item.text()
    if text is None:
        return None
    if text in _ENTITIES_REFUSED:
        item.mistake(f"{text} is not supported: {_ENTITIES_REFUSED[text]}")
        return None
    known = [entity.value for entity in Entity]
    if text not in known:
        item.mistake(f"{text!r} is no entity; write one of {', '.join(known)}")
        return None
    return Entity(text)


# --- labels ----------------------------------------------------------------------------------------------------------


def read_selector(field: Field) -> LabelSelector:
    """`matchLabels` and `matchExpressions`; equal ones are equal however they were written."""
    parts = field.parts(("matchLabels", "matchExpressions")) or {}
    expressions = []
    for key, value in ((parts["matchLabels"].any_parts() or {}) if "matchLabels" in parts else {}).items():
        label, text = _read_key(value, key), value.text()
        if label is not None and text is not None:
            expressions.append(Expression(label, Operator.IN, frozenset((text,))))
    for item in (parts["matchExpressions"].items() or ()) if "matchExpressions" in parts else ():
        expression = _read_expression(item)
        if expression is not None:
            expressions.append(expression)
    return LabelSelector(tuple(sorted(expressions, key=lambda e: (e.key, e.operator, sorted(e.values)))))


def _read_expression(item: Field) -> Expression | None:
    parts = item.parts(("key", "operator", "values"))
    if parts is None:
        return None
    for wanted in ("key", "operator"):
        if wanted not in parts:
            item.mistake(f"the expression has no {wanted}; write key, operator and values")
    key = _read_key(parts["key"], parts["key"].text()) if "key" in parts else None
    operator = parts["operator"].text() if "operator" in parts else None
    items = (parts["values"].items() or ()) if "values" in parts else ()
    values = frozenset(text for item in items if (text := item.text()) is not None)
    if key is None or operator is None:
        return None
    known = [operator.value for operator in Operator]
    if operator not in known:
        # As in Cilium, which refuses the small letters that its own documentation has in places.
        near = [value for value in known if value.lower() == operator.lower()]
        hint = f"capitals count, write {near[0]}" if near else f"write one of {', '.join(known)}"
        parts["operator"].mistake(f"{operator!r} is no operator; {hint}")
        return None
    if operator in {Operator.IN, Operator.NOT_IN}:
        if not items:
            item.mistake(f"{operator} needs values; write at least one")
    elif items:
        parts["values"].mistake(f"{operator} has no values; leave them out, or write In or NotIn")
    return Expression(key, Operator(operator), values)


def _read_key(field: Field, text: str | None) -> str | None:
    """A label's key without its source: `k8s:` and `any:` are who gave the label in a cluster, and mean the same here."""
    if text is None:
        return None
    source, colon, key = text.rpartition(":")
    if colon and source not in {"k8s", "any"}:
        remedy = (
            "write toEntities or fromEntities for peers, and labels of its own for an endpoint"
            if source == "reserved"
            else "write the key alone, or with k8s: or any: in front"
        )
        field.mistake(f"labels of the source {source!r} are not known here; {remedy}")
        return None
    if not key:
        field.mistake("the label has no key; write one")
        return None
    return key


def _in_namespace(selector: LabelSelector, namespace: str | None) -> LabelSelector:
    """As in Cilium: peers of a namespaced policy are of its namespace unless their selector speaks of namespaces."""
    if namespace is None or any(e.key in {LABEL_NAMESPACE, LABEL_KUBERNETES_NAMESPACE} for e in selector.expressions):
        return selector
    return LabelSelector((*selector.expressions, Expression(LABEL_NAMESPACE, Operator.IN, frozenset((namespace,)))))


# --- ports -----------------------------------------------------------------------------------------------------------


def _read_openings(parts: dict[str, Field], section: Section) -> list[_Opening] | None:
    """None where the rule says nothing about ports."""
    entries = (parts["toPorts"].items() or ()) if "toPorts" in parts else ()
    icmp_entries = (parts["icmps"].items() or ()) if "icmps" in parts else ()
    if "toPorts" in parts and "icmps" in parts:
        parts["icmps"].mistake("toPorts and icmps stand in one rule; write a rule for each")
    if not entries and not icmp_entries:
        return None
    plain: list[Ports] = []
    openings = []
    for entry in entries:
        opening = _read_entry(entry, section)
        if opening.names is None:
            plain += opening.ports
        else:
            openings.append(opening)
    for entry in icmp_entries:
        plain += _read_icmp_entry(entry)
    asked = {ports.protocol for opening in openings for ports in opening.ports}
    if asked == {PROTOCOL_UDP}:
        parts["toPorts"].caution("DNS is allowed over UDP alone, so a reply too large for UDP cannot be had; allow TCP too")
    return [_Opening(tuple(dict.fromkeys(plain)), None), *openings] if plain or not openings else openings


def _read_entry(entry: Field, section: Section) -> _Opening:
    """An item of `toPorts`."""
    parts = entry.parts(("ports", "rules"), _PORTS_REFUSED)
    if parts is None:
        return _Opening((), None)
    names = _read_names(parts["rules"], section) if "rules" in parts else None
    items = (parts["ports"].items() or ()) if "ports" in parts else ()
    if not items and ("ports" not in parts or parts["ports"].is_list):
        entry.mistake('the entry has no ports; write - port: "443", or leave toPorts out where every port is meant')
    if len(items) > PORTS_MAX:
        parts["ports"].mistake(f"there are {len(items)} ports; at most {PORTS_MAX} stand in one list, write a second one")
    ports = [port for item in items for port in _read_port(item, is_asked=names is not None)]
    return _Opening(tuple(dict.fromkeys(ports)), names)


def _read_names(rules: Field, section: Section) -> tuple[str, ...] | None:
    """Of `rules.dns`; () is every name."""
    if section.deny:
        rules.mistake("a denial has no rules; deny the port alone, or take names out with the annotation namegate/except-names")
        return None
    parts = rules.parts(("dns",), _LAYER_7_REFUSED)
    if not parts:
        return None
    if section.direction is Direction.INGRESS:
        parts["dns"].mistake("DNS rules are for egress only: nobody's questions to an endpoint are judged; leave them out")
        return None
    names = (_read_match(item, is_question=True) for item in parts["dns"].items() or ())
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _read_port(item: Field, *, is_asked: bool) -> list[Ports]:
    """is_asked: DNS is spoken there, so it must be one port, of a protocol that carries DNS."""
    parts = item.parts(("port", "endPort", "protocol"))
    if parts is None:
        return []
    protocols = _read_protocols(parts.get("protocol"), is_asked=is_asked)
    if "port" not in parts:
        # A protocol that is refused has said why, and perhaps it has no ports.
        if protocols:
            item.mistake('the entry has no port; write port: "443", or port: "0" for every port of the protocol')
        return []
    # A number without quotes is refused: YAML takes 0443 and 1:30 for numbers too, and Kubernetes wants text.
    port, text = parts["port"], parts["port"].text()
    last = parts["endPort"].whole_number(0, PORT_MAX) if "endPort" in parts else 0
    if text is None or last is None:
        return []
    if text.isascii() and text.removeprefix("-").isdecimal():
        first = port.converted(text, lambda digits: (read_port(digits), None))
        if first is None:
            return []
        if not first and last:
            parts["endPort"].mistake('port "0" is every port, so it begins no range; write port: "1"')
        elif last and last < first:
            parts["endPort"].mistake(f"the range ends at {last}, before it begins at {first}; exchange them")
        port_by_protocol = dict.fromkeys(protocols, first)
    else:
        if last:
            parts["endPort"].mistake(f"a range begins with a number; write the number of {text!r}")
        port_by_protocol = port.converted(text, lambda name: (read_service(name), None)) or {}
    if is_asked and (text == "0" or (last and text != str(last))):
        port.mistake('DNS rules are for one port each; write port: "53" without endPort')
    ranges = ((protocol, port_by_protocol[protocol]) for protocol in protocols if protocol in port_by_protocol)
    return [Ports(protocol, first, (last or first) if first else PORT_MAX) for protocol, first in ranges]


def _read_protocols(field: Field | None, *, is_asked: bool) -> tuple[int, ...]:
    text = "" if field is None else field.text()
    if field is None or text is None or text.upper() in {"", "ANY"}:
        return _PROTOCOLS_OF_DNS if is_asked else PROTOCOLS_WITH_PORTS
    protocol = _PROTOCOLS.get(text.upper())
    if protocol is None:
        hint = "write TCP, UDP, SCTP or ANY, or a rule without toPorts, by which every protocol passes"
        if text.upper().startswith("ICMP"):
            hint = "write a rule with icmps"
        field.mistake(f"{text!r} is no protocol with ports; {hint}")
        return ()
    if is_asked and protocol not in _PROTOCOLS_OF_DNS:
        field.mistake("DNS is asked over UDP and TCP; write one of them, or ANY for both")
    return (protocol,)


def _read_icmp_entry(entry: Field) -> list[Ports]:
    """An item of `icmps`."""
    parts = entry.parts(("fields",))
    if parts is None:
        return []
    items = (parts["fields"].items() or ()) if "fields" in parts else ()
    if not items and ("fields" not in parts or parts["fields"].is_list):
        entry.mistake("the entry has no fields; write - type: EchoRequest")
    if len(items) > PORTS_MAX:
        parts["fields"].mistake(f"there are {len(items)} types; at most {PORTS_MAX} stand in one list, write a second one")
    return [ports for item in items if (ports := _read_icmp_field(item)) is not None]


def _read_icmp_field(item: Field) -> Ports | None:
    parts = item.parts(("family", "type"))
    if parts is None:
        return None
    family = parts["family"].text() if "family" in parts else "IPv4"
    if family is not None and family not in _ICMP_TYPES:
        parts["family"].mistake(f"{family!r} is no family; write IPv4 or IPv6")
        return None
    if "type" not in parts:
        item.mistake("the entry has no type; write type: EchoRequest, or its number")
        return None
    kind = parts["type"]
    if kind.is_number:
        number = kind.whole_number(0, 255)
    else:
        text = kind.text()
        number = None if text is None or family is None else _icmp_type(family, text)
        if text is not None and family is not None and number is None:
            kind.mistake(f"{family} has no ICMP type {text!r}; write 0 to 255, or a name such as EchoRequest")
    return None if family is None or number is None else Ports(_PROTOCOL_BY_FAMILY[family], number, number)


def _icmp_type(family: str, text: str) -> int | None:
    """By name, or the number in quotes, which Kubernetes takes as well."""
    known = _ICMP_TYPES[family]
    return int(text) if text in map(str, range(256)) else known.get(text)
