"""The shorthand: what an entry becomes, and what is said about the ones that are refused."""

from __future__ import annotations

import pytest

from agent.core.rules import Cidr, Fqdn, Peer, Ports
from agent.core.types import PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Direction, Prefix
from agent.documents.remarks import Remarks
from agent.policy.files import Reading, read_policy_text
from agent.policy.shorthand import read_entries

EVERY_PROTOCOL = (PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP)


def read(text: str) -> Reading:
    return read_policy_text("allow.txt", text.encode())


def cidr(text: str) -> Cidr:
    return Cidr(Prefix.parse(text))


@pytest.mark.parametrize(
    ("entry", "peer", "ports"),
    [
        ("a.test", Fqdn("a.test."), None),
        ("A.Test.", Fqdn("a.test."), None),
        ("a.test/any", Fqdn("a.test."), None),
        ("a.test:443", Fqdn("a.test."), [(p, 443, 443) for p in EVERY_PROTOCOL]),
        ("a.test:443/any", Fqdn("a.test."), [(p, 443, 443) for p in EVERY_PROTOCOL]),
        ("a.test:443/tcp", Fqdn("a.test."), [(PROTOCOL_TCP, 443, 443)]),
        ("a.test:8000-8080/UDP", Fqdn("a.test."), [(PROTOCOL_UDP, 8000, 8080)]),
        ("a.test/sctp", Fqdn("a.test."), [(PROTOCOL_SCTP, 0, 65535)]),
        ("**.a.test:443/tcp", Fqdn("**.a.test."), [(PROTOCOL_TCP, 443, 443)]),
        ("fqdn:a.test:443/tcp", Fqdn("a.test."), [(PROTOCOL_TCP, 443, 443)]),
        ("svc", Fqdn("svc."), None),
        ("reddit_webonly.app.test", Fqdn("reddit_webonly.app.test."), None),
        ("bücher.example:443/tcp", Fqdn("xn--bcher-kva.example."), [(PROTOCOL_TCP, 443, 443)]),
        ("192.0.2.7", cidr("192.0.2.7/32"), None),
        ("192.0.2.7:53/udp", cidr("192.0.2.7/32"), [(PROTOCOL_UDP, 53, 53)]),
        ("192.0.2.0/24", cidr("192.0.2.0/24"), None),
        ("192.0.2.0/24/icmp", cidr("192.0.2.0/24"), [(PROTOCOL_ICMP, 0, 65535), (PROTOCOL_ICMPV6, 0, 65535)]),
        ("192.0.2.0/24:1-9/tcp", cidr("192.0.2.0/24"), [(PROTOCOL_TCP, 1, 9)]),
        ("cidr:192.0.2.0/24:443/tcp", cidr("192.0.2.0/24"), [(PROTOCOL_TCP, 443, 443)]),
        ("2001:db8::7", cidr("2001:db8::7/128"), None),
        ("2001:db8::/32/tcp", cidr("2001:db8::/32"), [(PROTOCOL_TCP, 0, 65535)]),
        ("[2001:db8::7]:443/tcp", cidr("2001:db8::7/128"), [(PROTOCOL_TCP, 443, 443)]),
        ("[2001:db8::]/32:443/tcp", cidr("2001:db8::/32"), [(PROTOCOL_TCP, 443, 443)]),
        ("[2001:db8::/32]:443/tcp", cidr("2001:db8::/32"), [(PROTOCOL_TCP, 443, 443)]),
        ("[2001:db8::7]", cidr("2001:db8::7/128"), None),
        ("::ffff:c000:207", cidr("192.0.2.7/32"), None),
    ],
)
def test_an_entry(entry: str, peer: Peer, ports: list[tuple[int, int, int]] | None) -> None:
    """target[:port[-port]][/protocol]"""
    reading = read(f"# why\n\n  {entry}  # because\n")
    assert not reading.mistakes
    ((rule,),) = (policy.rules for policy in reading.policies)
    assert rule.peers == (peer,)
    assert rule.ports == (None if ports is None else tuple(Ports(*numbers) for numbers in ports))
    assert (rule.direction, rule.deny, str(rule.origin)) == (Direction.EGRESS, False, "allow.txt:3")


def test_a_list_is_one_policy_that_closes_egress_of_every_endpoint() -> None:
    """A denial of a network is a rule, a name behind `!` is taken out of the patterns."""
    (policy,) = read("*.a.test:443/tcp\n!10.0.0.0/8\n!192.0.2.0/24:25/tcp\n!*.Ads.a.test\n").policies
    assert policy.selects({})
    assert (policy.name, policy.default_deny_egress, policy.default_deny_ingress) == ("allow.txt", True, False)
    assert [rule.deny for rule in policy.rules] == [False, True, True]
    assert policy.rules[2].ports == (Ports(PROTOCOL_TCP, 25, 25),)
    assert policy.except_names == ("*.ads.a.test.",)


def test_no_entry_allows_nothing() -> None:
    """`run` without any entry."""
    policy = read_entries([], Remarks("--allow"), "run")
    assert (policy.rules, policy.default_deny_egress) == ((), True)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("fqdn:192.0.2.7", "cidr:192.0.2.7/32"),
        ("fqdn:2001:db8::7", "cidr:2001:db8::7/128"),
        ("192.0.2.300", "is no network"),
        ("1.2.3", "is no network"),
        ("10.0.0.0/33", "is no network"),
        ("cidr:a.test", "is no network"),
        ("https://a.test/", "is a URL"),
        ("a.test:https", "is no port"),
        ("a.test:80,443", "an entry for each, or a range"),
        ("a.test:", "is no port"),
        ("a.test:0443", "leading zeros"),
        ("a.test:70000", "is no port"),
        ("a.test:0", "no port 0"),
        ("a.test:9-1", "write 1-9"),
        ("a.test:443/gre", "tcp, udp"),
        ("a.test/path", "tcp, udp"),
        ("a.test/", "tcp, udp"),
        ("a.test:8/icmp", "icmp has no ports"),
        ("!a.test:443", "write !a.test"),
        ("[2001:db8::7:443", "closing bracket"),
        ("[2001:db8::7]443", "behind the bracket"),
        ("a.test b.test", "one entry a line"),
        (":443", "no target"),
        ("!", "no target"),
        ("x" * 2000, "one entry a line"),
    ],
)
def test_what_is_refused_comes_with_the_remedy(entry: str, words: str) -> None:
    """And with the line; the good lines around it do not save the file."""
    reading = read(f"b.test\n{entry}\n")
    assert reading.policies == ()
    (mistake,) = reading.mistakes
    assert (mistake.file, mistake.line) == ("allow.txt", 2)
    assert words in mistake.message
