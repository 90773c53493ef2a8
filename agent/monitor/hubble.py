"""Facts as lines of Hubble's exporter: ExportEvent in proto3 JSON with the field names of the .proto, one a line.

    question         one flow of type L7 that is the request, and one that is the response, where there was one
    verdict          an L3_L4 flow of Cilium's event type 5, policy-verdict
    drop             of event type 1, drop; what audit let pass is a policy-verdict AUDIT, as Cilium says it
    policy, guard, … an agent event
    lost             lost_events

`hubble observe --input-file` shows flows and says of agent events that it does not know them; what reads exports takes both.
Message and field names, numbers of event types and drop reasons: Cilium's api/v1/flow/flow.proto and pkg/monitor/api, 1.19.
What one host has not, has the nearest thing: the namespace is the label `namespace` or else "default", the pod's name is the
interface. Ports of a question's client are not known.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any, Final

from agent.core.types import IDENTITY_HOST, IDENTITY_WORLD, PORT_DNS
from agent.monitor.facts import KnownEndpoints, Row, rcode_text, remote_of, verdict_of

_EVENT_DROP: Final = 1
_EVENT_POLICY_VERDICT: Final = 5
_EVENT_L7: Final = 129
# We judge by identity and port, always both.
_MATCH_L3_L4: Final = 2
_POLICY_DENIED: Final = (133, "POLICY_DENIED")
_DROP_REASONS: Final = {
    "policy": _POLICY_DENIED,
    "flow-ended": _POLICY_DENIED,
    "deny": (181, "POLICY_DENY"),
    "source": (132, "INVALID_SOURCE_IP"),
    "neighbour-claim": (132, "INVALID_SOURCE_IP"),
    "martian": (151, "STALE_OR_UNROUTABLE_IP"),
    "malformed": (134, "INVALID_PACKET_DROPPED"),
    "source-route": (134, "INVALID_PACKET_DROPPED"),
    "unrelated": (134, "INVALID_PACKET_DROPPED"),
    "extensions": (156, "INVALID_IPV6_EXTENSION_HEADER"),
    "fragment": (157, "IP_FRAGMENTATION_NOT_SUPPORTED"),
    "ethertype": (166, "UNSUPPORTED_L2_PROTOCOL"),
    "vlan": (182, "VLAN_FILTERED"),
    "vlan-redirect": (182, "VLAN_FILTERED"),
    "no-socket": (178, "SOCKET_LOOKUP_FAILED"),
    "not-assigned": (179, "SOCKET_ASSIGN_FAILED"),
    "not-for-gate": (180, "PROXY_REDIRECTION_NOT_SUPPORTED_FOR_PROTOCOL"),
}
_VERDICTS: Final = {"allowed": "FORWARDED", "denied": "DROPPED", "audited": "AUDIT"}
_DNS_PORTLESS: Final = {"destination_port": PORT_DNS}

Event = dict[str, Any]


class Exporter:
    """node: what this host is called."""

    def __init__(self, endpoints: KnownEndpoints, node: str) -> None:
        self._endpoints = endpoints
        self._node = node

    def events(self, fact: Row) -> Iterator[Event]:
        kind = fact["kind"]
        if kind == "question":
            yield from map(self._flow, self._dns(fact) if "name" in fact else ())
        elif kind in ("verdict", "drop", "chatter"):
            yield self._flow(self._packet(fact))
        elif kind == "lost":
            lost = {"source": "OBSERVER_EVENTS_QUEUE", "num_events_lost": str(fact["count"])}
            yield {"lost_events": lost, "node_name": self._node, "time": _time(dt.datetime.now(dt.UTC))}
        else:
            yield {"agent_event": _agent_event(fact), "node_name": self._node, "time": _time(_at(fact))}

    def _flow(self, flow: Event) -> Event:
        return {"flow": {**flow, "node_name": self._node}, "node_name": self._node, "time": flow["time"]}

    def _dns(self, fact: Row) -> Iterator[Event]:
        qtype, name, verdict, answered_at = fact["type"], fact["name"], verdict_of(fact), _at(fact)
        took_s = (fact.get("upstream_s") or 0) + (fact.get("gate_s") or 0)
        client, server = self._endpoint_of(fact), self._remote(fact["server"], None)
        asked = {"query": name, "qtypes": [qtype], "observation_source": "proxy"}
        common = {"Type": "L7", "event_type": {"type": _EVENT_L7}, "traffic_direction": "EGRESS"}
        asks = "AUDIT" if fact.get("verdict") == "audited" else "DROPPED" if verdict == "denied" else "REDIRECTED"
        yield {
            "time": _time(answered_at - dt.timedelta(seconds=took_s)),
            "verdict": asks,
            **(_denied(*_POLICY_DENIED) if asks == "DROPPED" else {}),
            "IP": _ip(fact["client"], fact["server"]),
            "l4": {fact["protocol"].upper(): _DNS_PORTLESS},
            "source": client,
            "destination": server,
            **common,
            "l7": {"type": "REQUEST", "dns": asked},
            "is_reply": False,
            "Summary": f"DNS Query {name} {qtype}",
        }
        if fact["outcome"] not in ("released", "failed"):
            return
        answers = fact.get("answers") or []
        rcode, rcode_name = (fact.get("rcode", 0), rcode_text(fact)) if fact["outcome"] == "released" else (2, "SERVFAIL")
        said = (
            f'"{",".join(answer["address"] for answer in answers)}" TTL: {_ttl(answers)}' if answers else f"RCode: {rcode_name}"
        )
        yield {
            "time": _time(answered_at),
            "verdict": "FORWARDED",
            "IP": _ip(fact["server"], fact["client"]),
            "l4": {fact["protocol"].upper(): {"source_port": PORT_DNS}},
            "source": server,
            "destination": client,
            **common,
            "l7": {
                "type": "RESPONSE",
                "latency_ns": str(round(took_s * 1e9)),
                "dns": {
                    **asked,
                    "ips": [answer["address"] for answer in answers],
                    "ttl": _ttl(answers),
                    "cnames": list(fact.get("cnames") or ()),
                    "rcode": rcode,
                    "rrtypes": sorted({"AAAA" if ":" in answer["address"] else "A" for answer in answers}),
                },
            },
            "is_reply": True,
            "Summary": f"DNS Answer {said} (Proxy {name} {qtype})",
        }

    def _packet(self, fact: Row) -> Event:
        # Hubble tells no chatter apart.
        is_egress, verdict = fact["direction"] == "egress", verdict_of(fact) or "denied"
        own, far = self._endpoint_of(fact), self._remote(remote_of(fact), fact["identity"])
        names = [name.removesuffix(".") for name in fact["names"]]
        direction = "egress" if is_egress else "ingress"
        is_drop = verdict == "denied"
        flow = {
            "time": _time(_at(fact)),
            "verdict": _VERDICTS[verdict],
            **(_denied(*_DROP_REASONS.get(fact["reason"], (0, "DROP_REASON_UNKNOWN"))) if is_drop else {}),
            "IP": _ip(fact["source"], fact["destination"]),
            "l4": _l4(fact),
            "source": own if is_egress else far,
            "destination": far if is_egress else own,
            "Type": "L3_L4",
            ("destination_names" if is_egress else "source_names"): names,
            "event_type": {"type": _EVENT_DROP} if is_drop else {"type": _EVENT_POLICY_VERDICT},
            "traffic_direction": direction.upper(),
            "is_reply": False,
        }
        if is_drop:
            flow["event_type"]["sub_type"] = flow["drop_reason"]
        else:
            flow["policy_match_type"] = _MATCH_L3_L4
        if fact["rule"] != "no rule":
            flow[f"{direction}_{'allowed' if verdict == 'allowed' else 'denied'}_by"] = [{"name": fact["rule"]}]
        flow["Summary"] = f"{fact['protocol'].upper()} {fact['reason'] if is_drop else verdict}"
        return flow

    def _endpoint_of(self, fact: Row) -> Event:
        row = self._endpoints.of(fact)
        return _endpoint(row) if row is not None else {}

    def _remote(self, address: str, identity: int | None) -> Event:
        row = self._endpoints.at(address)
        if row is not None:
            return _endpoint(row)
        reserved = "host" if identity == IDENTITY_HOST else "world"
        return {"identity": identity or IDENTITY_WORLD, "labels": [f"reserved:{reserved}"]}


def _endpoint(row: Row) -> Event:
    labels = row["labels"]
    return {
        "ID": row["endpoint"],
        "namespace": labels.get("namespace", "default"),
        "labels": [f"k8s:{key}={value}" for key, value in sorted(labels.items())],
        "pod_name": row["interface"],
    }


def _agent_event(fact: Row) -> Event:
    if fact["kind"] == "policy" and not fact.get("error"):
        return {"type": "POLICY_UPDATED", "policy_update": {"rule_count": str(fact["policies"])}}
    if fact["kind"] == "endpoint":
        failed = {"id": str(fact["endpoint"]), "error": str(fact.get("error") or "")}
        return {"type": "ENDPOINT_REGENERATE_FAILURE", "endpoint_regenerate": failed}
    said = {key: value for key, value in fact.items() if key not in ("kind", "time")}
    return {"type": "AGENT_EVENT_UNKNOWN", "unknown": {"type": f"namegate-{fact['kind']}", "notification": json.dumps(said)}}


def _denied(number: int, name: str) -> Event:
    return {"drop_reason": number, "drop_reason_desc": name}


def _ip(source: str, destination: str) -> Event:
    return {"source": source, "destination": destination, "ipVersion": "IPv6" if ":" in source else "IPv4"}


def _l4(packet: Row) -> Event:
    protocol, port = packet["protocol"], packet["port"]
    if protocol in ("icmp", "icmpv6"):
        return {"ICMPv4" if protocol == "icmp" else "ICMPv6": {"type": port}}
    if protocol not in ("tcp", "udp", "sctp"):
        return {}
    return {protocol.upper(): {"source_port": packet.get("source_port") or 0, "destination_port": port}}


def _ttl(answers: list[Row]) -> int:
    return min((answer["ttl"] for answer in answers), default=0)


def _at(fact: Row) -> dt.datetime:
    return dt.datetime.fromisoformat(fact["time"])


def _time(at: dt.datetime) -> str:
    """RFC 3339, as proto3 JSON wants it."""
    return at.astimezone(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
