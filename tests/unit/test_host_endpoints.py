"""Configured interfaces as endpoints."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from agent.config import Denied, EndpointSettings
from agent.core.records import EndpointRecord
from agent.core.types import Address, Orientation, Prefix, packed, text_of
from agent.host.endpoints import CLAIMED_MAX, HostEndpoints, with_namespace
from agent.host.interfaces import Interfaces, Link, networks_alone

UPLINK = EndpointSettings("eth0", orientation=Orientation.UPLINK)


class Looked(Interfaces):
    """What was found: interfaces by name, and by index the host's addresses with their networks, routes and neighbours."""

    def __init__(
        self,
        links: Mapping[str, Link | int],
        addresses: Mapping[int, str] | None = None,
        routes: Mapping[int, str] | None = None,
        neighbours: Mapping[int, str] | None = None,
    ) -> None:
        self.links = {name: link if isinstance(link, Link) else Link(link, "veth") for name, link in links.items()}
        given = {index: [word.split("/") for word in words.split()] for index, words in (addresses or {}).items()}
        self._addresses = {index: {packed(address) for address, _ in words} for index, words in given.items()}
        self._host = frozenset().union(*self._addresses.values())
        networks = {index: {Prefix.parse("/".join(word)) for word in words} for index, words in given.items()}
        self._alone = networks_alone(networks)
        self._routed = _addresses(routes)
        self._neighbours = _addresses(neighbours)


def _addresses(words_by_index: Mapping[int, str] | None) -> dict[int, set[Address]]:
    return {index: {packed(word) for word in words.split()} for index, words in (words_by_index or {}).items()}


def own(endpoints: HostEndpoints, looked: Looked) -> dict[str, str]:
    """Interface to its own addresses, as text."""
    present = endpoints.look(looked)
    return {added.interface: " ".join(map(text_of, added.addresses)) for added in present.by_number.values()}


# --- which, and under which number -----------------------------------------------------------------------------------------


def numbers(endpoints: HostEndpoints, looked: Looked, gone: set[int] | None = None) -> dict[str, int]:
    return {added.interface: number for number, added in endpoints.look(looked, gone or set()).by_number.items()}


def test_a_number_stays_with_the_interface() -> None:
    """Under another name and with other addresses too; another index is another endpoint, and a number is never given twice."""
    endpoints = HostEndpoints([EndpointSettings("veth*")])
    assert numbers(endpoints, Looked({"veth1": 10, "veth2": 11}, routes={10: "192.0.2.2"})) == {"veth1": 1, "veth2": 2}
    assert numbers(endpoints, Looked({"veth1": 10, "veth9": 11}, routes={10: "192.0.2.3"})) == {"veth1": 1, "veth9": 2}
    assert numbers(endpoints, Looked({"veth1": 12, "veth9": 11})) == {"veth1": 3, "veth9": 2}
    assert numbers(endpoints, Looked({"veth9": 11})) == {"veth9": 2}
    assert numbers(endpoints, Looked({"veth1": 12, "veth9": 11})) == {"veth1": 4, "veth9": 2}


def test_an_interface_that_went_and_is_back_with_its_index_is_another() -> None:
    """Nobody can see it by looking; the kernel told that it went."""
    endpoints = HostEndpoints([EndpointSettings("veth1")])
    assert numbers(endpoints, Looked({"veth1": 10})) == {"veth1": 1}
    assert numbers(endpoints, Looked({"veth1": 10}), gone={10}) == {"veth1": 2}
    assert numbers(endpoints, Looked({"veth1": 10})) == {"veth1": 2}


def test_numbers_go_on_after_a_restart() -> None:
    """An interface that is the same keeps its number; a new one gets one that nobody had."""
    records = [EndpointRecord(7, "veth1", 10), EndpointRecord(9, "gone", 5)]
    endpoints = HostEndpoints([EndpointSettings("veth1"), EndpointSettings("veth2")], records)
    assert numbers(endpoints, Looked({"veth1": 10, "veth2": 11})) == {"veth1": 7, "veth2": 10}


def test_the_own_name_comes_before_patterns_and_the_first_pattern_before_the_others() -> None:
    """lo, the agent's own device and what nothing matches are no endpoints."""
    settings = [EndpointSettings(name, {"n": str(i)}) for i, name in enumerate(("veth-?", "veth*", "veth-a", "[!a-m]*"))]
    endpoints = HostEndpoints(settings, never=("ng-gate", "ng-gate-peer"))
    names = ("lo", "ng-gate", "ng-gate-peer", "veth-a", "veth-b", "veth-bb", "br0", "wlan0")
    present = endpoints.look(Looked({name: index for index, name in enumerate(names, 1)}))
    assert {added.interface: added.labels["n"] for added in present.by_number.values()} == {
        "veth-a": "2",
        "veth-b": "0",
        "veth-bb": "1",
        "wlan0": "3",
    }


def test_what_is_not_there_is_said_of_names_only() -> None:
    """A pattern promises no interface."""
    wrong = HostEndpoints([EndpointSettings("veth1"), EndpointSettings("tap*")]).look(Looked({})).wrong
    assert wrong == {"veth1": "there is no interface veth1 in this network namespace (`ip link` shows them)"}


def test_what_carries_no_ethernet_is_no_endpoint() -> None:
    """The program reads frames: of others it would drop everything."""
    present = HostEndpoints([EndpointSettings("w*")]).look(Looked({"wg0": Link(4, "wireguard", is_ethernet=False)}))
    assert present.by_number == {}
    assert "wg0 is not enforced: it carries no Ethernet frames" in present.wrong["wg0"]


def test_who_may_ask_for_an_address_and_who_is_refused_silently() -> None:
    """DHCP by default on a tap and an uplink; `dhcp` says otherwise. `denied: drop` is silence."""
    settings = [
        EndpointSettings("tap0"),
        EndpointSettings("tap1", dhcp=False),
        EndpointSettings("veth0", denied=Denied.DROP),
        EndpointSettings("veth1", dhcp=True),
        UPLINK,
    ]
    kinds = {"tap0": "tun", "tap1": "tun", "veth0": "veth", "veth1": "veth", "eth0": ""}
    links = {name: Link(index, kind) for index, (name, kind) in enumerate(kinds.items(), 1)}
    added = {each.interface: each for each in HostEndpoints(settings).look(Looked(links)).by_number.values()}
    assert [name for name, each in added.items() if each.dhcp] == ["tap0", "veth1", "eth0"]
    assert [name for name, each in added.items() if each.silent] == ["veth0"]


# --- from which addresses --------------------------------------------------------------------------------------------------


def test_an_address_is_routed_or_used_in_a_network_of_its_own() -> None:
    """The host's routes, and the neighbours the interface's network can hold; never one of the host, a network or everybody."""
    looked = Looked(
        {"veth1": 10, "veth2": 11, "eth0": 12},
        {10: "10.0.0.1/24 2001:db8:1::1/64", 12: "203.0.113.1/24"},
        {10: "192.0.2.7", 11: "192.0.2.8 203.0.113.1"},
        {10: "10.0.0.2 10.0.0.0 10.0.0.255 10.9.9.9 2001:db8:1::2 2001:db8:1:: fe80::1 203.0.113.1", 11: "10.0.0.3"},
    )
    endpoints = HostEndpoints([EndpointSettings("veth*")])
    assert own(endpoints, looked) == {"veth1": "192.0.2.7 10.0.0.2 2001:db8:1::2", "veth2": "192.0.2.8"}
    assert endpoints.look(looked).wrong == {}


@pytest.mark.parametrize("other", ["10.0.0.129/25", "10.0.0.1/24", "10.1.1.1/8"])
def test_of_a_network_that_two_interfaces_are_in_nothing_is_learned(other: str) -> None:
    """Who is behind which nobody can say."""
    looked = Looked({"veth1": 10, "veth2": 11}, {10: "10.0.0.1/24", 11: other}, neighbours={10: "10.0.0.2"})
    endpoints = HostEndpoints([EndpointSettings("veth1")])
    assert own(endpoints, looked) == {"veth1": ""}
    assert not endpoints.claim(1, packed("10.0.0.2"))


def test_a_claimed_address_is_its_own_from_the_next_look_on_and_stays() -> None:
    """Only inside the interface's network; and not what is the host's or another endpoint's."""
    looked = Looked({"veth1": 10, "veth2": 11}, {10: "10.0.0.1/24", 11: "10.0.1.1/24"}, {11: "10.0.0.9"})
    endpoints = HostEndpoints([EndpointSettings("veth*")])
    assert own(endpoints, looked) == {"veth1": "", "veth2": "10.0.0.9"}
    refused = ("10.0.1.2", "10.0.0.1", "10.0.0.9", "10.0.0.0", "10.0.0.255", "198.51.100.1", "0.0.0.0")
    assert [address for address in refused if endpoints.claim(1, packed(address))] == []
    assert endpoints.claim(1, packed("10.0.0.2"))
    assert not endpoints.claim(1, packed("10.0.0.2"))
    assert own(endpoints, looked)["veth1"] == "10.0.0.2"
    assert own(endpoints, looked)["veth1"] == "10.0.0.2"
    assert not endpoints.claim(99, packed("10.0.0.3"))
    # It became the host's; the interface is made anew.
    assert own(endpoints, Looked({"veth1": 10}, {10: "10.0.0.1/24 10.0.0.2/24"})) == {"veth1": ""}
    assert own(endpoints, Looked({"veth1": 13}, {13: "10.0.0.1/24"})) == {"veth1": ""}


def test_what_one_endpoint_can_claim_is_bounded() -> None:
    """The table of own addresses is everybody's."""
    looked = Looked({"veth1": 10}, {10: "10.0.0.1/16"}, neighbours={10: "10.0.9.1"})
    endpoints = HostEndpoints([EndpointSettings("veth1")])
    endpoints.look(looked)
    claims = [endpoints.claim(1, packed(f"10.0.1.{host}")) for host in range(1, 200)]
    assert claims.count(True) == CLAIMED_MAX - 1


def test_configured_addresses_are_all_there_are_but_for_the_hosts() -> None:
    """Nothing is learned beside them."""
    settings = EndpointSettings("veth1", addresses=(packed("10.0.0.1"), packed("10.0.0.2")))
    endpoints = HostEndpoints([settings])
    assert own(endpoints, Looked({"veth1": 10}, {10: "10.0.0.1/24"}, {10: "192.0.2.9"}, {10: "10.0.0.3"})) == {
        "veth1": "10.0.0.2"
    }
    assert not endpoints.claim(1, packed("10.0.0.4"))


def test_without_an_address_it_is_an_endpoint_all_the_same() -> None:
    """Everything it sends is dropped, which is said, with what to do."""
    present = HostEndpoints([EndpointSettings("veth2")]).look(Looked({"veth2": 11}))
    assert [added.addresses for added in present.by_number.values()] == [()]
    assert "veth2 has no address yet, so everything it sends is dropped: give `addresses`" in present.wrong["veth2"]


def test_an_address_of_two_is_that_ones_who_had_it_first() -> None:
    """The other is told; when the first goes it is the other's."""
    settings = [EndpointSettings("veth2", addresses=(packed("192.0.2.2"),)), EndpointSettings("veth1")]
    endpoints = HostEndpoints(settings)
    first = Looked({"veth1": 10}, routes={10: "192.0.2.2"})
    both = Looked({"veth1": 10, "veth2": 11}, routes={10: "192.0.2.2"})
    assert own(endpoints, first) == {"veth1": "192.0.2.2"}
    assert own(endpoints, both) == {"veth1": "192.0.2.2", "veth2": ""}
    assert endpoints.look(both).wrong["veth2"] == "veth2 may not send from 192.0.2.2: that is another endpoint's address"
    assert own(endpoints, Looked({"veth2": 11})) == {"veth2": "192.0.2.2"}


def test_an_uplink_sends_from_all_of_the_hosts_addresses() -> None:
    """Known as the endpoint are those on the interface; loopback's and other interfaces' link-local ones never leave by it."""
    addresses = {1: "127.0.0.1/8 ::1/128 192.0.2.200/32", 5: "203.0.113.1/24 fe80::5/64", 6: "10.0.0.1/24 fe80::6/64"}
    [added] = HostEndpoints([UPLINK]).look(Looked({"lo": 1, "eth0": 5, "br0": 6}, addresses)).by_number.values()
    assert [text_of(address) for address in added.addresses] == ["203.0.113.1"]
    assert [text_of(address) for address in added.also_from] == ["10.0.0.1", "192.0.2.200", "fe80::5"]


@pytest.mark.parametrize("key", ["namespace", "io.kubernetes.pod.namespace"])
def test_either_label_says_the_namespace(key: str) -> None:
    """A namespaced policy looks for one, its peers for the other."""
    assert with_namespace({key: "build", "app": "x"}) == {
        "namespace": "build",
        "io.kubernetes.pod.namespace": "build",
        "app": "x",
    }
    assert with_namespace({"app": "x"}) == {"app": "x"}
