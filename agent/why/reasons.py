"""What each reason means, with the number under which bpf/verdict.h says it."""

from __future__ import annotations

from typing import Final, NamedTuple

from agent.core.types import Direction
from agent.datapath.abi import Reason


class Meaning(NamedTuple):
    number: str
    sentence: str


_MEANINGS: Final = {
    Reason.PASS_POLICY: Meaning("9", "a rule allows it"),
    Reason.PASS_FLOW: Meaning("7", "it belongs to a flow that was allowed"),
    Reason.PASS_RELATED: Meaning("7c", "it is an ICMP error about a flow that was allowed"),
    Reason.PASS_NEIGHBOUR: Meaning("3", "ARP and neighbour discovery pass where they claim no address of others"),
    Reason.PASS_AGENT: Meaning("4", "the agent itself sent it"),
    Reason.PASS_REDIRECT: Meaning("9", "it is DNS: the proxy answers it, and judges it by the name"),
    Reason.PASS_AUDIT: Meaning("12", "it would be dropped; under audit it passes"),
    Reason.PASS_ANSWER: Meaning("4", "it is our own refusal"),
    Reason.PASS_DHCP: Meaning("3a", "it is DHCP of an endpoint that may speak it"),
    Reason.PASS_FORWARDED: Meaning("4b", "this host only forwards it"),
    Reason.DROP_NO_ENDPOINT: Meaning("1", "the interface has no row: it is no endpoint, or not yet"),
    Reason.DROP_NO_GROUP: Meaning("1", "the endpoint has no policies in force yet"),
    Reason.DROP_SOURCE: Meaning("5", "the source is not one of the endpoint's addresses"),
    Reason.DROP_NEIGHBOUR_CLAIM: Meaning("3", "it speaks for an address that is not the endpoint's, or for a router"),
    Reason.DROP_ETHERTYPE: Meaning("2", "it is neither IP nor ARP"),
    Reason.DROP_VLAN: Meaning("2", "it has more than two VLAN headers"),
    Reason.DROP_VLAN_REDIRECT: Meaning("9", "it is DNS inside a VLAN, which the proxy cannot answer"),
    Reason.DROP_MALFORMED: Meaning("2", "it is not whole, or contradicts itself"),
    Reason.DROP_EXTENSIONS: Meaning("2", "its extension headers or options are too many, or end nowhere"),
    Reason.DROP_FRAGMENT: Meaning("6", "it is a fragment whose first one did not pass, or that overlaps it"),
    Reason.DROP_POLICY: Meaning("9", "no rule allows it, and the direction is closed"),
    Reason.DROP_DENY: Meaning("9", "a rule denies it"),
    Reason.DROP_FLOW_ENDED: Meaning("7d", "a policy change ended its flow: what opens a new one is judged anew"),
    Reason.DROP_UNRELATED: Meaning("7c", "it is an ICMP error about no flow there is"),
    Reason.DROP_NO_GATE: Meaning("9", "it is DNS, and the interception device is missing"),
    Reason.DROP_NO_SOCKET: Meaning("9", "it is DNS, and nobody listens for it: no agent, and no holder"),
    Reason.DROP_NOT_ASSIGNED: Meaning("9", "it is DNS, and the kernel did not give it to the proxy's socket"),
    Reason.DROP_NOT_FOR_GATE: Meaning("9", "it reached the interception device, or port 53, and is no DNS of an endpoint"),
    Reason.DROP_CANARY: Meaning("9", "it was the agent's own, sent to see whether packets are dropped"),
    Reason.DROP_SOURCE_ROUTE: Meaning("2", "it says itself by which way it goes"),
    Reason.DROP_MARTIAN: Meaning("5", "one of its ends is an address that is on no wire"),
    Reason.DROP_QUESTION_LIMIT: Meaning("9a", "the endpoint asks more often than it may"),
}


def meaning(reason: Reason) -> Meaning:
    return _MEANINGS[reason]


def reason_of(text: str) -> Reason | None:
    """The reason that is shown as this text."""
    return next((reason for reason in Reason if reason.text == text), None)


def without_a_rule(reason: Reason, direction: Direction) -> str:
    """Of a packet that a rule would have decided about, and none did."""
    if reason is Reason.PASS_POLICY:
        return f"no rule speaks of it, and {direction.name.lower()} is open"
    return meaning(reason).sentence
