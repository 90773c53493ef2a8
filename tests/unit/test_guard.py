"""The address guard: every range at both its edges, every form with an address inside, and Python's own tables as the judge."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.core.guard import AddressGuard, Kind
from agent.core.types import Address, Prefix, packed, text_of

GUARD = AddressGuard()

# First and last address of each range, and what stands just outside: None is an ordinary address.
EDGES = [
    ("0.0.0.0", Kind.UNSPECIFIED),
    ("0.0.0.1", Kind.THIS_NETWORK),
    ("0.255.255.255", Kind.THIS_NETWORK),
    ("1.0.0.0", None),
    ("9.255.255.255", None),
    ("10.0.0.0", Kind.PRIVATE),
    ("10.255.255.255", Kind.PRIVATE),
    ("11.0.0.0", None),
    ("100.63.255.255", None),
    ("100.64.0.0", Kind.CGNAT),
    ("100.100.100.199", Kind.CGNAT),
    ("100.100.100.200", Kind.METADATA),
    ("100.100.100.201", Kind.CGNAT),
    ("100.127.255.255", Kind.CGNAT),
    ("100.128.0.0", None),
    ("126.255.255.255", None),
    ("127.0.0.0", Kind.LOOPBACK),
    ("127.255.255.255", Kind.LOOPBACK),
    ("128.0.0.0", None),
    ("168.63.129.15", None),
    ("168.63.129.16", Kind.METADATA),
    ("168.63.129.17", None),
    ("169.253.255.255", None),
    ("169.254.0.0", Kind.LINK_LOCAL),
    ("169.254.169.253", Kind.LINK_LOCAL),
    ("169.254.169.254", Kind.METADATA),
    ("169.254.169.255", Kind.LINK_LOCAL),
    ("169.254.255.255", Kind.LINK_LOCAL),
    ("169.255.0.0", None),
    ("172.15.255.255", None),
    ("172.16.0.0", Kind.PRIVATE),
    ("172.31.255.255", Kind.PRIVATE),
    ("172.32.0.0", None),
    ("192.0.0.0", None),
    ("192.0.0.170", None),
    ("192.0.0.191", None),
    ("192.0.0.192", Kind.METADATA),
    ("192.0.0.193", None),
    ("192.88.99.1", None),
    ("192.167.255.255", None),
    ("192.168.0.0", Kind.PRIVATE),
    ("192.168.255.255", Kind.PRIVATE),
    ("192.169.0.0", None),
    ("223.255.255.255", None),
    ("224.0.0.0", Kind.MULTICAST),
    ("239.255.255.255", Kind.MULTICAST),
    ("240.0.0.0", Kind.RESERVED),
    ("255.255.255.254", Kind.RESERVED),
    ("255.255.255.255", Kind.BROADCAST),
    ("::", Kind.UNSPECIFIED),
    ("::1", Kind.LOOPBACK),
    ("::1:0:0:0", None),
    ("fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("fc00::", Kind.ULA),
    ("fd00:ec2::253", Kind.ULA),
    ("fd00:ec2::254", Kind.METADATA),
    ("fd00:ec2::255", Kind.ULA),
    ("fd20:ce::254", Kind.METADATA),
    ("fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.ULA),
    ("fe00::", None),
    ("fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("fe80::", Kind.LINK_LOCAL),
    ("febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.LINK_LOCAL),
    ("fec0::", Kind.PRIVATE),
    ("feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.PRIVATE),
    ("ff00::", Kind.MULTICAST),
    ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.MULTICAST),
    # The ranges of examples and benchmarks count as public.
    ("192.0.2.0", None),
    ("192.0.2.255", None),
    ("198.18.0.0", None),
    ("198.19.255.255", None),
    ("198.51.100.1", None),
    ("203.0.113.255", None),
    ("2001:db8::1", None),
    ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", None),
]


@pytest.mark.parametrize(("text", "kind"), EDGES, ids=[text for text, _ in EDGES])
def test_the_edges_of_every_range(text: str, kind: Kind | None) -> None:
    """The first and the last address of a range are guarded, their neighbours outside are not."""
    assert GUARD.forbids(packed(text)) == kind


def with_v4(prefix: str, v4: str, at: tuple[int, ...] = (12, 13, 14, 15)) -> Address:
    """An IPv6 address with the octets of an IPv4 one at these places."""
    octets = bytearray(ipaddress.ip_address(prefix).packed)
    for place, octet in zip(at, packed(v4), strict=True):
        octets[place] = octet
    return bytes(octets)


def teredo(server: str, client: str) -> Address:
    inverted = bytes(octet ^ 0xFF for octet in packed(client))
    return with_v4(text_of(with_v4("2001::8000:63bf:0:0", server, (4, 5, 6, 7))), text_of(inverted))


FORMS = {
    "mapped": lambda v4: with_v4("::ffff:0:0", v4),
    "compatible": lambda v4: with_v4("::", v4),
    "translated": lambda v4: with_v4("::ffff:0:0:0", v4),
    "NAT64": lambda v4: with_v4("64:ff9b::", v4),
    "local NAT64 /48": lambda v4: with_v4("64:ff9b:1::", v4, (6, 7, 9, 10)),
    "local NAT64 /56": lambda v4: with_v4("64:ff9b:1:ab00::", v4, (7, 9, 10, 11)),
    "local NAT64 /64": lambda v4: with_v4("64:ff9b:1:abcd::", v4, (9, 10, 11, 12)),
    "local NAT64 /96": lambda v4: with_v4("64:ff9b:1:fffe::", v4),
    "local NAT64 /96, octet 8 in use": lambda v4: with_v4("64:ff9b:1:fffe:100::", v4),
    "6to4": lambda v4: with_v4("2002::1", v4, (2, 3, 4, 5)),
    "Teredo client": lambda v4: teredo("192.0.2.45", v4),
    "Teredo server": lambda v4: teredo(v4, "192.0.2.45"),
    "ISATAP": lambda v4: with_v4("2001:db8::5efe:0:0", v4),
    "ISATAP, universal": lambda v4: with_v4("2001:db8::200:5efe:0:0", v4),
}
GUARDED = [(text, kind) for text, kind in EDGES if kind is not None and ":" not in text and text not in ("0.0.0.0", "0.0.0.1")]


@pytest.mark.parametrize("form", FORMS)
def test_a_guarded_address_inside_a_form(form: str) -> None:
    """However it is dressed up, the address that packets would reach is guarded."""
    for text, kind in GUARDED:
        found = GUARD.forbids(FORMS[form](text))
        # Where the local prefix ends is not known, so another reading may be the one that is named.
        assert found is not None if form.startswith("local NAT64") else found == kind, text


@pytest.mark.parametrize("form", FORMS)
def test_a_public_address_inside_a_form(form: str) -> None:
    """A form alone is no reason: behind a NAT64 every IPv4 service of the internet has one."""
    assert GUARD.forbids(FORMS[form]("198.51.100.17")) is None


def test_a_local_form_with_two_readings() -> None:
    """Behind a /48, 192.0.2.33 reads as 0.2.33.0 behind a /56: guarded, until the network's own prefix is allowed."""
    address = FORMS["local NAT64 /48"]("192.0.2.33")
    assert GUARD.forbids(address) == Kind.THIS_NETWORK
    assert AddressGuard(allowed=[Prefix.parse("64:ff9b:1::/48")]).forbids(address) is None


@pytest.mark.parametrize(
    "text",
    [
        "64:ff9b::1:a00:1",
        "64:ff9b:0:1::a00:1",
        "64:ff9c::a00:1",
        "64:ff9b:2::a00:1",
        "2003:a00:1::1",
        "2001:1::f5ff:fffe",
        "2001:db8::5eff:a00:1",
    ],
)
def test_what_only_looks_like_a_form(text: str) -> None:
    """Beside the prefixes the same octets mean nothing."""
    assert GUARD.forbids(packed(text)) is None


def test_the_hosts_own_addresses() -> None:
    """Also public ones, and inside a form; they change with the host."""
    guard = AddressGuard([packed("198.51.100.9"), packed("2001:db8::9"), packed("10.0.0.9")])
    for text in ("198.51.100.9", "2001:db8::9", "10.0.0.9", "64:ff9b::198.51.100.9", "2002:c633:6409::1"):
        assert guard.forbids(packed(text)) == Kind.HOST
    assert guard.forbids(packed("198.51.100.10")) is None
    assert AddressGuard().forbids(packed("198.51.100.9")) is None


@pytest.mark.parametrize(
    ("allowed", "text", "kind"),
    [
        ("10.0.0.0/8", "10.1.2.3", None),
        ("10.0.0.0/8", "11.0.0.0", None),
        ("10.0.0.0/9", "10.128.0.0", Kind.PRIVATE),
        ("10.0.0.0/8", "192.168.7.7", Kind.PRIVATE),
        ("10.0.0.0/8", "64:ff9b::10.1.2.3", None),  # the same service, through the translator
        ("10.0.0.0/8", "2002:a01:203::1", None),
        ("10.0.0.0/8", "64:ff9b::192.168.7.7", Kind.PRIVATE),
        ("64:ff9b::/96", "64:ff9b::192.168.7.7", None),
        ("64:ff9b::/96", "192.168.7.7", Kind.PRIVATE),
        ("::ffff:10.0.0.0/104", "10.1.2.3", None),
        ("fd12::/16", "fd12::1", None),
        ("fd12::/16", "fd13::1", Kind.ULA),
        ("0.0.0.0/0", "127.0.0.1", None),
        ("0.0.0.0/0", "::1", Kind.LOOPBACK),
        ("10.0.0.9/32", "10.0.0.9", None),  # the host's own
        ("10.0.0.0/8", teredo("10.0.0.1", "192.168.7.7"), Kind.PRIVATE),  # both readings need leave
    ],
)
@pytest.mark.parametrize("by", ["agent", "policy"])
def test_prefixes_let_through(allowed: str, text: str | Address, kind: Kind | None, by: str) -> None:
    """A prefix lets through what it holds, alone or inside a form, and nothing beside it; said by the agent or by a policy."""
    host, prefixes = [packed("10.0.0.9")], [Prefix.parse(allowed)]
    address = packed(text) if isinstance(text, str) else text
    guard = AddressGuard(host, prefixes if by == "agent" else ())
    assert guard.forbids(address, prefixes if by == "policy" else ()) == kind


def test_one_policys_leave_is_not_anothers() -> None:
    """What was let through once is judged anew for a name without leave."""
    guard = AddressGuard()
    assert guard.forbids(packed("10.1.2.3"), [Prefix.parse("10.0.0.0/8")]) is None
    assert guard.forbids(packed("10.1.2.3")) == Kind.PRIVATE


# --- against Python's tables -----------------------------------------------------------------------------------------

# Ranges that Python counts as special and we do not (rule 3), and the other way round.
ORDINARY_HERE = [
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments, but for one metadata service
        "192.0.2.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "100::/64",  # discarded on the way: harmless
        "2001::/23",  # protocol assignments; Teredo, judged by what is inside
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        # Forms, judged by what is inside.
        "::/96",
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
    )
]
SPECIAL_HERE = [ipaddress.ip_network(text) for text in ("168.63.129.16", "192.0.0.192")]


def naive_is_guarded(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in ipaddress.ip_network("240.0.0.0/4")
        or (address.version == 4 and address in ipaddress.ip_network("100.64.0.0/10"))
        or (address.version == 6 and address.is_site_local)
    )


def addresses_near_edges() -> st.SearchStrategy[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    near = [ipaddress.ip_address(text) for text, _ in EDGES]
    return st.one_of(
        st.ip_addresses(v=4),
        st.ip_addresses(v=6),
        st.builds(
            lambda edge, step: type(edge)(max(0, min(int(edge) + step, 2**edge.max_prefixlen - 1))),
            st.sampled_from(near),
            st.integers(-3, 3),
        ),
    )


@settings(max_examples=500, deadline=None)
@given(addresses_near_edges())
@example(ipaddress.ip_address("100.127.255.255"))
@example(ipaddress.ip_address("240.0.0.1"))
def test_agrees_with_ipaddress(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Outside the listed deviations and the forms, an address is guarded exactly when Python calls it special."""
    special = [network for network in SPECIAL_HERE if network.version == address.version and address in network]
    ordinary = [network for network in ORDINARY_HERE if network.version == address.version and address in network]
    is_isatap = address.version == 6 and address.packed[8:12] in (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
    if special:
        assert GUARD.forbids(address.packed) is not None
    elif ordinary and ordinary[0].version == 4:
        assert GUARD.forbids(address.packed) is None
    elif not ordinary and not is_isatap:
        assert (GUARD.forbids(address.packed) is not None) == naive_is_guarded(address)


@settings(max_examples=300, deadline=None)
@given(st.ip_addresses(v=4), st.sampled_from([form for form in FORMS if not form.startswith("local NAT64")]))
def test_a_form_is_judged_as_its_address(v4: ipaddress.IPv4Address, form: str) -> None:
    """For every IPv4 address: guarded inside exactly when guarded bare. The two lowest are IPv6's own `::` and `::1`."""
    address = FORMS[form](str(v4))
    if int(v4) > 1:
        assert GUARD.forbids(address) == GUARD.forbids(v4.packed)


@settings(max_examples=300, deadline=None)
@given(st.ip_addresses(v=4), st.sampled_from([form for form in FORMS if form.startswith("local NAT64")]))
def test_a_local_form_never_hides_an_address(v4: ipaddress.IPv4Address, form: str) -> None:
    """Whatever length the local prefix has: what is guarded bare is guarded inside."""
    if GUARD.forbids(v4.packed) and int(v4):
        assert GUARD.forbids(FORMS[form](str(v4))) is not None
