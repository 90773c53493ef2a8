"""Groups and the flip: how policies change without a moment that neither the old nor the new one allows.

    prepare  compile; register new selectors and prefixes; new sets' rows for every identity; new groups' rows; what is known
             already gets the labels of new selectors and prefixes
             wait: all of that is realized, and every ipcache row that changed by it
    flip     one row of `groups` for each group whose set changes, one of `endpoints` for each endpoint that moves
             wait: realized; from here the questions are judged by the new policies too
    later    a second after, when no program run can still hold an old set's number: old sets, selectors and prefixes go

What comes before the flip and after it is done a slice at a time, between other people's questions (`go_on`). Endpoints and
names may come and go between two slices: who came since a change began is in the next one.

Only the flip changes a verdict: before it no set in force names the new labels, after it none names the old ones. In-place
edits are not safe in any order of tables (docs/ARCHITECTURE.md, I5 and I6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from agent.core.barrier import Barrier
from agent.core.events import EndpointAdded
from agent.core.identity import NoRoom
from agent.core.inherited import InheritedSets
from agent.core.ipcache import RESOURCE_POLICY, Ipcache
from agent.core.known_bad import KnownBad
from agent.core.multimap import MultiMap
from agent.core.name_manager import NameManager
from agent.core.policy import CompiledPolicy, Cookies, compile_policies, endpoint_label_set
from agent.core.reconciler import Reconciler
from agent.core.rules import Fqdn, Policy
from agent.core.sets import PolicySets
from agent.core.tables import RowReference
from agent.core.types import (
    SCOPE_OWN_FIRST,
    SCOPE_SHARED,
    SCOPE_STATIC,
    Address,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    OwnAddressKey,
    Prefix,
    address_key,
)

# A program run that has read a set's number is over long before: runs take microseconds.
RETIRE_AFTER_S = 1.0
# When endpoints changed and there was no room for what that needs, there may be by then.
TRY_AGAIN_AFTER_S = 1.0


@dataclass(slots=True)
class Group:
    number: int
    set: int
    compiled: CompiledPolicy


@dataclass(slots=True)
class Endpoint:
    """An endpoint as it is judged now. `group` is None until its first flip."""

    added: EndpointAdded
    scope: int
    group: Group | None = None
    is_attached: bool = False

    @property
    def compiled(self) -> CompiledPolicy | None:
        return self.group.compiled if self.group is not None else None


@dataclass(slots=True)
class _Plan:
    """A change under way."""

    policies: tuple[Policy, ...]
    tickets: list[Hashable]
    groups: dict[int, Group] = field(default_factory=dict)  # endpoint -> its group after the flip, with its set after the flip
    scopes: dict[int, int] = field(default_factory=dict)
    new_sets: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)  # with new_sets and fqdns: what to take back if it fails
    fqdns: list[Fqdn] = field(default_factory=list)
    preparing: deque[Iterator[int]] = field(default_factory=deque)  # what is left of it, as in `Groups`
    barrier: Barrier = field(default_factory=lambda: Barrier(must_be_present=False))
    no_room: str | None = None
    is_flipping: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought about: endpoints judged anew, endpoints ready to be attached, tickets settled (error or None)."""

    judged_anew: frozenset[int] = frozenset()
    to_attach: tuple[Endpoint, ...] = ()
    settled: tuple[tuple[Hashable, str | None], ...] = ()
    sets: tuple[int, ...] = ()


class Groups:
    def __init__(
        self,
        reconciler: Reconciler,
        sets: PolicySets,
        names: NameManager,
        ipcache: Ipcache,
        inherited: InheritedSets,
        cookies: Cookies,
        known_bad: frozenset[KnownBad] = frozenset(),
    ) -> None:
        self.endpoints: dict[int, Endpoint] = {}
        self.endpoint_by_address: dict[Address, int] = {}
        self._also_from: MultiMap[Address, int] = MultiMap()  # the host's addresses to the uplinks that send from them too
        self.policies: tuple[Policy, ...] = ()
        self.groups: dict[int, Group] = {}
        self._reconciler = reconciler
        self._sets = sets
        self._names = names
        self._ipcache = ipcache
        self._inherited = inherited
        self._cookies = cookies
        self._known_bad = known_bad
        self.next_group = 1
        self.has_inherited = False  # rows of the process before are in the kernel, and nothing of ours is in force yet
        self.let_inherited_go_at: float | None = None
        self._prefix_users: dict[Prefix, int] = {}
        self._requested: tuple[Policy, ...] | None = None
        self._tickets: list[Hashable] = []
        self._plan: _Plan | None = None
        self._is_stale = False  # something changed since the last plan began
        self._try_again_at: float | None = None
        self._retiring: list[tuple[float, int | None, int | None, int | None]] = []  # at, set, group, scope
        # Work that is left, step by step with what each costs in rows. What ends gives room that the next plan may need; what
        # leaves is seen by nobody, and may be a great deal.
        self._ending: deque[Iterator[int]] = deque()
        self._leaving: deque[Iterator[int]] = deque()
        self._is_inheriting = False

    # --- what can be asked for ---------------------------------------------------------------------------------------

    def change_policies(self, policies: tuple[Policy, ...] | None, ticket: Hashable) -> None:
        """These policies from now on (None: those there are); the ticket is settled by a later step."""
        if policies is not None:
            self._requested = policies
        self._is_stale = True
        self._tickets.append(ticket)

    def add_endpoint(self, added: EndpointAdded) -> str | None:
        """A new endpoint, or what is new about a known one; gives back a sentence if it cannot be."""
        for address in added.addresses:
            owner = self.endpoint_by_address.get(address, added.endpoint)
            if owner != added.endpoint:
                return (
                    f"address {Prefix.of(address)} of {added.interface} is endpoint {self.endpoints[owner].added.interface}'s"
                )
        known = self.endpoints.get(added.endpoint)
        if known is None:
            self.endpoints[added.endpoint] = Endpoint(added, self._inherited_scope(added) or self._scope(added, None))
            self._is_stale = True
        else:
            before, known.added = known.added, added
            self._take_addresses_back(before, added.addresses, added.also_from)
            alike = replace(before, interface=added.interface, addresses=added.addresses, also_from=added.also_from)
            self._is_stale |= alike != added
        labels = endpoint_label_set(added.labels)
        for address in added.addresses:
            key = address_key(SCOPE_STATIC, address)
            self.endpoint_by_address[address] = added.endpoint
            self._ipcache.upsert(key, f"endpoint:{added.endpoint}", labels, beyond_bound=True)
        for address in added.also_from:
            self._also_from.add(address, added.endpoint)
        for address in (*added.addresses, *added.also_from):
            self._reconciler.own_addresses.want(OwnAddressKey(added.endpoint, address), True)
        return None

    def remove_endpoint(self, endpoint: int) -> Endpoint | None:
        """Its rows go, and its group if nobody else is in it."""
        removed = self.endpoints.pop(endpoint, None)
        if removed is None:
            return None
        self._reconciler.endpoints.drop(removed.added.ifindex)
        planned = self._plan.scopes.get(endpoint, SCOPE_SHARED) if self._plan is not None else SCOPE_SHARED
        self._take_addresses_back(removed.added, (), ())
        for scope in {removed.scope, planned} - {SCOPE_SHARED}:
            self._leaving.append(self._forget(scope))
        self._work_off(self._leaving)
        self._is_stale = True
        return removed

    def _take_addresses_back(
        self, before: EndpointAdded, addresses: tuple[Address, ...], also_from: tuple[Address, ...]
    ) -> None:
        """All but these, which it keeps."""
        endpoint, kept, may_send_from = before.endpoint, set(addresses), {*addresses, *also_from}
        for address in before.addresses:
            if address not in kept and self.endpoint_by_address.get(address) == endpoint:
                del self.endpoint_by_address[address]
                self._ipcache.remove(address_key(SCOPE_STATIC, address), f"endpoint:{endpoint}")
        for address in before.also_from:
            if address not in also_from:
                self._also_from.discard(address, endpoint)
        for address in (*before.addresses, *before.also_from):
            if address not in may_send_from:
                self._reconciler.own_addresses.drop(OwnAddressKey(endpoint, address))

    def endpoint_at(self, address: Address) -> int | None:
        """Who sends from this address; an uplink where it is the host's and no endpoint's own."""
        endpoint = self.endpoint_by_address.get(address)
        if endpoint is not None:
            return endpoint
        return next(iter(self._also_from.of(address)), None)

    def scopes_of(self, endpoint: int) -> tuple[int, ...]:
        """Where the endpoint's answers are learned: its scope, and the one it is about to have."""
        scope = self.endpoints[endpoint].scope
        planned = self._plan.scopes.get(endpoint, scope) if self._plan is not None else scope
        return (scope,) if planned == scope else (scope, planned)

    # --- the change ----------------------------------------------------------------------------------------------------

    @property
    def can_step(self) -> bool:
        """Is there something to do that waits for nobody?"""
        plan = self._plan
        if plan is None:
            return self._is_stale and not self._ending
        return plan.no_room is not None or plan.barrier.error is not None or (not plan.preparing and plan.barrier.is_met)

    @property
    def is_behind(self) -> bool:
        """Is there more for `go_on`?"""
        preparing = self._plan.preparing if self._plan is not None else None
        return bool(preparing or self._ending or self._leaving) or self._names.is_leaving

    @property
    def is_inheriting(self) -> bool:
        """Is there anything that only the process before wanted?"""
        return self.has_inherited or self._is_inheriting

    def go_on(self) -> None:
        """One slice of the work that is left."""
        if self._plan is not None and self._plan.preparing:
            self._prepare_more(self._plan)
        elif self._ending:
            self._work_off(self._ending)
        elif self._names.is_leaving:
            self._names.match_gone()
        elif self._leaving:
            self._work_off(self._leaving)

    def _prepare_more(self, plan: _Plan) -> None:
        try:
            self._work_off(plan.preparing)
        except NoRoom as error:
            plan.preparing.clear()
            plan.no_room = str(error)

    def _work_off(self, left: deque[Iterator[int]]) -> None:
        """One slice of it."""
        rows_left = self._sets.rows_at_once
        while left and rows_left > 0:
            cost = next(left[0], None)
            if cost is None:
                left.popleft()
            else:
                rows_left -= cost

    def step(self, now: float) -> Outcome:
        """Go on as far as the kernel's answers allow."""
        self._retire_due(now)
        plan = self._plan
        if plan is None:
            if not self.can_step:
                return Outcome()
            # Without a request: the same policies, judged for the endpoints there are now.
            plan = _Plan(self._requested if self._requested is not None else self.policies, self._tickets)
            self._requested, self._tickets = None, []
            self._is_stale, self._try_again_at = False, None
            self._plan = plan
            plan.preparing.append(self._prepare(plan, now))
            self._prepare_more(plan)
        if not plan.is_flipping:
            error_text = plan.no_room or plan.barrier.error
            if error_text is not None:
                return self._abort(plan, error_text, now)
            if plan.preparing or not plan.barrier.is_met:
                return Outcome()
            self._flip(plan)
        if plan.barrier.error is not None:
            # Some endpoints may be judged by the new policies already, so there is no way back: the rows are tried on, and who
            # waits hears of it.
            outcome = Outcome(settled=tuple((ticket, plan.barrier.error) for ticket in plan.tickets))
            plan.tickets = []
            plan.barrier = self._reconciler.barriers.take(self._flip_rows(plan))
            return outcome
        return self._finish(plan, now) if plan.barrier.is_met else Outcome()

    def _prepare(self, plan: _Plan, now: float) -> Iterator[int]:
        """Everything the flip needs, for the endpoints there are now. Raises NoRoom."""
        endpoints = dict(self.endpoints)
        labels = [endpoint.added.labels for endpoint in endpoints.values()]
        # By places in the policies, or by an endpoint's own: those of thousands of endpoints are not compared one by one.
        compiled_by_key: dict[tuple[frozenset[int] | tuple[Policy, ...], bool], CompiledPolicy] = {}
        members: dict[CompiledPolicy, list[Endpoint]] = {}
        for endpoint in endpoints.values():
            own, audit = endpoint.added.policies, endpoint.added.audit
            key: tuple[frozenset[int] | tuple[Policy, ...], bool]
            if own is None:
                selecting = frozenset(i for i, policy in enumerate(plan.policies) if policy.selects(endpoint.added.labels))
                yield 1 + len(plan.policies) // 8
                key, policies = (selecting, audit), [plan.policies[i] for i in sorted(selecting)]
            else:
                yield 1 + sum(len(policy.rules) for policy in own) // 8
                key, policies = (own, audit), list(own)
            if key not in compiled_by_key:
                compiled_by_key[key] = yield from compile_policies(policies, self._cookies, labels, audit=audit)
            members.setdefault(compiled_by_key[key], []).append(endpoint)
        unclaimed = {group.compiled: group for group in self.groups.values()}
        for compiled in [compiled for compiled in members if compiled in unclaimed]:
            self._assign(plan, unclaimed.pop(compiled), members.pop(compiled))
        members_left: dict[int, set[int]] = {}  # of groups whose policies are none of these any more
        for number, endpoint in endpoints.items():
            if endpoint.group is not None and endpoint.group.compiled in unclaimed:
                members_left.setdefault(endpoint.group.number, set()).add(number)
        self._sets.refuse_what_cannot_fit(members)
        yield from self._register(plan, list(members))
        for compiled, of_group in members.items():
            group_number = self._group_to_flip(members_left, of_group, compiled)
            if KnownBad.EDIT_IN_PLACE in self._known_bad and group_number is not None:
                policy_set, filling = self._edit_set_in_place(self.groups[group_number], compiled)
            else:
                created = self._sets.create(compiled)
                policy_set, filling = created.number, self._sets.fill(created)
                plan.new_sets.append(policy_set)
            for rows in filling:
                self._await(plan, rows)
                yield 1 + len(rows)
            if group_number is None:
                group_number, self.next_group = self.next_group, self.next_group + 1
                self._await(plan, [self._reconciler.groups.want(group_number, _group_value(policy_set, compiled))])
            self._assign(plan, Group(group_number, policy_set, compiled), of_group)
        for endpoint in endpoints.values():
            self._await(plan, self._rows_of_new(endpoint))
            yield 1
        if not self.groups:
            # At start: nobody is judged before the host's and everybody's addresses are known to the kernel.
            table = self._reconciler.ipcache
            static = [key for key in table.pending if isinstance(key, IpcacheKey) and key.scope == SCOPE_STATIC]
            self._await(plan, map(table.reference, static))
        # Endpoints that get a scope of their own find in it what their selectors hold.
        for number, scope in plan.scopes.items():
            if number in self.endpoints and scope not in (SCOPE_SHARED, endpoints[number].scope):
                fqdn_labels = plan.groups[number].compiled.fqdn_labels
                for rows in self._names.copy_scope(SCOPE_SHARED, scope, fqdn_labels, now):
                    self._await(plan, rows)
                    yield 1 + 4 * len(rows)
                    if number not in self.endpoints:
                        break

    def _register(self, plan: _Plan, compiled: list[CompiledPolicy]) -> Iterator[int]:
        """Everything the new sets name, before any of them is built, and what that means for what is known. Raises NoRoom."""
        new: list[Prefix] = []
        for one in compiled:
            for prefix in sorted(one.prefixes):
                row = self._ipcache.upsert(IpcacheKey(SCOPE_STATIC, prefix), RESOURCE_POLICY, frozenset({f"cidr:{prefix}"}))
                if prefix not in self._prefix_users:
                    new.append(prefix)
                self._prefix_users[prefix] = self._prefix_users.get(prefix, 0) + 1
                plan.prefixes.append(prefix)
                self._await(plan, [row])
                yield 2
        for fqdn in self._names.registering(fqdn for one in compiled for fqdn in one.fqdns):
            plan.fqdns.append(fqdn)
            yield 5
        is_coming = self._names.is_coming
        while is_coming:
            rows = self._names.match_coming()
            self._await(plan, rows)
            is_coming = self._names.is_coming
            yield self._sets.rows_at_once if is_coming else 1 + 3 * len(rows)
        for row in self._ipcache.resolve_inside(new, beyond_bound=False):
            self._await(plan, [row])
            yield 2

    def _await(self, plan: _Plan, rows: Iterable[RowReference]) -> None:
        self._reconciler.barriers.add(plan.barrier, rows)

    def _rows_of_new(self, endpoint: Endpoint) -> list[RowReference]:
        """Of one that is judged by nothing yet: where it may send from, and who it is."""
        if endpoint.group is not None:
            return []
        added = endpoint.added
        rows = [self._reconciler.own_addresses.reference(OwnAddressKey(added.endpoint, each)) for each in added.addresses]
        return rows + [self._ipcache.reference(address_key(SCOPE_STATIC, each)) for each in added.addresses]

    def _assign(self, plan: _Plan, group: Group, members: list[Endpoint]) -> None:
        for endpoint in members:
            plan.groups[endpoint.added.endpoint] = group
            plan.scopes[endpoint.added.endpoint] = self._scope(endpoint.added, group.compiled)

    def _group_to_flip(
        self, members_left: dict[int, set[int]], members: list[Endpoint], compiled: CompiledPolicy
    ) -> int | None:
        """A group that is free, and all of whose members get the new set: one row flips them all.

        None where a scope changes too: set and scope would be two rows, and what lies between them is neither the state before
        nor the one after. A new group makes it one row for each endpoint.
        """
        if any(each.group is not None and each.scope != self._scope(each.added, compiled) for each in members):
            return None
        wanted = {each.added.endpoint for each in members}
        for number in dict.fromkeys(each.group.number for each in members if each.group is not None):
            if number in members_left and members_left[number] <= wanted:
                del members_left[number]
                return number
        return None

    def _edit_set_in_place(self, group: Group, compiled: CompiledPolicy) -> tuple[int, Iterator[list[RowReference]]]:
        """The mistake that the flip prevents (known_bad.py)."""
        for _ in self._end(None, group.compiled.fqdns, group.compiled.prefixes):
            pass
        return group.set, self._sets.edit_in_place(group.set, compiled)

    def _flip(self, plan: _Plan) -> None:
        for group in {group.number: group for group in plan.groups.values()}.values():
            self._reconciler.groups.want(group.number, _group_value(group.set, group.compiled))
        for number, group in plan.groups.items():
            endpoint = self.endpoints.get(number)
            if endpoint is not None:
                added = endpoint.added
                value = EndpointValue(number, group.number, plan.scopes[number], added.orientation, added.dhcp, added.silent)
                self._reconciler.endpoints.want(added.ifindex, value)
        plan.is_flipping = True
        plan.barrier = self._reconciler.barriers.take(self._flip_rows(plan))

    def _flip_rows(self, plan: _Plan) -> list[RowReference]:
        rows = [self._reconciler.groups.reference(number) for number in {group.number for group in plan.groups.values()}]
        ifindexes = [self.endpoints[number].added.ifindex for number in plan.groups if number in self.endpoints]
        return rows + [self._reconciler.endpoints.reference(ifindex) for ifindex in ifindexes]

    def _finish(self, plan: _Plan, now: float) -> Outcome:
        self._plan = None
        self.policies = plan.policies
        judged_anew, to_attach = set(), []
        before = self.groups
        self.groups = {group.number: group for group in plan.groups.values()}
        for number, group in plan.groups.items():
            endpoint = self.endpoints.get(number)
            if endpoint is None:
                continue
            if endpoint.group is None or endpoint.group.set != group.set or endpoint.scope != plan.scopes[number]:
                judged_anew.add(number)
            if endpoint.scope not in (SCOPE_SHARED, plan.scopes[number]):
                self._retiring.append((now + RETIRE_AFTER_S, None, None, endpoint.scope))
            endpoint.group, endpoint.scope = self.groups[group.number], plan.scopes[number]
            if not endpoint.is_attached:
                endpoint.is_attached = True
                to_attach.append(endpoint)
        if self.has_inherited:
            self.has_inherited, self._is_inheriting = False, True
            self._ipcache.row_follows = None
            self.let_inherited_go_at = now + RETIRE_AFTER_S
        in_force = {group.set for group in self.groups.values()}
        for group in before.values():
            set_ends, group_ends = group.set not in in_force, group.number not in self.groups
            if set_ends or group_ends:
                self._retiring.append(
                    (now + RETIRE_AFTER_S, group.set if set_ends else None, group.number if group_ends else None, None)
                )
        return Outcome(
            frozenset(judged_anew), tuple(to_attach), tuple((ticket, None) for ticket in plan.tickets), tuple(in_force)
        )

    def _abort(self, plan: _Plan, error: str, now: float) -> Outcome:
        """Nothing in force was touched: what was prepared goes, the policies in force stay."""
        plan.preparing.clear()
        self._reconciler.barriers.cancel(plan.barrier)
        self._names.stop_coming()
        self._ending += (self._end(number, (), ()) for number in plan.new_sets)
        self._ending.append(self._end(None, plan.fqdns, plan.prefixes))
        for number in {group.number for group in plan.groups.values()} - set(self.groups):
            self._reconciler.groups.drop(number)
        retiring = {scope for *_, scope in self._retiring}
        self._leaving += (self._forget(scope) for scope in sorted(set(plan.scopes.values()) - retiring - {SCOPE_SHARED}))
        self._plan = None
        self._work_off(self._ending)
        if plan.policies is self.policies:
            self._try_again_at = now + TRY_AGAIN_AFTER_S
        else:
            self._is_stale = True  # endpoints that came meanwhile are judged by the policies in force
        return Outcome(settled=tuple((ticket, error) for ticket in plan.tickets))

    # --- later -----------------------------------------------------------------------------------------------------------

    def _retire_due(self, now: float) -> None:
        if self._try_again_at is not None and self._try_again_at <= now:
            self._is_stale, self._try_again_at = True, None
        if self.let_inherited_go_at is not None and self.let_inherited_go_at <= now:
            self.let_inherited_go_at = None
            self._leaving.append(self._let_inherited_go())
        due = [entry for entry in self._retiring if entry[0] <= now]
        if not due:
            return
        self._retiring = [entry for entry in self._retiring if entry[0] > now]
        for _, policy_set, group, scope in due:
            if group is not None:
                self._reconciler.groups.drop(group)
            if policy_set is not None:
                compiled = self._sets.by_number[policy_set].compiled
                self._ending.append(self._end(policy_set, compiled.fqdns, compiled.prefixes))
            if scope is not None:
                self._leaving.append(self._forget(scope))
        self._work_off(self._ending or self._leaving)

    def _end(self, policy_set: int | None, fqdns: Iterable[Fqdn], prefixes: Iterable[Prefix]) -> Iterator[int]:
        """A set that no group points to goes, and users of selectors and prefixes."""
        if policy_set is not None:
            yield from self._sets.retire(policy_set)
        for _ in self._names.unregistering(fqdns):
            yield 3
        self._names.match_gone()
        gone: list[Prefix] = []
        for prefix in prefixes:
            self._prefix_users[prefix] -= 1
            if not self._prefix_users[prefix]:
                del self._prefix_users[prefix]
                self._ipcache.remove(IpcacheKey(SCOPE_STATIC, prefix), RESOURCE_POLICY)
                gone.append(prefix)
            yield 2
        if gone:
            self._leaving.append(self._resolve_inside(gone))

    def _resolve_inside(self, networks: Iterable[Prefix]) -> Iterator[int]:
        for _ in self._ipcache.resolve_inside(networks, beyond_bound=True):
            yield 2

    def _let_inherited_go(self) -> Iterator[int]:
        """The first policies of this process are in force: what only the process before wanted goes."""
        for table in self._reconciler.tables.values():
            if table not in (self._reconciler.ipcache, self._reconciler.policy):
                yield from table.let_inherited_go()
        yield from self._inherited.let_go()
        yield from self._ipcache.let_inherited_go()
        for scope in sorted(self._names.scopes - {SCOPE_SHARED}):
            yield from self._forget(scope)
        self._is_inheriting = False

    def _forget(self, scope: int) -> Iterator[int]:
        """What was learned in an endpoint's own scope, unless the endpoint looks into it again."""
        owner = scope - SCOPE_OWN_FIRST
        for pair in self._names.pairs_in(scope):
            if owner in self.endpoints and scope in self.scopes_of(owner):
                return
            self._names.forget(pair)
            yield 4

    def next_deadline(self) -> float | None:
        times = [*(entry[0] for entry in self._retiring), self._try_again_at, self.let_inherited_go_at]
        return min((at for at in times if at is not None), default=None)

    def _inherited_scope(self, added: EndpointAdded) -> int | None:
        """The scope in which the process before judged it, so that nothing is learned into another one by a restart."""
        row = self._reconciler.endpoints.realized.get(added.ifindex) if self.has_inherited else None
        value = row.value if row is not None else None
        return value.scope if isinstance(value, EndpointValue) and value.endpoint == added.endpoint else None

    def _scope(self, added: EndpointAdded, compiled: CompiledPolicy | None) -> int:
        own = added.isolated or (compiled is not None and compiled.asks_named_servers)
        return SCOPE_OWN_FIRST + added.endpoint if own else SCOPE_SHARED


def _group_value(policy_set: int, compiled: CompiledPolicy) -> GroupValue:
    return GroupValue(policy_set, compiled.default_deny_egress, compiled.default_deny_ingress, compiled.audit)
