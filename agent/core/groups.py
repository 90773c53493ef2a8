"""Groups and the flip: how policies change without a moment that neither the old nor the new one allows.

    begin    compile; register new selectors and prefixes; new sets' rows for every identity; new groups' rows
    go on    names known already get the new selectors' labels, a slice at a time
             wait: all of that is realized, and every ipcache row that changed by it
    flip     one row of `groups` for each group whose set changes, one of `endpoints` for each endpoint that moves
             wait: realized; from here the questions are judged by the new policies too
    later    a second after, when no program run can still hold an old set's number: old sets, selectors and prefixes go

Only the flip changes a verdict: before it no set in force names the new labels, after it none names the old ones. In-place
edits are not safe in any order of tables (docs/ARCHITECTURE.md, I5 and I6).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from agent.core.barrier import Barrier
from agent.core.events import EndpointAdded
from agent.core.identity import NoRoom
from agent.core.inherited import InheritedSets
from agent.core.ipcache import RESOURCE_POLICY, Ipcache
from agent.core.known_bad import KnownBad
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
    prefixes_of: list[CompiledPolicy] = field(default_factory=list)  # with new_sets and fqdns: what to take back if it fails
    fqdns: list[Fqdn] = field(default_factory=list)
    barrier: Barrier = field(default_factory=lambda: Barrier(must_be_present=False))
    no_room: str | None = None  # what the names known already lacked
    has_copied: bool = False
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
        self._is_stale = False  # the endpoints changed since the last plan began
        self._try_again_at: float | None = None
        self._retiring: list[tuple[float, int | None, int | None, int | None]] = []  # at, set, group, scope

    # --- what can be asked for ---------------------------------------------------------------------------------------

    def change_policies(self, policies: tuple[Policy, ...], ticket: Hashable) -> None:
        """These policies from now on; the ticket is settled by a later step."""
        self._requested = policies
        self._tickets.append(ticket)

    def add_endpoint(self, added: EndpointAdded) -> str | None:
        """A new endpoint; gives back a sentence if it cannot be."""
        for address in added.addresses:
            owner = self.endpoint_by_address.get(address)
            if owner is not None:
                return (
                    f"address {Prefix.of(address)} of {added.interface} is endpoint {self.endpoints[owner].added.interface}'s"
                )
        self.endpoints[added.endpoint] = Endpoint(added, self._inherited_scope(added) or self._scope(added, None))
        labels = endpoint_label_set(added.labels)
        for address in added.addresses:
            key = IpcacheKey(SCOPE_STATIC, Prefix.of(address))
            self.endpoint_by_address[address] = added.endpoint
            self._ipcache.upsert(key, f"endpoint:{added.endpoint}", labels, beyond_bound=True)
            self._reconciler.own_addresses.want(OwnAddressKey(added.endpoint, address), True)
        self._is_stale = True
        return None

    def remove_endpoint(self, endpoint: int) -> Endpoint | None:
        """Its rows go, and its group if nobody else is in it."""
        removed = self.endpoints.pop(endpoint, None)
        if removed is None:
            return None
        self._reconciler.endpoints.drop(removed.added.ifindex)
        planned = self._plan.scopes.get(endpoint, SCOPE_SHARED) if self._plan is not None else SCOPE_SHARED
        for address in removed.added.addresses:
            if self.endpoint_by_address.get(address) == endpoint:
                del self.endpoint_by_address[address]
                self._ipcache.remove(IpcacheKey(SCOPE_STATIC, Prefix.of(address)), f"endpoint:{endpoint}")
            self._reconciler.own_addresses.drop(OwnAddressKey(endpoint, address))
        for scope in {removed.scope, planned} - {SCOPE_SHARED}:
            self._names.forget_scope(scope)
        self._is_stale = True
        return removed

    def scopes_of(self, endpoint: int) -> tuple[int, ...]:
        """Where the endpoint's answers are learned: its scope, and the one it is about to have."""
        scope = self.endpoints[endpoint].scope
        planned = self._plan.scopes.get(endpoint, scope) if self._plan is not None else scope
        return (scope,) if planned == scope else (scope, planned)

    # --- the change ----------------------------------------------------------------------------------------------------

    @property
    def can_step(self) -> bool:
        """Is there something to do that waits for nobody?"""
        if self._plan is None:
            return self._requested is not None or self._is_stale
        plan = self._plan
        return plan.no_room is not None or (plan.barrier.is_over and not (self._names.is_coming and plan.barrier.is_met))

    @property
    def is_behind(self) -> bool:
        """Is there more for `go_on`?"""
        return self._names.is_coming or self._names.is_leaving

    def go_on(self) -> None:
        """One slice of what selectors that came or went mean for names that are known."""
        if self._plan is None or not self._names.is_coming:
            self._names.match_gone()
            return
        try:
            self._reconciler.barriers.add(self._plan.barrier, self._names.match_coming())
        except NoRoom as error:
            self._plan.no_room = str(error)

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
            try:
                self._begin(plan)
            except NoRoom as error:
                return self._abort(plan, str(error), now)
            self._plan = plan
        if not plan.is_flipping:
            error_text = plan.no_room or plan.barrier.error
            if error_text is not None:
                return self._abort(plan, error_text, now)
            if self._names.is_coming:
                return Outcome()
            if not plan.has_copied:
                plan.has_copied = True
                try:
                    self._copy_scopes(plan, now)
                except NoRoom as error:
                    return self._abort(plan, str(error), now)
            if not plan.barrier.is_met:
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

    def _begin(self, plan: _Plan) -> None:
        revision = self._reconciler.revisions.last
        labels = [endpoint.added.labels for endpoint in self.endpoints.values()]
        compiled_by_key: dict[tuple[frozenset[int], bool], CompiledPolicy] = {}
        members: dict[tuple[frozenset[int], bool], list[int]] = {}
        for number, endpoint in self.endpoints.items():
            selecting = frozenset(i for i, policy in enumerate(plan.policies) if policy.selects(endpoint.added.labels))
            key = (selecting, endpoint.added.audit)
            if key not in compiled_by_key:
                policies = [plan.policies[i] for i in sorted(selecting)]
                compiled_by_key[key] = compile_policies(policies, self._cookies, labels, audit=endpoint.added.audit)
            members.setdefault(key, []).append(number)
        unclaimed = dict(self.groups)
        to_build: list[tuple[CompiledPolicy, list[int]]] = []
        merged: list[tuple[CompiledPolicy, list[int]]] = []
        for key, numbers in members.items():
            same = next((entry for entry in merged if entry[0] == compiled_by_key[key]), None)
            if same is not None:
                same[1].extend(numbers)
            else:
                merged.append((compiled_by_key[key], numbers))
        for compiled, numbers in merged:
            kept = next((group for group in unclaimed.values() if group.compiled == compiled), None)
            if kept is not None:
                del unclaimed[kept.number]
                self._assign(plan, kept, numbers)
            else:
                to_build.append((compiled, numbers))
        if KnownBad.EDIT_IN_PLACE not in self._known_bad:
            self._register(plan, [compiled for compiled, _ in to_build])
        for compiled, numbers in to_build:
            group = self._group_to_flip(unclaimed, numbers, compiled)
            if KnownBad.EDIT_IN_PLACE in self._known_bad:
                policy_set = self._edit_set_in_place(group, compiled)
            else:
                policy_set = self._sets.create(compiled).number
                plan.new_sets.append(policy_set)
            if group is None:
                number, self.next_group = self.next_group, self.next_group + 1
                self._reconciler.groups.want(number, _group_value(policy_set, compiled))
            else:
                number = group.number
                del unclaimed[number]
            self._assign(plan, Group(number, policy_set, compiled), numbers)
        rows = [row for policy_set in plan.new_sets for row in self._sets.rows(policy_set)]
        for table in (
            self._reconciler.ipcache,
            self._reconciler.policy,
            self._reconciler.groups,
            self._reconciler.own_addresses,
        ):
            rows += [RowReference(table.name, key, changed) for key, changed in table.pending.items() if changed > revision]
        for endpoint in self.endpoints.values():
            if endpoint.group is None:
                number, addresses = endpoint.added.endpoint, endpoint.added.addresses
                rows += [self._reconciler.own_addresses.reference(OwnAddressKey(number, address)) for address in addresses]
                rows += [self._ipcache.reference(IpcacheKey(SCOPE_STATIC, Prefix.of(address))) for address in addresses]
        if not self.groups:
            # At start: nobody is judged before the host's and everybody's addresses are known to the kernel.
            table = self._reconciler.ipcache
            static = [key for key in table.pending if isinstance(key, IpcacheKey) and key.scope == SCOPE_STATIC]
            rows += [table.reference(key) for key in static]
        plan.barrier = self._reconciler.barriers.take(rows)

    def _copy_scopes(self, plan: _Plan, now: float) -> None:
        """Endpoints that get a scope of their own find in it what their selectors hold. Raises NoRoom."""
        for number, scope in plan.scopes.items():
            endpoint = self.endpoints.get(number)
            if endpoint is not None and scope not in (SCOPE_SHARED, endpoint.scope):
                labels = plan.groups[number].compiled.fqdn_labels
                self._reconciler.barriers.add(plan.barrier, self._names.copy_scope(SCOPE_SHARED, scope, labels, now))

    def _register(self, plan: _Plan, compiled: list[CompiledPolicy]) -> None:
        """Everything the new sets name, before any of them is built: so each row is resolved once. Raises NoRoom."""
        with self._ipcache.deferred():
            for one in compiled:
                self._add_prefixes(one)
            plan.prefixes_of = compiled
            fqdns = [peer for one in compiled for peer in _fqdns(one)]
            self._names.register(*fqdns)
            plan.fqdns = fqdns

    def _edit_set_in_place(self, group: Group | None, compiled: CompiledPolicy) -> int:
        """The mistake that the flip prevents (known_bad.py)."""
        self._names.register(*_fqdns(compiled))
        self._add_prefixes(compiled)
        if group is None:
            return self._sets.create(compiled).number
        self._end_registrations(group.compiled)
        self._sets.edit_in_place(group.set, compiled)
        return group.set

    def _assign(self, plan: _Plan, group: Group, numbers: list[int]) -> None:
        for number in numbers:
            plan.groups[number] = group
            plan.scopes[number] = self._scope(self.endpoints[number].added, group.compiled)

    def _group_to_flip(self, unclaimed: dict[int, Group], numbers: list[int], compiled: CompiledPolicy) -> Group | None:
        """A group all of whose members get the new set: one row flips them all.

        None where a scope changes too: set and scope would be two rows, and what lies between them is neither the state before
        nor the one after. A new group makes it one row for each endpoint.
        """
        for number in numbers:
            endpoint = self.endpoints[number]
            if endpoint.group is not None and endpoint.scope != self._scope(endpoint.added, compiled):
                return None
        wanted = set(numbers)
        for group in unclaimed.values():
            members = {number for number, endpoint in self.endpoints.items() if endpoint.group is group}
            if members and members <= wanted:
                return group
        return None

    def _flip(self, plan: _Plan) -> None:
        for group in {group.number: group for group in plan.groups.values()}.values():
            self._reconciler.groups.want(group.number, _group_value(group.set, group.compiled))
        for number, group in plan.groups.items():
            endpoint = self.endpoints.get(number)
            if endpoint is not None:
                value = EndpointValue(number, group.number, plan.scopes[number], endpoint.added.orientation)
                self._reconciler.endpoints.want(endpoint.added.ifindex, value)
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
            self.has_inherited = False
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
        self._reconciler.barriers.cancel(plan.barrier)
        self._names.stop_coming()
        for number in plan.new_sets:
            self._sets.retire(number)
        self._names.unregister(*plan.fqdns)
        for compiled in plan.prefixes_of:
            self._remove_prefixes(compiled)
        for number in {group.number for group in plan.groups.values()} - set(self.groups):
            self._reconciler.groups.drop(number)
        kept = {endpoint.scope for endpoint in self.endpoints.values()} | {scope for *_, scope in self._retiring}
        for scope in set(plan.scopes.values()) - kept - {SCOPE_SHARED}:
            self._names.forget_scope(scope)
        self._plan = None
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
            self._let_inherited_go()
        due = [entry for entry in self._retiring if entry[0] <= now]
        if not due:
            return
        self._retiring = [entry for entry in self._retiring if entry[0] > now]
        for _, policy_set, group, scope in due:
            if group is not None:
                self._reconciler.groups.drop(group)
            if policy_set is not None:
                self._end_set(policy_set)
            planned = self._plan.scopes.values() if self._plan is not None else ()
            if scope is not None and scope not in planned and all(e.scope != scope for e in self.endpoints.values()):
                self._names.forget_scope(scope)

    def _let_inherited_go(self) -> None:
        """The first policies of this process are in force: what only the process before wanted goes."""
        for table in self._reconciler.tables.values():
            if table not in (self._reconciler.ipcache, self._reconciler.policy):
                table.let_inherited_go()
        self._inherited.let_go()
        self._ipcache.let_inherited_go()
        for scope in self._names.scopes - {SCOPE_SHARED, *(endpoint.scope for endpoint in self.endpoints.values())}:
            self._names.forget_scope(scope)

    def _end_set(self, number: int) -> None:
        compiled = self._sets.by_number[number].compiled
        self._sets.retire(number)
        self._end_registrations(compiled)

    def _end_registrations(self, compiled: CompiledPolicy) -> None:
        self._names.unregister(*_fqdns(compiled))
        self._remove_prefixes(compiled)

    def _add_prefixes(self, compiled: CompiledPolicy) -> None:
        for prefix in sorted(compiled.prefixes):
            self._prefix_users[prefix] = self._prefix_users.get(prefix, 0) + 1
        for prefix in sorted(compiled.prefixes):
            self._ipcache.upsert(IpcacheKey(SCOPE_STATIC, prefix), RESOURCE_POLICY, frozenset({f"cidr:{prefix}"}))

    def _remove_prefixes(self, compiled: CompiledPolicy) -> None:
        for prefix in compiled.prefixes:
            self._prefix_users[prefix] -= 1
            if not self._prefix_users[prefix]:
                del self._prefix_users[prefix]
                self._ipcache.remove(IpcacheKey(SCOPE_STATIC, prefix), RESOURCE_POLICY)

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


def _fqdns(compiled: CompiledPolicy) -> list[Fqdn]:
    return sorted((peer for peer in compiled.peers if isinstance(peer, Fqdn)), key=lambda peer: peer.label)


def _group_value(policy_set: int, compiled: CompiledPolicy) -> GroupValue:
    return GroupValue(policy_set, compiled.default_deny_egress, compiled.default_deny_ingress, compiled.audit)
