"""An endpoint that is said again with another name, other labels, addresses or settings: judged all the while."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agent.core.engine import SOURCES
from agent.core.events import EndpointAdded, PoliciesChanged, SourceReported
from agent.core.types import EndpointValue, Orientation, OwnAddressKey, Table, packed, text_of
from tests.sim.world import World, allow

A, B, C = "192.0.2.101", "192.0.2.102", "192.0.2.103"
FIRST, SECOND = "192.0.2.11", "192.0.2.12"


def started(*endpoints: EndpointAdded) -> World:
    """Endpoint 1 (`app: e1`) may ask a.example, whoever has `app: other` b.example."""
    world = World()
    for added in endpoints or (endpoint(1, FIRST),):
        world.handle(added)
    world.handle(PoliciesChanged((allow("a.example.", app="e1"), allow("b.example.", app="other")), "start"))
    for source in sorted(SOURCES):
        world.handle(SourceReported(source))
    world.advance(0.0)
    return world


def endpoint(number: int, *addresses: str, also_from: Iterable[str] = (), is_uplink: bool = False) -> EndpointAdded:
    return EndpointAdded(
        number,
        f"veth{number}",
        100 + number,
        {"app": f"e{number}"},
        tuple(map(packed, addresses)),
        Orientation.UPLINK if is_uplink else Orientation.BEHIND,
        also_from=tuple(map(packed, also_from)),
    )


def own(world: World, number: int = 1) -> list[str]:
    """What the kernel lets it send from."""
    keys = world.kernel.rows[Table.OWN_ADDRESSES]
    return sorted(text_of(key.address) for key in keys if isinstance(key, OwnAddressKey) and key.endpoint == number)


def test_other_addresses_are_taken_up_and_nothing_else_changes() -> None:
    """A question from the new address is the endpoint's, from the old one nobody's; what was learned stays open."""
    world = started()
    world.resolve("a.example.", A)
    rows = dict(world.kernel.rows[Table.ENDPOINTS])
    asker = world.ask("a.example.")
    world.handle(endpoint(1, SECOND))
    assert own(world) == [SECOND]
    assert (world.kernel.rows[Table.ENDPOINTS], world.attached) == (rows, {1: 101})
    assert world.passes(A)
    world.reply(asker, A)
    assert world.answer_of(asker).addresses == [A]
    assert world.resolve("a.example.", B).addresses == [B]
    assert world.engine.groups.endpoint_at(packed(FIRST)) is None


def test_other_labels_are_judged_by_at_once_and_in_one_step() -> None:
    """The row of the endpoint is replaced, never taken away; programs stay where they are."""
    world = started()
    world.resolve("a.example.", A)
    world.auto = False
    world.handle(replace(endpoint(1, FIRST), interface="renamed", labels={"app": "other"}))
    while world.waiting_writes or world.engine.groups.can_step:
        assert world.passes(A) or world.kernel.rows[Table.ENDPOINTS][101] != EndpointValue(1, 1, 1, Orientation.BEHIND)
        assert 101 in world.kernel.rows[Table.ENDPOINTS]
        world.write_one()
        world.advance(0.0)
    world.auto = True
    assert not world.passes(A)
    assert world.resolve("a.example.", A).rcode == "NXDOMAIN"
    assert world.resolve("b.example.", B).addresses == [B]
    assert world.passes(B)
    assert world.attached == {1: 101}


def test_settings_of_the_row_change_with_it() -> None:
    """dhcp, silence and isolation."""
    world = started()
    world.handle(replace(endpoint(1, FIRST), dhcp=True, silent=True, isolated=True))
    world.advance(0.0)
    row = world.kernel.rows[Table.ENDPOINTS][101]
    assert isinstance(row, EndpointValue)
    assert (row.dhcp, row.silent, row.scope) == (True, True, 3)


def test_an_address_goes_from_one_endpoint_to_another() -> None:
    """It is taken from the first one before; as long as it is the first one's, the second is refused."""
    world = started(endpoint(1, FIRST), endpoint(2, SECOND))
    world.handle(endpoint(2, SECOND, FIRST))
    assert world.facts[-1].fields["error"] == f"address {FIRST}/32 of veth2 is endpoint veth1's"
    assert (own(world), own(world, 2)) == ([FIRST], [SECOND])
    world.handle(endpoint(1))
    world.handle(endpoint(2, SECOND, FIRST))
    assert (own(world), own(world, 2)) == ([], [FIRST, SECOND])
    assert world.engine.groups.endpoint_at(packed(FIRST)) == 2


def test_two_uplinks_share_the_hosts_other_addresses() -> None:
    """Both may send from them; a question from one is the first one's, and the other's when that is gone."""
    uplinks = [endpoint(number, address, also_from=(B, C), is_uplink=True) for number, address in ((1, FIRST), (2, SECOND))]
    world = started(*uplinks)
    assert (own(world), own(world, 2)) == ([B, C, FIRST], [B, C, SECOND])
    assert [world.engine.groups.endpoint_at(packed(address)) for address in (FIRST, SECOND, B)] == [1, 2, 1]
    world.handle(endpoint(1, FIRST, B, also_from=(C,), is_uplink=True))
    assert own(world) == [B, C, FIRST]
    world.remove_endpoint(1)
    assert (own(world), own(world, 2)) == ([], [B, C, SECOND])
    assert world.engine.groups.endpoint_at(packed(B)) == 2
