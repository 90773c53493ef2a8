"""Configured interfaces as endpoints."""

from __future__ import annotations

import pytest

from agent.config import EndpointSettings
from agent.core.records import EndpointRecord
from agent.core.types import Address, packed
from agent.host.endpoints import HostEndpoints, with_namespace
from agent.host.interfaces import InterfaceMissing, Interfaces


class Looked(Interfaces):
    """What was found: interface to index and the addresses routed to it."""

    def __init__(self, found: dict[str, tuple[int, str]]) -> None:
        self._found = found

    def ifindex(self, name: str) -> int:
        if name not in self._found:
            raise InterfaceMissing(f"there is no interface {name}")
        return self._found[name][0]

    def addresses_behind(self, ifindex: int) -> frozenset[Address]:
        return frozenset(packed(address) for index, address in self._found.values() if index == ifindex and address)


SETTINGS = (EndpointSettings("veth1"), EndpointSettings("veth2"))


def test_a_number_stays_with_the_interface_and_its_addresses() -> None:
    """Another index or another address is another endpoint; a number is never given twice."""
    endpoints = HostEndpoints(SETTINGS)
    first = endpoints.look(Looked({"veth1": (10, "192.0.2.2"), "veth2": (11, "192.0.2.3")}))
    assert sorted(first.by_number) == [1, 2]
    assert endpoints.look(Looked({"veth1": (10, "192.0.2.2"), "veth2": (11, "192.0.2.3")})) == first
    assert sorted(endpoints.look(Looked({"veth1": (12, "192.0.2.2"), "veth2": (11, "192.0.2.3")})).by_number) == [2, 3]
    assert sorted(endpoints.look(Looked({"veth1": (12, "192.0.2.2"), "veth2": (11, "192.0.2.4")})).by_number) == [3, 4]


def test_numbers_go_on_after_a_restart() -> None:
    """An interface that is the same keeps its number; a new one gets one that nobody had."""
    endpoints = HostEndpoints(SETTINGS, [EndpointRecord(7, "veth1", 10), EndpointRecord(9, "gone", 5)])
    found = endpoints.look(Looked({"veth1": (10, "192.0.2.2"), "veth2": (11, "192.0.2.3")}))
    assert {number: added.interface for number, added in found.by_number.items()} == {7: "veth1", 10: "veth2"}


def test_what_is_not_there_is_said() -> None:
    """No interface; an interface without an address."""
    found = HostEndpoints(SETTINGS).look(Looked({"veth2": (11, "")}))
    assert found.by_number == {}
    assert found.missing["veth1"] == "there is no interface veth1"
    assert "needs `addresses`" in found.missing["veth2"]


@pytest.mark.parametrize("key", ["namespace", "io.kubernetes.pod.namespace"])
def test_either_label_says_the_namespace(key: str) -> None:
    """A namespaced policy looks for one, its peers for the other."""
    assert with_namespace({key: "build", "app": "x"}) == {
        "namespace": "build",
        "io.kubernetes.pod.namespace": "build",
        "app": "x",
    }
    assert with_namespace({"app": "x"}) == {"app": "x"}
