"""What the owner of a lease is told, and what it costs when he does not listen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import dns.message
import dns.name
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.attachments import PolicyText, own_policies
from agent.core.rules import Cidr, Fqdn
from agent.core.types import text_of
from agent.dns.wire import WireError, read_question
from agent.facts import LINES_MAX
from agent.leases import KINDS_MAX, REPEAT_AFTER_S, Lease

DENIED: Mapping[str, object] = {"name": "evil.test.", "type": 1, "outcome": "denied", "verdict": "denied"}
DROP: Mapping[str, Any] = {
    "direction": "egress",
    "protocol": "tcp",
    "destination": "198.51.100.7",
    "port": 443,
    "names": [],
    "audited": False,
    "why": "not resolved through the proxy",
    "reason": "policy",
    "rule": "no rule",
}


class Owned:
    """A lease, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended = 0
        self.lease = Lease(7, 70, {"endpoint": 7}, lambda: self.now, self._end)

    async def _end(self, _lease: Lease) -> None:
        self.ended += 1

    async def told(self) -> list[dict[str, Any]]:
        """The facts that wait."""
        lines, facts = self.lease.lines(), list[dict[str, Any]]()
        with contextlib.suppress(TimeoutError):
            while True:
                facts.append((await asyncio.wait_for(anext(lines), 0.01))["fact"])
        return facts

    async def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = (await self.lease.end())["summary"]
        return summary


def question(name: str = "evil.test.", outcome: str = "denied", verdict: str = "denied", **more: object) -> dict[str, object]:
    return {**DENIED, "name": name, "outcome": outcome, "verdict": verdict, **more}


def test_what_is_denied_is_told_once_and_again_later() -> None:
    """A client that asks on and on is one line in ten seconds; what is allowed is told at the end alone."""

    async def story() -> None:
        owned = Owned()
        for _ in range(3):
            owned.lease.take_question(question())
            owned.lease.take_question(question("a.test.", "released", "allowed"))
            owned.lease.take_drop(DROP)
            owned.now += REPEAT_AFTER_S / 3 - 0.1
        told = await owned.told()
        assert [(fact["kind"], fact["allow"]) for fact in told] == [("question", "evil.test"), ("drop", "198.51.100.7:443/tcp")]
        assert told[0]["why"] == "no policy allows this name"
        assert told[1]["why"] == "not resolved through the proxy"
        owned.now += 1
        owned.lease.take_question(question())
        assert [fact["name"] for fact in await owned.told()] == ["evil.test."]
        summary = await owned.summary()
        assert owned.ended == 1
        counts = [(each["name"], each["verdict"], each["count"]) for each in summary["names"]]
        assert counts == [("evil.test.", "denied", 4), ("a.test.", "allowed", 3)]
        assert [(each["destination"], each["count"]) for each in summary["drops"]] == [("198.51.100.7", 3)]
        assert (summary["allow"], summary["unlisted"]) == (["evil.test", "198.51.100.7:443/tcp"], 0)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (question(verdict="audited", outcome="released"), ("audited", "evil.test", "A")),
        (question(verdict="allowed", outcome="failed", why="no upstream answered"), ("failed", None, "A")),
        (question(type=65), ("denied", "evil.test", "HTTPS")),
        (question(type=4711), ("denied", "evil.test", "TYPE4711")),
    ],
)
def test_each_verdict_has_its_words(fields: dict[str, object], wanted: tuple[str, str | None, str]) -> None:
    """A question that failed is no policy's doing: no entry would help."""

    async def story() -> None:
        owned = Owned()
        owned.lease.take_question(fields)
        (fact,) = await owned.told()
        assert (fact["verdict"], fact["allow"], fact["type"]) == wanted
        assert fact["why"]

    asyncio.run(story())


def test_an_address_that_no_name_may_stand_for() -> None:
    """Each has its line and its count; of a neighbour's it is said what lets it through, of a metadata service's it is not."""

    async def story() -> None:
        owned = Owned()
        addresses = {"10.9.9.9": "private", "169.254.169.254": "metadata", "fd00::7": "ULA"}
        for _ in range(2):
            owned.lease.take_guarded({"name": "corp.test.", "addresses": addresses, "audited": False})
        told = await owned.told()
        assert {fact["kind"] for fact in told} == {"guard"}
        assert [(fact["address"], fact["sort"]) for fact in told] == [*addresses.items()]
        assert [fact["allow_addresses"] for fact in told] == ["10.9.9.9/32", None, "fd00::7/128"]
        summary = await owned.summary()
        assert [(each["address"], each["count"]) for each in summary["guarded"]] == [(address, 2) for address in addresses]
        assert (summary["allow"], summary["allow_addresses"]) == ([], ["10.9.9.9/32", "fd00::7/128"])

    asyncio.run(story())


def test_what_was_seen_with_its_port_is_not_allowed_as_a_whole() -> None:
    """Under audit a name is asked and then connected to: the narrower entry does for both."""

    async def story() -> None:
        owned = Owned()
        for name in ("evil.test.", "only-asked.test."):
            owned.lease.take_question(question(name, "released", "audited"))
        why = "no rule for this name: evil.test."
        owned.lease.take_drop({**DROP, "names": ["evil.test."], "why": why, "audited": True})
        summary = await owned.summary()
        assert summary["allow"] == ["only-asked.test", "evil.test:443/tcp"]
        assert [each["why"] for each in summary["drops"]] == ["no rule for this name"]

    asyncio.run(story())


def test_who_stands_still_costs_a_bounded_number_of_lines() -> None:
    """A hundred thousand different things happened meanwhile; what was lost is told, and the end counts all of them."""

    async def story() -> None:
        owned = Owned()
        for number in range(50_000):
            owned.lease.take_question(question(f"n{number}.test."))
            owned.lease.take_drop({**DROP, "destination": f"10.0.{number >> 8}.{number & 255}"})
        assert len(owned.lease._told_at) <= KINDS_MAX
        told = await owned.told()
        assert len(told) == LINES_MAX + 1
        assert told[0] == {"kind": "lost", "count": 100_000 - LINES_MAX}
        owned.lease.take_question(question("last.test."))
        assert [fact["kind"] for fact in await owned.told()] == ["question"]
        summary = await owned.summary()
        assert (len(summary["names"]), len(summary["drops"]), len(summary["allow"])) == (KINDS_MAX, KINDS_MAX, KINDS_MAX)
        counted = sum(each["count"] for each in summary["names"] + summary["drops"])
        assert counted + summary["unlisted"] == 100_001

    asyncio.run(story())


# --- what would allow it ---------------------------------------------------------------------------------------------------


def entry_of_question(name: str) -> str | None:
    """What would be suggested for this name."""
    owned = Owned()
    owned.lease.take_question(question(name))
    return next(iter(owned.lease._allow), None)


ODD_LABELS = st.sampled_from(rb"* ** a* # a,b !x fqdn:a 10 [a] a/tcp a:80 \ a.b".split())


@given(st.lists(ODD_LABELS | st.binary(min_size=1, max_size=5) | st.sampled_from((b"a", b"test", b"_x")), max_size=4))
def test_an_entry_allows_the_name_that_was_asked_and_nothing_else(labels: list[bytes]) -> None:
    """The workload chooses what it asks: `*` must not become a suggestion to allow everything."""
    try:
        name = read_question(dns.message.make_query(dns.name.Name((*labels, b"")), "A").to_wire()).name
    except WireError:
        assume(False)
    entry = entry_of_question(name)
    if entry is None:
        return
    policy = own_policies([PolicyText("--allow", entry)])[-1]
    assert [rule.peers for rule in policy.rules] == [(Fqdn(name),)]
    assert not policy.except_names


def test_usual_names_have_an_entry() -> None:
    """And no others: patterns, addresses, comments, the root, what a list cannot say."""
    for name in ("evil.test.", "_sip._tcp.a.test.", "xn--bcher-kva.example.", "localhost.", "1.a.", "1and1.1x."):
        assert entry_of_question(name) == name.removesuffix(".")
    for name in ("*.", "*.test.", ".", "a#b.test.", "!a.test.", "192.0.2.1.", "a/b.test.", "a\\032b.test.", "a.1."):
        assert entry_of_question(name) is None


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        ({}, "198.51.100.7:443/tcp"),
        ({"protocol": "udp", "port": 53}, "198.51.100.7:53/udp"),
        ({"destination": "2001:db8::7"}, "[2001:db8::7]:443/tcp"),
        ({"destination": "2001:db8::7", "protocol": "icmpv6", "port": 128}, "2001:db8::7/icmp"),
        ({"protocol": "icmp", "port": 8}, "198.51.100.7/icmp"),
        ({"names": ["a.test."]}, "a.test:443/tcp"),
        ({"names": ["*.test."]}, None),
        ({"protocol": "47"}, None),
        ({"rule": "p:3"}, None),
        ({"why": None, "reason": "source"}, None),
    ],
)
def test_an_entry_of_a_drop_is_read_as_what_was_dropped(change: dict[str, Any], entry: str | None) -> None:
    """None where no entry would help: somebody forbade it, or it is no policy's doing."""
    owned = Owned()
    drop = {**DROP, **change}
    owned.lease.take_drop(drop)
    assert list(owned.lease._allow) == ([] if entry is None else [entry])
    if entry is None:
        return
    (rule,) = own_policies([PolicyText("--allow", entry)])[-1].rules
    (peer,) = rule.peers or ()
    if isinstance(peer, Cidr):
        assert (text_of(peer.prefix.address), peer.prefix.is_address) == (drop["destination"], True)
    else:
        assert peer == Fqdn("a.test.")
    if drop["protocol"] in ("tcp", "udp"):
        assert [(ports.first, ports.last) for ports in rule.ports or ()] == [(drop["port"], drop["port"])]


def test_what_a_peer_sent_is_not_the_workloads() -> None:
    """It is no reason to allow anything."""
    owned = Owned()
    owned.lease.take_drop({**DROP, "direction": "ingress"})
    assert not owned.lease._drops
