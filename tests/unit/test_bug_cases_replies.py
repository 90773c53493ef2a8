"""What replies teach and what leaves: bug cases about aliases, foreign records, broken messages, sizes and record types.

Shown elsewhere, and not written twice:

    case 21, `cname: follow`      tests/sim/test_gate.py
    case 35                       tests/unit/test_wire_fuzz.py (octets), tests/netns/test_bug_cases_dns.py (packets)
    case 96, at the sockets       tests/unit/test_upstreams.py, tests/unit/test_sockets.py
    case 163, forms of addresses  tests/unit/test_guard.py
"""

from __future__ import annotations

import random
import struct

import dns.flags
import pytest

from agent.core.events import Reply
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_TCP, packed
from tests.bug_scene import Scene, extended_error_of, is_denied

A_TEST = "a.test:443/tcp"


# --- chains --------------------------------------------------------------------------------------------------------------


def test_case_021_the_target_of_an_allowed_alias_is_judged_on_its_own() -> None:
    """The chain is followed for the name asked; the CDN's own name is not thereby allowed, at no time."""
    scene = Scene("www.a.test:443/tcp")
    answer = scene.resolve("www.a.test", "www.a.test 120 CNAME edge.cdn.test.", "edge.cdn.test 120 A 198.51.100.30")
    assert answer.addresses == ["198.51.100.30"]
    assert scene.passes("198.51.100.30")
    for t in (10, 600):
        scene.at(t)
        assert is_denied(scene, scene.ask("edge.cdn.test"))


def test_case_023_addresses_behind_an_alias_are_credited_to_the_name_asked() -> None:
    """The owner of the address record is another name; the chain from the question leads to it."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 60 CNAME b.other.test.", "b.other.test 60 A 198.51.100.32")
    assert scene.passes("198.51.100.32")
    assert scene.learned == {"a.test.": {"198.51.100.32"}}


@pytest.mark.parametrize("chain", [("a.test 60 A",), ("a.test 60 CNAME b.test.", "b.test 60 A")], ids=["direct", "alias"])
def test_case_025_unrelated_records_in_the_answer_are_not_learned(chain: tuple[str, ...]) -> None:
    """An address of a name that no chain from the question reaches."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", *chain[:-1], f"{chain[-1]} 198.51.100.33", "evil.test 60 A 203.0.113.66")
    assert scene.passes("198.51.100.33")
    assert not scene.passes("203.0.113.66")
    assert scene.learned == {"a.test.": {"198.51.100.33"}}


def test_case_026_only_the_answer_section_teaches() -> None:
    """Glue may be anything, of the name asked too."""
    scene = Scene(A_TEST)
    asker = scene.ask("a.test")
    extra = ("evil.test 60 A 203.0.113.67", "a.test 60 A 203.0.113.68")
    scene.reply(asker, "a.test 60 A 198.51.100.36", authority=("a.test 60 NS ns.evil.test.",), additional=extra)
    assert scene.passes("198.51.100.36")
    assert not scene.passes("203.0.113.67")
    assert not scene.passes("203.0.113.68")
    assert scene.learned == {"a.test.": {"198.51.100.36"}}


def test_case_028_an_alias_without_an_address_leaves_no_permission() -> None:
    """The reply passes as it is; its target stays a name that nobody allowed."""
    scene = Scene(A_TEST)
    answer = scene.resolve("a.test", "a.test 60 CNAME b.test.")
    assert answer.rcode == "NOERROR"
    assert [str(rrset.name) for rrset in answer.message.answer] == ["a.test."]
    assert scene.learned == {}
    assert is_denied(scene, scene.ask("b.test"))
    assert not scene.passes("198.51.100.35")


def test_case_030_a_drop_is_explained_by_the_name_asked_and_its_chain() -> None:
    """What a person knows is the name the application asked for, not the last alias."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 60 CNAME b.other.test.", "b.other.test 60 A 198.51.100.38")
    assert not scene.passes("198.51.100.38", 22)
    (seen,) = scene.world.engine.proxy.history.on(packed("198.51.100.38"), scene.world.now)
    assert (seen.name, seen.chain) == ("a.test.", ("a.test.", "b.other.test."))
    assert scene.passes("198.51.100.38")


def test_case_036_addresses_of_other_names_alone_teach_nothing() -> None:
    """No record of the name asked, three of others."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "x.test 60 A 203.0.113.71", "y.test 60 A 203.0.113.72", "z.test 60 A 203.0.113.73")
    assert not any(scene.passes(f"203.0.113.{last}") for last in (71, 72, 73))
    assert scene.learned == {}
    scene.resolve("a.test", "198.51.100.36")
    assert scene.passes("198.51.100.36")


def test_case_039_two_names_on_one_address() -> None:
    """One is taken out of the policy: the address stays open for the other's sake."""
    scene = Scene("a.test:443/tcp\nb.test:443/tcp")
    scene.resolve("a.test", "198.51.100.41")
    scene.resolve("b.test", "198.51.100.41")
    assert scene.passes("198.51.100.41")
    scene.apply("b.test:443/tcp")
    assert scene.passes("198.51.100.41")
    scene.apply("c.test:443/tcp")
    assert not scene.passes("198.51.100.41")


# --- broken and legal forms ----------------------------------------------------------------------------------------------


def test_case_032_a_pointer_to_itself() -> None:
    """In a question: an error or silence, counted. In an answer: SERVFAIL and nothing learned. The next one is answered."""
    scene = Scene(A_TEST)
    header = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0)
    scene.send(header + b"\xc0\x0c\x00\x01\x00\x01", 1_000)
    counted = [what for what in scene.world.engine.proxy.counters if what.startswith("questions ") and "denied" not in what]
    assert len(counted) == 1
    assert [answer.rcode for answer in scene.world.answers_of(1_000)] in ([], ["FORMERR"])
    asker = scene.ask("a.test", edns=None)
    query = scene.query_of(asker).to_wire()
    # The name at offset 12 is a pointer to offset 12.
    section = b"\xc0\x0c" + query[12 + len(b"\x01a\x04test\x00") :]
    record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + packed("198.51.100.32")
    number = scene.world.transaction_of(asker)
    assert number is not None
    scene.world.handle(Reply(number, query[:2] + struct.pack("!5H", 0x8180, 1, 1, 0, 0) + section + record))
    scene.at(4)
    assert scene.answer_of(asker).rcode == "SERVFAIL"
    assert scene.learned == {}
    assert scene.resolve("a.test", "198.51.100.32").addresses == ["198.51.100.32"]


def test_case_032_an_owner_that_points_to_itself() -> None:
    """The question is good and the answer's owner name is not: never passed on as good."""
    scene = Scene(A_TEST)
    asker = scene.ask("a.test", edns=None)
    query = scene.query_of(asker).to_wire()
    owner = struct.pack("!H", 0xC000 | len(query))
    record = owner + struct.pack("!HHIH", 1, 1, 60, 4) + packed("198.51.100.32")
    answer = scene.reply(asker, octets=query[:2] + struct.pack("!5H", 0x8180, 1, 1, 0, 0) + query[12:] + record)
    assert (answer.rcode, answer.addresses, scene.learned) == ("SERVFAIL", [], {})
    assert scene.resolve("a.test", "198.51.100.32").addresses == ["198.51.100.32"]


def test_case_033_a_pointer_to_a_pointer() -> None:
    """Legal compression; the name is the one it leads to, never the root, whoever else allows every name."""
    scene = Scene({1: A_TEST, 2: "*:443/tcp"})
    asker = scene.ask("a.test", edns=None)
    query = scene.query_of(asker).to_wire()
    fixed = struct.Struct("!HHIH")
    text = b"\xc0\x0c" + fixed.pack(16, 1, 60, 2) + b"\x01x"  # its owner is a pointer to the question
    owner = struct.pack("!H", 0xC000 | len(query))  # a pointer to that pointer
    alias = owner + fixed.pack(5, 1, 60, 4) + b"\x01b\xc0\x0e"  # b, then `test.` of the question
    target = struct.pack("!H", 0xC000 | len(query) + len(text) + 12)
    address = target + fixed.pack(1, 1, 60, 4) + packed("198.51.100.133")
    message = query[:2] + struct.pack("!5H", 0x8180, 1, 3, 0, 0) + query[12:] + text + alias + address
    assert scene.reply(asker, octets=message).rcode == "NOERROR"
    assert scene.learned == {"a.test.": {"198.51.100.133"}}
    assert scene.passes("198.51.100.133")


# --- sizes and ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edns_of_upstream", [True, False], ids=["case_088", "case_089"])
def test_case_088_089_a_reply_longer_than_the_client_takes(edns_of_upstream: bool) -> None:
    """UDP without EDNS: empty, TC, at most 512 octets, whatever the upstream kept to. TCP: complete, and all of it open."""
    scene = Scene(A_TEST)
    records = [f"a.test 60 A 198.18.6.{last}" for last in range(1, 41)]
    answer = scene.reply(scene.ask("a.test", edns=None), *records)
    assert answer.addresses == []
    assert answer.message.flags & dns.flags.TC
    assert len(answer.message.to_wire()) <= 512
    answer = scene.reply(scene.ask("a.test", edns=1232 if edns_of_upstream else None, protocol=PROTOCOL_TCP), *records)
    assert len(answer.addresses) == 40
    assert all(scene.passes(address) for address in answer.addresses)


def test_case_091_a_long_reply_is_looked_at_to_its_end() -> None:
    """The only address is the last record of 1,400 octets."""
    scene = Scene(A_TEST)
    filling = [f'a.test 60 TXT "{place:0200d}"' for place in range(6)]
    answer = scene.reply(scene.ask("a.test", "ANY", edns=4096), *filling, "a.test 60 A 198.51.100.92")
    assert len(answer.message.to_wire()) > 1_250
    assert answer.addresses == ["198.51.100.92"]
    assert scene.passes("198.51.100.92")


def test_case_096_each_reply_has_the_id_of_its_query() -> None:
    """Repeated and new names, random ids, many in flight at once."""
    scene, chance = Scene("*.a.test:443/tcp"), random.Random(96)
    open_ones: list[tuple[int, int]] = []
    for _ in range(300):
        number = chance.randrange(1 << 16)
        open_ones.append((scene.ask(f"n{chance.randrange(40)}.a.test", number=number), number))
        if len(open_ones) > chance.randrange(20):
            asker, number = open_ones.pop(chance.randrange(len(open_ones)))
            name = str(scene.query_of(asker).question[0].name)
            answer = scene.reply(asker, f"{name} 60 A 198.51.100.{number % 200}")
            assert answer.message.id == number


# --- record types ------------------------------------------------------------------------------------------------------------


def test_case_107_address_hints_of_an_https_record_are_learned() -> None:
    """A client may connect to the hint without ever asking for an address."""
    scene = Scene(A_TEST)
    answer = scene.resolve("a.test", "a.test 60 HTTPS 1 . ipv4hint=198.51.100.107", qtype="HTTPS")
    assert answer.rcode == "NOERROR"
    assert scene.passes("198.51.100.107")
    assert scene.learned == {"a.test.": {"198.51.100.107"}}


def test_case_109_a_service_name_is_a_name_of_its_own() -> None:
    """Not covered by the host's line: refused at once, and the client falls back. With a line of its own: answered."""
    scene = Scene("deb.test:443/tcp")
    assert is_denied(scene, scene.ask("_http._tcp.deb.test", "SRV"))
    scene.resolve("deb.test", "198.51.100.109")
    assert scene.passes("198.51.100.109")
    scene = Scene("deb.test:443/tcp\n_http._tcp.deb.test")
    answer = scene.resolve("_http._tcp.deb.test", "_http._tcp.deb.test 60 SRV 0 0 443 deb.test.", qtype="SRV")
    assert len(answer.message.answer) == 1
    assert scene.learned == {}
    assert not scene.passes("198.51.100.109")
    scene.resolve("deb.test", "198.51.100.109")
    assert scene.passes("198.51.100.109")


def test_case_111_types_nobody_knows() -> None:
    """An allowed name is forwarded whatever is asked of it; a zone transfer is not; what ANY brings is open when it leaves."""
    scene = Scene(A_TEST)
    answer = scene.resolve("a.test", r"a.test 60 TYPE65280 \# 3 010203", qtype="TYPE65280")
    assert (answer.rcode, len(answer.message.answer)) == ("NOERROR", 1)
    answer = scene.resolve("a.test", "198.51.100.111", 'a.test 60 TXT "x"', qtype="ANY")
    assert len(answer.message.answer) == 2
    assert scene.passes("198.51.100.111")
    asker = scene.ask("a.test", "AXFR")
    answer = scene.answer_of(asker)
    assert (answer.rcode, extended_error_of(answer)) == ("REFUSED", 21)
    assert not scene.is_asked(asker)


# --- guarded addresses -------------------------------------------------------------------------------------------------------


def test_case_104_a_mapped_private_address() -> None:
    """`::ffff:10.0.0.5` is 10.0.0.5: taken out, nothing learned, closed in both forms."""
    scene = Scene(A_TEST)
    answer = scene.resolve("a.test", "a.test 60 AAAA ::ffff:10.0.0.5", qtype="AAAA")
    assert (answer.rcode, answer.addresses) == ("NOERROR", [])
    assert extended_error_of(answer) is not None
    assert scene.learned == {}
    assert not scene.packet("10.0.0.5", 443).passes
    assert not scene.packet("::ffff:10.0.0.5", 443).passes
    scene.resolve("a.test", "2001:db8::104", qtype="AAAA")
    assert scene.passes("2001:db8::104")


def test_case_162_an_allowed_name_that_points_at_the_metadata_service() -> None:
    """The public address is released alone, and only it is open."""
    scene = Scene("a.test:80/tcp")
    answer = scene.resolve("a.test", "169.254.169.254", "198.51.100.110")
    assert answer.addresses == ["198.51.100.110"]
    assert extended_error_of(answer) is not None
    assert scene.learned == {"a.test.": {"198.51.100.110"}}
    assert not scene.passes("169.254.169.254", 80)
    assert scene.passes("198.51.100.110", 80)


ON_PRIVATE = """\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: internal, annotations: {namegate/allow-addresses: "10.0.0.0/8"}}
spec:
  endpointSelector: {}
  egress:
    - toFQDNs: [{matchName: repo.internal.test}]
      toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"""


def test_case_163_a_rightful_name_on_private_addresses() -> None:
    """With the annotation its network is open for the name, on the rule's port; without it nothing is."""
    scene = Scene(ON_PRIVATE)
    answer = scene.resolve("repo.internal.test", "10.1.2.3", "192.168.7.7")
    assert answer.addresses == ["10.1.2.3"]
    assert scene.passes("10.1.2.3")
    assert not scene.passes("10.1.2.3", 22)
    assert not scene.passes("192.168.7.7")
    scene = Scene(ON_PRIVATE.replace(', annotations: {namegate/allow-addresses: "10.0.0.0/8"}', ""))
    answer = scene.resolve("repo.internal.test", "10.1.2.3", "192.168.7.7")
    assert (answer.rcode, answer.addresses) == ("NOERROR", [])
    assert extended_error_of(answer) is not None
    assert not any(scene.passes(address) for address in ("10.1.2.3", "192.168.7.7"))


def test_the_scene_can_say_yes_and_no() -> None:
    """The judge of packets is not blind: the same address before and after its lookup."""
    scene = Scene(A_TEST, Settings(upstreams=()))
    assert not scene.passes("198.51.100.1")
    scene.resolve("a.test", "198.51.100.1")
    assert scene.passes("198.51.100.1")
