"""The gate, scene by scene: who is answered what, when, and what is open then."""

from __future__ import annotations

import errno
from dataclasses import replace

import dns.edns
import dns.message
import dns.rrset
import pytest

from agent.core.engine import SOURCES
from agent.core.events import (
    AskerGone,
    EndpointRemoved,
    PoliciesChanged,
    Query,
    Reply,
    RowsWritten,
    SourceReported,
    UpstreamFailed,
)
from agent.core.rules import Cidr, Origin, Policy, Ports, Rule
from agent.core.settings import Settings, Upstream
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, Direction, Prefix, Table, packed
from tests.sim.world import UPSTREAM, Answered, World, allow, any_question, subject

A, B, C = "192.0.2.101", "192.0.2.102", "192.0.2.103"
SECOND = Upstream(packed("203.0.113.54"))


def started(*policies: Policy, settings: Settings | None = None, endpoints: dict[int, str] | None = None) -> World:
    """A world at rest whose kernel is slow from here."""
    world = World(settings or Settings(upstreams=(UPSTREAM,)))
    world.start(*policies, endpoints=endpoints)
    world.auto = False
    return world


def write_out(world: World) -> None:
    while world.waiting_writes:
        world.write_one()


def ask_and_reply(world: World, name: str, *addresses: str, endpoint: int = 1, ttl: int = 60) -> int:
    asker = world.ask(name, endpoint=endpoint)
    world.reply(asker, *addresses, ttl=ttl)
    return asker


def reason_of(answer: Answered) -> int | None:
    return next((int(o.code) for o in answer.message.options if isinstance(o, dns.edns.EDEOption)), None)


def left_over(world: World) -> list[object]:
    proxy, barriers = world.engine.proxy, world.engine.reconciler.barriers
    tables = (proxy.transactions, proxy._numbers_by_asker, proxy._number_by_barrier, proxy._open_by_endpoint, proxy._bringers)
    return [left for left in (*tables, barriers._waiting, barriers.over) if left]


# --- holding -------------------------------------------------------------------------------------------------------------


def test_second_reply_waits() -> None:
    """T0 to T6 of barrier.py: the second reply changes nothing and is held all the same, until the row is there."""
    world = started(allow("a.example."))
    first, second = ask_and_reply(world, "a.example.", A), ask_and_reply(world, "a.example.", A)
    while not world.passes(A):
        assert not world.answers
        write = world.take_write()
        assert write is not None
        error = world.kernel.apply(write)
        assert not world.answers, "made is not acknowledged"
        world.handle(RowsWritten(((write, error),)))
    assert [world.answer_of(asker).addresses for asker in (first, second)] == [[A], [A]]
    assert not left_over(world)


def test_a_third_reply_leaves_at_once_when_everything_is_there() -> None:
    """Nothing to change, everything in the kernel: no write, no wait, the upstream's bytes."""
    world = started(allow("a.example."))
    ask_and_reply(world, "a.example.", A)
    write_out(world)
    writes = world.kernel.writes
    assert world.answer_of(ask_and_reply(world, "a.example.", A)).addresses == [A]
    assert not world.waiting_writes
    assert world.kernel.writes == writes


def test_a_failing_row_delays_only_replies_that_need_it() -> None:
    """Waiting is by row, not by batch and not by revision."""
    world = started(allow("a.example.", "b.example."))
    slow = ask_and_reply(world, "a.example.", A)
    world.kernel.fail(Table.IPCACHE, 1, errno.EAGAIN)
    write_out(world)
    quick = ask_and_reply(world, "b.example.", B)
    write_out(world)
    assert world.answer_of(quick).addresses == [B]
    assert not world.answers_of(slow)
    world.advance(0.03)
    write_out(world)
    assert world.answer_of(slow).addresses == [A]


def test_an_injected_error_is_servfail_at_the_gates_deadline_and_the_row_is_tried_on() -> None:
    """One second after the reply, not before; the address never leaves, and opens when the fault ends."""
    world = started(allow("a.example."))
    world.kernel.fail(Table.IPCACHE, 1_000, errno.EAGAIN)
    world.advance(0.0)
    asker = ask_and_reply(world, "a.example.", A)
    for _ in range(99):
        write_out(world)
        world.advance(0.01)
    assert not world.answers_of(asker)
    world.advance(0.02)
    answer = world.answer_of(asker)
    assert (answer.rcode, answer.addresses, reason_of(answer)) == ("SERVFAIL", [], 14)
    assert not world.passes(A)
    world.kernel.failing.clear()
    world.advance(1.0)
    write_out(world)
    assert world.passes(A)
    assert world.answers_of(asker) == [answer]
    assert world.answer_of(ask_and_reply(world, "a.example.", A)).addresses == [A]
    assert not left_over(world)


@pytest.mark.parametrize("table", [Table.IPCACHE, Table.POLICY])
def test_a_full_map_is_servfail_at_once_and_leaves_nothing(table: Table) -> None:
    """What the reply added is taken back; the next query after the cause is gone succeeds."""
    world = started(allow("a.example.", "192.0.2.0/24", port=443), allow("b.example."))
    ask_and_reply(world, "b.example.", B)
    write_out(world)
    world.kernel.rows_max[table] = len(world.kernel.rows[table]) - (1 if table is Table.POLICY else 0)
    asker = world.ask("a.example.")
    world.reply(asker, A, B)  # B with both names is an identity of its own
    write_out(world)
    answer = world.answer_of(asker)
    assert (answer.rcode, answer.addresses, reason_of(answer)) == ("SERVFAIL", [], 14)
    assert answer.at == world.now
    assert "a.example." not in world.engine.dns_cache.scopes_by_name
    assert not left_over(world)
    world.kernel.rows_max.clear()
    for _ in range(10):  # also what the first try left to be written
        world.advance(0.5)
        write_out(world)
    again = ask_and_reply(world, "a.example.", A)
    write_out(world)
    assert world.answer_of(again).addresses == [A]


def test_what_another_reply_brought_too_is_not_taken_back() -> None:
    """One client got the address before the other's reply failed for lack of room: it stays open for the first."""
    world = started(allow("a.example."))
    world.kernel.rows_max[Table.IPCACHE] = len(world.kernel.rows[Table.IPCACHE]) + 1
    both = ask_and_reply(world, "a.example.", A, B)
    one = ask_and_reply(world, "a.example.", A)
    write_out(world)
    assert world.answer_of(both).rcode == "SERVFAIL"
    assert world.answer_of(one).addresses == [A]
    assert world.passes(A)
    assert not world.passes(B)
    assert not left_over(world)


def test_what_nobody_can_be_given_is_taken_back_by_the_last_who_brought_it() -> None:
    """Two replies share an address and each needs one more that has no room: in the end nothing stays."""
    world = started(allow("a.example."))
    world.kernel.rows_max[Table.IPCACHE] = len(world.kernel.rows[Table.IPCACHE]) + 1
    askers = [ask_and_reply(world, "a.example.", A, B), ask_and_reply(world, "a.example.", A, C)]
    write_out(world)
    assert [world.answer_of(asker).rcode for asker in askers] == ["SERVFAIL", "SERVFAIL"]
    assert not world.engine.dns_cache.lifetimes
    assert not world.passes(A)
    assert not left_over(world)


def test_no_room_for_identities() -> None:
    """The bound is SERVFAIL too, for who wants the address; a reply nobody's selector wants passes."""
    settings = Settings(upstreams=(UPSTREAM,), identities_max=5)  # host, world, the endpoint, one for each selector
    world = started(allow("a.example.", "b.example."), any_question(), settings=settings)
    world.auto = True
    assert world.resolve("a.example.", A).addresses == [A]
    assert world.resolve("b.example.", A).rcode == "SERVFAIL"
    assert world.passes(A), "what a holds is untouched"
    assert world.resolve("c.example.", C).addresses == [C]
    assert not left_over(world)


def test_no_room_for_names_does_not_touch_replies_nobody_wants() -> None:
    """What cannot be remembered is not learned; nothing makes way for it, and it makes way for what is wanted."""
    world = started(allow("a.example."), any_question(), settings=Settings(upstreams=(UPSTREAM,), names_max=1))
    world.auto = True
    assert world.resolve("x.example.", B).addresses == [B]
    assert world.resolve("y.example.", C).addresses == [C]
    assert [pair.name for pair in world.engine.dns_cache.lifetimes] == ["x.example."]
    assert world.resolve("a.example.", A).addresses == [A]
    assert world.passes(A)


def test_release_on_failure_is_a_setting_and_is_counted() -> None:
    """For a deadline and for a full map alike."""
    world = started(allow("a.example."), settings=Settings(upstreams=(UPSTREAM,), release_on_failure=True))
    world.kernel.rows_max[Table.IPCACHE] = len(world.kernel.rows[Table.IPCACHE])
    full = ask_and_reply(world, "a.example.", A)
    write_out(world)
    assert world.answer_of(full).addresses == [A]
    late = ask_and_reply(world, "a.example.", B)
    world.advance(1.1)
    assert world.answer_of(late).addresses == [B]
    assert world.engine.proxy.counters["replies released on failure"] == 2


def test_a_reply_whose_address_is_given_up_meanwhile_does_not_leave() -> None:
    """The row it waits for stays for another name's sake, but says nothing for this one any more."""
    settings = Settings(upstreams=(UPSTREAM,), addresses_per_name_max=1)
    world = started(allow("a.example.", port=80), allow("b.example."), settings=settings)
    ask_and_reply(world, "b.example.", A)
    write_out(world)
    evicted = ask_and_reply(world, "a.example.", A)
    latest = ask_and_reply(world, "a.example.", C)
    world.handle(world.waiting_looks.popleft())
    write_out(world)
    assert world.answer_of(evicted).rcode == "SERVFAIL"
    assert world.answer_of(latest).addresses == [C]
    assert not world.passes(A, 80)


# --- policies change while a reply is held -------------------------------------------------------------------------------


def test_a_held_reply_is_judged_again_when_policies_change() -> None:
    """Denied by the new policy: a denial, once, and nothing later. Still allowed: it goes when its rows are there."""
    world = started(allow("a.example.", "b.example."))
    world.kernel.fail(Table.IPCACHE, 2, errno.EAGAIN)
    denied, kept = ask_and_reply(world, "a.example.", A), ask_and_reply(world, "b.example.", B)
    write_out(world)
    world.apply(allow("b.example.", name="q"), ticket=1)
    write_out(world)
    assert world.settled[1] is None
    assert (world.answer_of(denied).rcode, world.answer_of(denied).addresses) == ("NXDOMAIN", [])
    assert not world.answers_of(kept)
    world.advance(0.5)
    write_out(world)
    assert world.answer_of(kept).addresses == [B]
    assert world.passes(B)
    assert not left_over(world)


def test_selectors_added_after_the_name_was_learned() -> None:
    """What is known already is open the moment the policy is in force, and not before."""
    world = started(allow("a.example."), any_question())
    world.auto = True
    world.resolve("b.example.", B)
    world.auto = False
    assert not world.passes(B)
    world.apply(allow("a.example.", "*.example."), any_question(), ticket=1)
    while 1 not in world.settled:
        open_before = world.passes(B)
        world.write_one()
        assert world.passes(B) is False or not open_before or 1 not in world.settled
    assert world.passes(B)


def test_selectors_removed_while_live() -> None:
    """Shut by the flip at once; the address's row and the identities go a second and a pass over the flows later."""
    world = started(allow("a.example.", "b.example."))
    world.auto = True
    world.resolve("a.example.", A)
    world.resolve("b.example.", B)
    world.apply(allow("b.example."))
    assert not world.passes(A)
    assert world.passes(B)
    held = set(world.kernel.rows[Table.IPCACHE])
    world.advance(0.9)
    assert set(world.kernel.rows[Table.IPCACHE]) == held, "a program run may still hold the old set's number"
    world.advance(0.2)
    assert len(held - set(world.kernel.rows[Table.IPCACHE])) == 1
    assert not any(selector.pattern == "a.example." for selector in world.engine.names.selectors)
    world.advance(5.5)
    labels = set().union(*world.engine.identities.labels_by_identity.values())
    assert "fqdn:a.example." not in labels


def test_what_is_learned_between_a_change_of_scope_and_its_flip_is_there_after_it() -> None:
    """A rule that names a server makes learning the endpoint's own: a reply released meanwhile is in both scopes."""
    server = Cidr(Prefix.parse("203.0.113.0/24"))
    names = (Ports(PROTOCOL_UDP, 53, 53),)
    asks_server = Policy("s", any_question().subject, (Rule(Direction.EGRESS, (server,), names, names=()),), True, False)
    world = started(allow("a.example."), any_question())
    ask_and_reply(world, "a.example.", A)
    write_out(world)
    world.apply(allow("a.example."), any_question(), asks_server, ticket=1)
    asker = ask_and_reply(world, "a.example.", B)
    write_out(world)
    assert world.settled[1] is None
    assert world.answer_of(asker).addresses == [B]
    assert world.engine.groups.endpoints[1].scope != 1
    assert world.passes(A)
    assert world.passes(B)


def test_scope_and_set_change_in_one_write() -> None:
    """What only the endpoint's own scope knows is not judged by a set that looks into the shared one."""
    server = Cidr(Prefix.parse("203.0.113.0/24"))
    rule = Rule(Direction.EGRESS, (server,), (Ports(PROTOCOL_UDP, 53, 53),), names=())
    asks_server = Policy("s", subject("e1"), (rule,), default_deny_egress=True, default_deny_ingress=False)
    wanted_by_another = allow("b.example.", app="e2")
    world = started(asks_server, wanted_by_another, endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    ask_and_reply(world, "b.example.", B)
    write_out(world)
    assert not world.passes(B)
    world.apply(allow("b.example.", app="e1"), wanted_by_another, ticket=1)
    while 1 not in world.settled:
        world.write_one()
        assert not world.passes(B), "neither the state before nor the one after allows this"
    assert world.engine.groups.endpoints[1].scope == 1


def test_an_endpoint_never_meets_its_new_groups_old_set() -> None:
    """Two groups become one: the endpoint that moves waits for the group's row, also when that one is refused at first."""
    endpoints = {1: "192.0.2.11", 2: "192.0.2.12"}
    one, two = allow("192.0.2.101/32", app="e1"), allow("192.0.2.102/32", app="e2")
    world = started(one, two, endpoints=endpoints)
    world.apply(allow("192.0.2.103/32"), ticket=1)
    world.kernel.fail(Table.GROUPS, 3, errno.EAGAIN)
    while 1 not in world.settled:
        world.write_one()
        assert not world.passes(A, endpoint=2), "neither the old nor the new policy of endpoint 2 allows this"
        assert not world.passes(B, endpoint=1)
        if not world.waiting_writes:
            world.advance(0.1)
    assert world.passes(C, endpoint=1)
    assert world.passes(C, endpoint=2)


# --- judging questions --------------------------------------------------------------------------------------------------------


def test_denied_names_are_never_asked_and_ancestors_exist() -> None:
    """NXDOMAIN with "Blocked", without an SOA; NODATA for a name above one that is allowed."""
    world = started(allow("api.a.example."))
    denied = world.answer_of(world.ask("b.example."))
    assert (denied.rcode, reason_of(denied), denied.message.authority) == ("NXDOMAIN", 15, [])
    ancestor = world.answer_of(world.ask("a.example."))
    assert (ancestor.rcode, ancestor.addresses, reason_of(ancestor)) == ("NOERROR", [], 15)
    assert reason_of(world.answer_of(world.ask("b.example.", edns=False))) is None
    assert not world.asked
    assert not left_over(world)


def test_excepted_names_are_neither_asked_nor_opened() -> None:
    """`except_names` takes names out of the policy's patterns; another policy may still want them."""
    excepting = replace(allow("*.example."), except_names=("b.example.",))
    world = started(excepting)
    world.auto = True
    assert world.answer_of(world.ask("b.example.")).rcode == "NXDOMAIN"
    assert world.resolve("a.example.", A).addresses == [A]
    world.apply(excepting, allow("b.example.", port=80))
    assert world.resolve("b.example.", B).addresses == [B]
    assert world.passes(B, 80)
    assert not world.passes(B, 443)


def test_a_question_before_start_is_held_and_judged_at_start() -> None:
    """Or, if start takes longer than the gate's second, SERVFAIL with "Not Ready"."""
    world = World()
    world.add_endpoint(1, "192.0.2.11")
    early = world.ask("a.example.")
    world.advance(1.1)
    answer = world.answer_of(early)
    assert (answer.rcode, reason_of(answer)) == ("SERVFAIL", 14)
    held, denied = world.ask("a.example."), world.ask("b.example.")
    world.handle(PoliciesChanged((allow("a.example."),), None))
    for source in sorted(SOURCES):
        assert not world.asked
        world.handle(SourceReported(source))
    assert world.answer_of(denied).rcode == "NXDOMAIN"
    world.reply(held, A)
    assert world.answer_of(held).addresses == [A]
    assert not left_over(world)


def test_start_goes_on_without_a_silent_source() -> None:
    """After five seconds, and it is shown as missing."""
    world = World()
    world.add_endpoint(1, "192.0.2.11")
    world.handle(PoliciesChanged((allow("a.example."),), 1))
    for source in SOURCES - {"host"}:
        world.handle(SourceReported(source))
    world.advance(4.9)
    assert 1 not in world.settled
    world.advance(0.2)
    assert world.settled == {1: None}
    assert world.engine.missing_sources == {"host"}
    assert world.attached.keys() == {1}


def test_what_an_isolated_endpoint_learns_is_its_own() -> None:
    """`learn: per-endpoint`: neither opens what the other asked for; without it both do."""
    world = World()
    world.start(allow("a.example."), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    world.add_endpoint(3, "192.0.2.13", isolated=True)
    world.resolve("a.example.", A, endpoint=1)
    world.resolve("a.example.", B, endpoint=3)
    assert [world.passes(A, endpoint=e) for e in (1, 2, 3)] == [True, True, False]
    assert [world.passes(B, endpoint=e) for e in (1, 2, 3)] == [False, False, True]
    world.remove_endpoint(3)
    assert not any(key.scope > 1 for key in world.kernel.rows[Table.IPCACHE])  # type: ignore[union-attr]


def test_audit_passes_every_question_and_learns_only_what_is_allowed() -> None:
    """A name no policy allows is forwarded and opens nothing; an allowed one is learned as ever."""
    world = World()
    world.start(allow("a.example."), endpoints={1: "192.0.2.11"})
    world.add_endpoint(2, "192.0.2.12", audit=True)
    assert world.resolve("b.example.", B, endpoint=2).addresses == [B]
    assert "b.example." not in world.engine.dns_cache.scopes_by_name
    assert world.resolve("a.example.", A, endpoint=2).addresses == [A]
    assert world.passes(A, endpoint=1)


# --- upstreams --------------------------------------------------------------------------------------------------------------


def test_upstreams_are_tried_in_turn() -> None:
    """A refusal, a SERVFAIL and a silence each lead to the next; the last one's answer is the client's."""
    world = started(allow("a.example."), settings=Settings(upstreams=(UPSTREAM, SECOND)))
    world.auto = True
    refused = world.ask("a.example.")
    number = world.transaction_of(refused)
    assert number is not None
    assert world.asked[number].server == UPSTREAM.address
    world.handle(UpstreamFailed(number, "connection refused"))
    assert world.asked[number].server == SECOND.address
    world.reply(refused, A)
    assert world.answer_of(refused).addresses == [A]
    broken = world.ask("a.example.")
    world.reply(broken, rcode="SERVFAIL")
    world.reply(broken, B)
    assert world.answer_of(broken).addresses == [B]
    silent = world.ask("a.example.")
    world.advance(1.6)
    world.reply(silent, C)
    assert world.answer_of(silent).addresses == [C]
    assert not left_over(world)


def test_no_upstream_answers() -> None:
    """SERVFAIL before four seconds are over, and a reply that comes later teaches nothing."""
    world = started(allow("a.example."))
    world.auto = True
    asker = world.ask("a.example.")
    number = world.transaction_of(asker)
    assert number is not None
    asked = world.asked[number]
    world.advance(3.7)
    assert not world.answers_of(asker)
    world.advance(0.2)
    assert world.answer_of(asker).rcode == "SERVFAIL"
    world.handle(Reply(number, asked.message))
    world.asked[number] = asked
    world.reply(asker, A)
    assert len(world.answers_of(asker)) == 1
    assert not world.engine.dns_cache.lifetimes
    assert not left_over(world)


def test_a_second_copy_of_a_reply_is_late() -> None:
    """The network may bring it twice: one answer, and the second teaches nothing."""
    world = started(allow("a.example."))
    asker = world.ask("a.example.")
    number = world.transaction_of(asker)
    assert number is not None
    asked = world.asked[number]
    world.reply(asker, A)
    world.asked[number] = asked
    world.reply(asker, B)
    write_out(world)
    assert world.answer_of(asker).addresses == [A]
    assert not world.passes(B)


def test_who_is_gone_is_not_answered() -> None:
    """The client's connection closed, or its endpoint went: nothing is sent, nothing is left."""
    world = started(allow("a.example."), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    gone = world.ask("a.example.", protocol=PROTOCOL_TCP)
    world.reply(gone, A)
    ask_and_reply(world, "a.example.", B, endpoint=2)
    world.handle(AskerGone(gone))
    world.handle(EndpointRemoved(2))
    write_out(world)
    world.advance(5.0)
    assert not world.answers
    assert world.passes(A), "its row was asked for all the same"
    assert not left_over(world)


def test_open_questions_are_bounded_for_each_endpoint() -> None:
    """Over the bound: SERVFAIL at once, for this endpoint alone."""
    settings = Settings(upstreams=(UPSTREAM,), open_questions_per_endpoint_max=2)
    world = started(allow("a.example."), settings=settings, endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    askers = [world.ask("a.example.") for _ in range(3)]
    assert [len(world.answers_of(asker)) for asker in askers] == [0, 0, 1]
    assert world.answer_of(askers[2]).rcode == "SERVFAIL"
    assert not world.answers_of(world.ask("a.example.", endpoint=2))


def test_a_question_from_an_address_of_nobody_is_not_answered() -> None:
    """The datapath compared the source with the interface; what is left is not ours."""
    world = started(allow("a.example."))
    world.handle(Query(99, packed("192.0.2.99"), packed("203.0.113.1"), 53, PROTOCOL_UDP, b"\0" * 12))
    assert not world.answers
    assert not world.asked


# --- lifetimes --------------------------------------------------------------------------------------------------------------


def test_a_lifetime_ends_and_is_inclusive() -> None:
    """The floor is sixty seconds; the row goes after it, the identity after a pass over the flows."""
    world = World()
    world.start(allow("a.example."))
    world.resolve("a.example.", A, ttl=5)
    world.advance(60.0)
    assert world.passes(A)
    world.advance(0.1)
    assert not world.passes(A)
    world.advance(11.0)
    assert not world.engine.dns_cache.lifetimes
    assert world.resolve("a.example.", A).addresses == [A]
    assert world.passes(A)


def test_an_answer_prolongs_a_lifetime_and_never_cuts_it() -> None:
    """Each address of a name has its own."""
    world = World()
    world.start(allow("a.example."))
    world.resolve("a.example.", A, ttl=300)
    world.resolve("a.example.", B, ttl=60)
    world.advance(50.0)
    world.resolve("a.example.", B, A, ttl=60)
    world.advance(59.0)
    assert (world.passes(A), world.passes(B)) == (True, True)
    world.advance(2.0)
    assert (world.passes(A), world.passes(B)) == (True, False)
    world.advance(190.0)
    assert not world.passes(A)


@pytest.mark.parametrize(("clamps", "ttl"), [(False, 3600), (True, 299)])
def test_a_clamped_ttl_ends_with_the_lifetime(clamps: bool, ttl: int) -> None:
    """What the client may keep for so long is open for so long, though its reply was held for half a second; by default TTLs
    pass unchanged."""
    world = started(allow("a.example."), settings=Settings(upstreams=(UPSTREAM,), ttl_cap_s=300.0, clamp_ttl=clamps))
    asker = ask_and_reply(world, "a.example.", A, ttl=3600)
    world.advance(0.5)
    write_out(world)
    world.auto = True
    assert [rrset.ttl for rrset in world.answer_of(asker).message.answer] == [ttl]
    world.advance(299.0)
    assert world.passes(A)
    world.advance(1.0)
    assert not world.passes(A)


def test_a_flow_keeps_an_address_open_for_at_most_an_hour_past_its_lifetime() -> None:
    """Seen in the last minute: it stays. A minute after the last packet it goes; and after an hour whatever is seen."""
    world = World()
    world.start(allow("a.example."))
    world.resolve("a.example.", A)
    world.resolve("a.example.", B)
    for _ in range(4):
        world.last_seen[1, packed(A)] = world.last_seen[1, packed(B)] = world.now
        world.advance(50.0)
    assert world.passes(A)
    for _ in range(90):
        world.last_seen[1, packed(B)] = world.now
        world.advance(40.0)
        assert not world.passes(A) or world.now - world.last_seen[1, packed(A)] <= 61
    assert not world.passes(A)
    assert not world.passes(B), "an hour past its lifetime"
    assert not world.engine._ending


def test_a_lifetime_that_ends_before_the_first_policies_of_a_restart_is_kept_by_its_flow() -> None:
    """Nobody wants the name yet, but the sets of the process before do, and new flows to the address go on (I7)."""
    world = World()
    world.start(allow("a.example."))
    world.resolve("a.example.", A, ttl=60)
    world.resolve("a.example.", B, ttl=60)
    world.advance(59.0)
    world.last_seen[1, packed(A)] = world.now
    restored, *rest = world.die()
    world.handle(restored)
    world.advance(2.0)
    for event in rest:
        world.handle(event)
    world.advance(2.0)
    assert (world.passes(A), world.passes(B)) == (True, False)


def test_an_identity_outlives_its_rows_while_a_flow_remembers_it() -> None:
    """Its policy rows are what the flow's second judgement reads (I4)."""
    world = World()
    world.start(allow("a.example.", "b.example."))
    world.resolve("a.example.", A)
    world.resolve("b.example.", A)
    (identity,) = {world.kernel.identity_of(1, packed(A))}
    world.remembered.add(identity)
    world.advance(100.0)
    assert not world.passes(A)
    rows = [key for key in world.kernel.rows[Table.POLICY] if key.identity == identity]  # type: ignore[union-attr]
    assert rows
    world.remembered.clear()
    world.advance(11.0)
    assert not any(key.identity == identity for key in world.kernel.rows[Table.POLICY])  # type: ignore[union-attr]
    world.resolve("a.example.", A)
    world.resolve("b.example.", A)
    assert world.kernel.identity_of(1, packed(A)) > identity, "a number is never given twice"


def test_two_names_on_one_address_do_not_fight() -> None:
    """Each takes back only its own; the ports of both are open while both live."""
    world = World()
    world.start(allow("a.example.", port=443), allow("b.example.", port=80))
    world.resolve("a.example.", A, ttl=60)
    world.resolve("b.example.", A, ttl=120)
    assert (world.passes(A, 443), world.passes(A, 80)) == (True, True)
    world.advance(61.0)
    assert (world.passes(A, 443), world.passes(A, 80)) == (False, True)
    world.advance(60.0)
    assert (world.passes(A, 443), world.passes(A, 80)) == (False, False)


def test_a_thousand_addresses_behind_one_name_need_one_identity() -> None:
    """A row for each address, and no more policy rows than for one."""
    world = World()
    world.start(allow("a.example."))
    before = len(world.kernel.rows[Table.POLICY])
    for first in range(0, 1_000, 20):
        world.resolve("a.example.", *(f"198.18.{n // 250}.{n % 250 + 1}" for n in range(first, first + 20)))
    assert world.passes("198.18.3.250")
    assert len(world.kernel.rows[Table.POLICY]) == before
    assert len(world.engine.identities) == 4  # host, world, the endpoint, the selector's


def test_denials_beat_learned_names() -> None:
    """Deny beats allow at every specificity; an excepted network is a hole in an allow, and no denial."""
    hole = Rule(Direction.EGRESS, (Cidr(Prefix.parse("192.0.2.0/24"), (Prefix.parse("192.0.2.102/32"),)),), None)
    world = World()
    policy = allow("a.example.", deny=("192.0.2.101/32",))
    world.start(replace(policy, rules=(*policy.rules, hole)))
    world.resolve("a.example.", A, B)
    assert not world.passes(A)
    assert world.passes(B, 443), "the name opens what the network leaves out"
    assert not world.passes(B, 80)
    assert world.passes(C, 80)


def own_server(*names: str) -> Policy:
    """Endpoint e2 may reach these names, and asks a server that its policy names itself."""
    dns = Rule(
        Direction.EGRESS,
        (Cidr(Prefix.parse("203.0.113.9/32")),),
        (Ports(PROTOCOL_UDP, 53, 53), Ports(PROTOCOL_TCP, 53, 53)),
        names=("*",),
        origin=Origin("own", 9),
    )
    reach = allow(*names, app="e2", name="own")
    return replace(reach, rules=(*reach.rules, dns))


def test_a_server_the_policy_names_no_longer_teaches_nobody() -> None:
    """It answers after the rule is gone: what it said is not looked at, the agent's upstream is asked, and that teaches."""
    both = {1: "192.0.2.11", 2: "192.0.2.12"}
    shared = allow("a.example.", app="e1", name="one")
    world = started(shared, own_server("a.example."), endpoints=both)
    world.auto = True
    asker = world.ask("a.example.", endpoint=2, server="203.0.113.9")
    number = world.transaction_of(asker)
    assert number is not None
    assert world.asked[number].server == packed("203.0.113.9")
    world.apply(shared, allow("a.example.", app="e2", name="two"))
    world.reply(asker, "198.51.100.66")
    assert world.answers_of(asker) == []
    assert not any(world.passes("198.51.100.66", endpoint=endpoint) for endpoint in both)
    assert world.asked[number].server == UPSTREAM.address
    world.reply(asker, "198.51.100.7")
    assert world.answer_of(asker).addresses == ["198.51.100.7"]
    assert world.passes("198.51.100.7", endpoint=2)


def test_what_such_a_server_said_is_not_learned_with_a_failure_either() -> None:
    """The agent's upstreams fail: the client gets SERVFAIL, and the addresses said before open nothing (I8)."""
    both = {1: "192.0.2.11", 2: "192.0.2.12"}
    shared = allow("a.example.", app="e1", name="one")
    world = started(shared, own_server("a.example."), settings=Settings(upstreams=(UPSTREAM, SECOND)), endpoints=both)
    world.auto = True
    asker = world.ask("a.example.", endpoint=2, server="203.0.113.9")
    world.apply(shared, allow("a.example.", app="e2", name="two"))
    world.reply(asker, "198.51.100.66")
    world.reply(asker, rcode="SERVFAIL")
    world.advance(4.0)
    assert world.answer_of(asker).rcode == "SERVFAIL"
    assert not any(world.passes("198.51.100.66", endpoint=endpoint) for endpoint in both)
    assert not len(world.engine.dns_cache)


def test_policies_of_before_are_kept_by_nobody() -> None:
    """However often they change, and whoever is gone: what was told by them is forgotten with them."""
    world = World(Settings(upstreams=(UPSTREAM,)))
    world.start(allow("*.example."), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    for number in range(20):
        for endpoint in (1, 2):
            for _ in range(2):
                world.resolve(f"n{number}.example.", "198.51.100.7", endpoint=endpoint)
        world.apply(allow("*.example.", port=1_000 + number), allow("*.test.", app="e2", port=number, name="q"))
        world.advance(2.0)
    held = [told.compiled for told in world.engine.proxy._told.values()]
    in_force = [group.compiled for group in world.engine.groups.groups.values()]
    assert all(any(one is compiled for compiled in in_force) for one in held)
    for _ in range(2):
        world.resolve("n.example.", "198.51.100.7", endpoint=2)
    world.remove_endpoint(2)
    assert not any(endpoint == 2 for endpoint, _ in world.engine.proxy._told)


def test_a_reply_for_a_name_that_is_denied_meanwhile_is_the_denied_answer() -> None:
    """The question was allowed, the policy changed, then the upstream answered."""
    world = started(allow("a.example.", "b.example."))
    world.auto = True
    asker = world.ask("b.example.")
    world.apply(allow("a.example."))
    world.reply(asker, "198.51.100.8")
    assert world.answer_of(asker).rcode == "NXDOMAIN"
    assert not world.passes("198.51.100.8")


def reply_by_alias(world: World, asker: int, target: str, address: str, ttl: int) -> None:
    number = world.transaction_of(asker)
    assert number is not None
    query = dns.message.from_wire(world.asked[number].message)
    response = dns.message.make_response(query)
    response.answer.append(dns.rrset.from_text(query.question[0].name, ttl, "IN", "CNAME", target))
    response.answer.append(dns.rrset.from_text(target, ttl, "IN", "A", address))
    world.handle(Reply(number, response.to_wire()))


@pytest.mark.parametrize("follows", [False, True])
def test_a_target_asked_directly_is_judged_alone_or_by_the_name_that_led_to_it(follows: bool) -> None:
    """Case 21: by default denied; with `cname: follow` answered, credited to the name that led there, until that ended."""
    settings = Settings(upstreams=(UPSTREAM,), follow_cnames=follows)
    world = started(allow("www.a.example."), settings=settings)
    world.auto = True
    assert world.answer_of(world.ask("edge.cdn.example.")).rcode == "NXDOMAIN"
    asker = world.ask("www.a.example.")
    reply_by_alias(world, asker, "edge.cdn.example.", "198.51.100.30", ttl=120)
    assert world.passes("198.51.100.30")
    world.advance(10)
    asker = world.ask("edge.cdn.example.")
    if follows:
        world.reply(asker, "198.51.100.31", ttl=120)
        assert world.answer_of(asker).addresses == ["198.51.100.31"]
        assert {pair.name for pair in world.engine.names.cache.lifetimes} == {"www.a.example."}
    else:
        assert world.answer_of(asker).rcode == "NXDOMAIN"
    assert world.passes("198.51.100.31") is follows
    world.advance(600)
    assert world.answer_of(world.ask("edge.cdn.example.")).rcode == "NXDOMAIN"
    assert not world.passes("198.51.100.31")
