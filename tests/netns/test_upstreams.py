"""Real upstreams behind the agent: nsd, unbound with a signed zone, dnsmasq; one that is dead, comes back, and answers late.

The upstream that lies is bug case 167, the one that is slow case 179 (test_bug_cases_dns.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from tests.netns.asking import ask, connect, exchange, finish, start_asking
from tests.netns.lab import NAME_SERVERS, Lab
from tests.netns.resolvers import Told, signed_zone, start_dnsmasq, start_unbound
from tests.netns.running import RunningAgent
from tests.netns.sending import seen

pytestmark = pytest.mark.root

NSD, UNBOUND, DNSMASQ, FIRST = "198.51.100.71", "198.51.100.72", "198.51.100.73", "198.51.100.74"
POLICY = "**.test:443/tcp\nsigned.test:443/tcp\nbogus.test:443/tcp\n"
MANY = [f"198.18.6.{host}" for host in range(1, 41)]
RECORDS = {
    "a.test.": ["A 198.51.100.11", "AAAA 2001:db8:53::11"],
    "many.test.": [f"A {address}" for address in MANY],
    "alias.test.": ["CNAME b.elsewhere.test."],
    "b.elsewhere.test.": ["A 198.51.100.14"],
    "first.test.": ["A 198.51.100.15"],
}
IN_SIGNED_ZONE = ["www A 198.51.100.21", "www AAAA 2001:db8:53::21", "alias CNAME www", "www TYPE65280 \\# 4 01020304"]


@dataclass(frozen=True, slots=True)
class Internet:
    """lab: with all the upstreams. anchors: of delv, for the signed zone."""

    lab: Lab
    anchors: Path


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Lab(records=RECORDS, ports=(443,)) as lab:
        signed, key = signed_zone(lab.directory / "keys", "signed.test.", IN_SIGNED_ZONE)
        bogus, bogus_key = signed_zone(lab.directory / "keys", "bogus.test.", ["udp A 198.51.100.22", "tcp A 198.51.100.24"])
        altered = bogus.read_text().replace("198.51.100.22", "198.51.100.23").replace("198.51.100.24", "198.51.100.25")
        bogus.write_text(altered)
        lab.start_nsd([NSD], {"signed.test": signed, "bogus.test": bogus, ".": lab.directory / "root.zone"})
        stubs = {"signed.test": NSD, "bogus.test": NSD}
        start_unbound(lab, UNBOUND, {"signed.test.": key, "bogus.test.": bogus_key}, stubs)
        start_dnsmasq(lab, DNSMASQ)
        anchors = lab.directory / "anchors"
        flags, protocol, algorithm, *octets = key.split()[1:]
        anchor = f'signed.test. static-key {flags} {protocol} {algorithm} "{"".join(octets)}";'
        anchors.write_text(f"trust-anchors {{ {anchor} }};\n")
        yield Internet(lab, anchors)


# --- real ones -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def any_agent(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """It asks whoever is asked, and so need not be started for each upstream."""
    directory = tmp_path_factory.mktemp("real") / "agent"
    with RunningAgent(internet.lab, POLICY, directory, dns={"upstreams": "asked"}) as agent:
        yield agent


@pytest.mark.usefixtures("any_agent")
class TestRealUpstreams:
    """By way of one agent."""

    @pytest.mark.parametrize("server", [NSD, NAME_SERVERS[1], UNBOUND, DNSMASQ], ids=["nsd", "nsd-v6", "unbound", "dnsmasq"])
    def test_what_it_says_is_what_the_client_hears(self, internet: Internet, any_agent: RunningAgent, server: str) -> None:
        """Addresses, an alias, no such name or type, an answer too long for UDP: by both transports, and it is open."""
        lab = internet.lab
        for transport in ("+notcp", "+tcp"):
            assert ask(lab, "a.test", "A", transport, server=server).addresses == ("198.51.100.11",)
            assert ask(lab, "a.test", "AAAA", transport, server=server).addresses == ("2001:db8:53::11",)
            assert ask(lab, "alias.test", "A", transport, server=server).addresses == ("198.51.100.14",)
            assert ask(lab, "gone.test", "A", transport, server=server).status == "NXDOMAIN"
            answer = ask(lab, "first.test", "AAAA", transport, server=server)
            assert (answer.status, answer.addresses, answer.error) == ("NOERROR", (), "")
        assert {connect(lab, address) for address in ("198.51.100.11", "2001:db8:53::11", "198.51.100.14")} == {"connected"}
        cut = ask(lab, "many.test", "A", "+notcp", "+noedns", "+ignore", server=server)
        assert (cut.status, cut.addresses) == ("NOERROR", ())
        assert sorted(ask(lab, "many.test", "A", "+notcp", "+noedns", server=server).addresses) == sorted(MANY)
        assert {connect(lab, address) for address in (MANY[0], MANY[-1])} == {"connected"}
        assert connect(lab, "198.51.100.15") == "connection refused"
        assert ask(lab, "a.elsewhere.example", server=server).error.startswith("15 (Blocked)")
        assert any_agent.status()["counters"].keys().isdisjoint({"replies failed", "failed", "late", "mismatched"})

    @pytest.mark.parametrize("transport", ["udp", "tcp"])
    def test_messages_pass_byte_for_byte(self, internet: Internet, transport: str) -> None:
        """But for the id on the way up: DO, AD, CD, cookies, ECS, unknown options and types, spelling, signatures."""
        lab, asked = internet.lab, messages()
        with lab.capture(lab.host, lab.uplink, f"dst {NSD}", name=f"bytes-{transport}") as far:
            through = exchange(lab, asked, transport=transport, server=NSD)
        direct = exchange(lab, asked, transport=transport, server=NSD, namespace=lab.host)
        assert len(through) == len(asked)
        assert by_id(through) == by_id(direct)
        assert by_id(through).keys() == by_id(asked).keys()
        sent = [packet.payload[2 if transport == "tcp" else 0 :] for packet in seen(far) if packet.payload]
        assert sorted(message[2:] for message in sent) == sorted(message[2:] for message in asked)
        first = dns.message.from_wire(by_id(through)[asked[0][:2]])
        assert [rrset.rdtype for rrset in first.answer] == [dns.rdatatype.A, dns.rdatatype.RRSIG]

    @pytest.mark.parametrize("transport", ["udp", "tcp"])
    def test_what_a_resolver_says_about_signatures_passes(self, internet: Internet, transport: str) -> None:
        """AD where it has validated and was asked to say so; SERVFAIL for a wrong signature, and its records with CD."""
        lab = internet.lab
        assert said_by_unbound(lab, transport, "www.signed.test", dns.flags.AD) == ("NOERROR", True, 2)
        assert said_by_unbound(lab, transport, "www.signed.test", 0) == ("NOERROR", True, 2)
        assert said_by_unbound(lab, transport, "a.test", dns.flags.AD) == ("NOERROR", False, 1)
        name, address = f"{transport}.bogus.test", {"udp": "198.51.100.23", "tcp": "198.51.100.25"}[transport]
        assert said_by_unbound(lab, transport, name, 0) == ("SERVFAIL", False, 0)
        assert connect(lab, address) == "connection refused"
        assert said_by_unbound(lab, transport, name, dns.flags.CD) == ("NOERROR", False, 2)
        assert connect(lab, address) == "connected"

    @pytest.mark.parametrize("server", [NSD, UNBOUND], ids=["nsd", "unbound"])
    def test_a_client_that_validates_is_content(self, internet: Internet, server: str) -> None:
        """delv asks for the keys and checks the signatures itself."""
        lab = internet.lab
        delv = ("delv", f"@{server}", "-a", internet.anchors, "+root=signed.test")
        said = lab.run(lab.client.namespace, *delv, "www.signed.test", "A").stdout
        assert "; fully validated" in said
        assert "198.51.100.21" in said
        assert "negative response, fully validated" in lab.run(lab.client.namespace, *delv, "www.signed.test", "MX").stdout
        assert connect(lab, "198.51.100.21") == "connected"


def messages() -> list[bytes]:
    """Questions with everything that a proxy could be tempted to touch."""
    cookie = dns.edns.GenericOption(dns.edns.OptionType.COOKIE, bytes(range(8)))
    subnet = dns.edns.ECSOption("192.0.2.0", 24)
    unknown = dns.edns.GenericOption(dns.edns.OptionType.make(65_001), b"anything")
    asked = [
        dns.message.make_query("www.signed.test", "A", want_dnssec=True),
        dns.message.make_query("www.signed.test", "AAAA", want_dnssec=True, payload=4096, options=[cookie, subnet, unknown]),
        dns.message.make_query("alias.signed.test", "A", want_dnssec=True),
        dns.message.make_query("nobody.signed.test", "A", want_dnssec=True),
        dns.message.make_query("www.signed.test", "MX", want_dnssec=True),
        dns.message.make_query("signed.test", "DNSKEY", want_dnssec=True),
        dns.message.make_query("WwW.SiGnEd.TeSt", "TYPE65280", want_dnssec=True),
        dns.message.make_query("www.signed.test", "ANY"),
        dns.message.make_query("www.signed.test", "A", use_edns=-1),
    ]
    for number, message in enumerate(asked):
        message.id = 0x1000 + number
    asked[1].flags |= dns.flags.CD
    asked[2].flags |= dns.flags.AD
    return [message.to_wire() for message in asked]


def by_id(messages: list[bytes]) -> dict[bytes, bytes]:
    return {message[:2]: message for message in messages}


def said_by_unbound(lab: Lab, transport: str, name: str, flags: int) -> tuple[str, bool, int]:
    """The result code, whether AD is set, how many sets of records; the same as the resolver says to the host itself."""
    query = dns.message.make_query(name, "A", want_dnssec=True)
    query.flags |= flags
    (reply,) = exchange(lab, [query.to_wire()], transport=transport, server=UNBOUND)
    (direct,) = exchange(lab, [query.to_wire()], transport=transport, server=UNBOUND, namespace=lab.host)
    message, same = dns.message.from_wire(reply), dns.message.from_wire(direct)
    assert message == same
    assert message.flags == same.flags
    return dns.rcode.to_text(message.rcode()), bool(message.flags & dns.flags.AD), len(message.answer)


# --- health ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dropping_everything(lab: Lab, *servers: str) -> Iterator[None]:
    """Whatever comes to these servers is lost without a word."""
    chain = "type filter hook input priority 0;"
    rules = f"table inet silence {{ chain input {{ {chain} ip daddr {{ {', '.join(servers)} }} drop; }}; }}"
    lab.run(lab.internet, "nft", rules)
    try:
        yield
    finally:
        lab.run(lab.internet, "nft", "delete table inet silence")


@pytest.fixture(scope="class")
def agent_of_two(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    Told(internet.lab, FIRST, {"first.test.": {"records": ["A 198.51.100.16"]}})
    dns = {"upstreams": [FIRST, NSD]}
    with RunningAgent(internet.lab, POLICY, tmp_path_factory.mktemp("dead") / "agent", dns=dns) as agent:
        yield agent


class TestDeadUpstreams:
    """Two that answer first.test differently. By both transports."""

    first, second = ("198.51.100.16",), ("198.51.100.15",)

    def test_it_costs_the_first_questions_alone(self, internet: Internet, agent_of_two: RunningAgent) -> None:
        """The other one is asked first while it rests; when it is back, a client's question finds that out."""
        lab = internet.lab
        self.await_first(lab)
        with dropping_everything(lab, FIRST):
            answers = [
                finish(each) for each in [start_asking(lab, "first.test", "A", f"+{how}tcp") for how in ("no", "no", "")]
            ]
            assert [answer.addresses for answer in answers] == [self.second] * 3
            assert all(1_400 <= answer.took_ms <= 2_500 for answer in answers), answers
            status = agent_of_two.status()
            assert (status["upstreams_silent"], status["state"]) == ([FIRST], "enforcing")
            answers = [ask(lab, "first.test", "A", f"+{how}tcp") for how in ("no", "") * 6]
            assert [answer.addresses for answer in answers] == [self.second] * 12
            assert statistics.median(answer.took_ms for answer in answers) < 100
        self.await_first(lab)
        assert [ask(lab, "first.test").addresses for _ in range(5)] == [self.first] * 5
        assert agent_of_two.status()["upstreams_silent"] == []

    def await_first(self, lab: Lab) -> None:
        """Ask until it answers; the question that looks for it waits no longer than the others."""
        deadline = time.monotonic() + 30
        while (answer := ask(lab, "first.test")).addresses != self.first:
            assert answer.addresses == self.second
            assert time.monotonic() < deadline

    def test_with_all_of_them_dead_the_client_hears_it_in_time(self, internet: Internet, agent_of_two: RunningAgent) -> None:
        """SERVFAIL within 4 s; a denied name waits for nobody. Once they are back, all is well at once."""
        lab = internet.lab
        with dropping_everything(lab, FIRST, NSD):
            asking = [start_asking(lab, f"n{n}.test", "A", f"+{'no' * (n % 2)}tcp") for n in range(6)]
            assert ask(lab, "a.elsewhere.example").took_ms < 500
            answers = [finish(each) for each in asking]
            assert {(answer.status, answer.error[:2]) for answer in answers} == {("SERVFAIL", "23")}
            assert all(2_900 <= answer.took_ms < 4_000 for answer in answers), answers
            assert sorted(agent_of_two.status()["upstreams_silent"]) == [NSD, FIRST]
        assert ask(lab, "www.signed.test").addresses == ("198.51.100.21",)
