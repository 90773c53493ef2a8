"""Sets: compiled policies as rows of the policy map.

Rule 1: a set's number is never used again; its rows are written once and never changed.
Rule 2: a set in preparation and a set in force get the rows of every new identity alike: both are judged by, now or soon.
Rule 3: what a new identity needs in many sets is computed a slice at a time, between other people's questions; no ipcache row
names the identity before all of it is in the kernel (`PolicyTable.incomplete`).
Rule 4: so is a new set. An identity that comes while its selectors are still being added may get fewer rows than it needs at
first; the selectors that are added later find it, and it has its turn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent.core.identity import NoRoom
from agent.core.policy import Block, CompiledPolicy, resolve
from agent.core.rules import Peer
from agent.core.selector_cache import SelectorCache
from agent.core.tables import PolicyTable, RowReference
from agent.core.types import IDENTITY_ANY, LabelSet, PolicyKey, PolicyValue

# About 1 ms of work: between two slices the shell looks at its sockets.
ROWS_AT_ONCE = 128


class PolicySet:
    """One compiled policy under one number, and the rows it has."""

    __slots__ = ("compiled", "number", "rows_by_identity", "rows_count")

    def __init__(self, number: int, compiled: CompiledPolicy) -> None:
        self.number = number
        self.compiled = compiled
        self.rows_by_identity: dict[int, tuple[PolicyKey, ...]] = {}
        self.rows_count = 0


class PolicySets:
    """All sets in force, in preparation, or about to go.

    rows_max: of one set; table_rows_max: of the whole policy map.
    """

    def __init__(
        self,
        table: PolicyTable,
        selector_cache: SelectorCache,
        *,
        rows_max: int,
        table_rows_max: int,
    ) -> None:
        self.by_number: dict[int, PolicySet] = {}
        self.rows_max = rows_max
        self.table_rows_max = table_rows_max
        self._table = table
        self._selector_cache = selector_cache
        self._labels_by_identity: dict[int, LabelSet] = {}
        self._sets_to_fill: dict[int, list[int]] = {}  # identity -> sets that lack its rows, the next one last
        self.next_number = 1
        self.rows_at_once = ROWS_AT_ONCE

    def refuse_what_cannot_fit(self, compiled: Iterable[CompiledPolicy]) -> None:
        """As far as that is sure before anything is asked for. Raises NoRoom."""
        rows = [one.rows_min for one in compiled]
        if max(rows, default=0) > self.rows_max:
            raise NoRoom(f"the policy needs {max(rows)} rows, one set holds {self.rows_max} (limits.policy-rows-per-set)")
        needed = sum(rows) + len(self._table.desired)
        if needed > self.table_rows_max:
            raise NoRoom(f"the policies need {needed} rows, the policy map holds {self.table_rows_max} (datapath.policy-rows)")

    def create(self, compiled: CompiledPolicy) -> PolicySet:
        """A set in preparation, without rows: `fill` asks for them."""
        policy_set = PolicySet(self.next_number, compiled)
        self.next_number += 1
        self.by_number[policy_set.number] = policy_set
        return policy_set

    def fill(self, policy_set: PolicySet) -> Iterator[list[RowReference]]:
        """Step by step the set's rows for every identity; gives back those of each step. Raises NoRoom."""
        selected: set[int] = set()
        for peer in policy_set.compiled.peers:
            selected |= self._selector_cache.add_user(peer, policy_set.number)
            yield []
        for identity in (IDENTITY_ANY, *sorted(selected)):
            peers: Iterable[Peer | None] = (None,)
            if identity != IDENTITY_ANY:
                labels = self._labels_by_identity.get(identity)
                if labels is None:
                    continue  # gone meanwhile
                peers = self._selector_cache.selectors_of(labels)
            rows = self._want_rows(policy_set, identity, peers)
            self._find_room(policy_set)
            yield rows

    def _find_room(self, policy_set: PolicySet) -> None:
        """Raises NoRoom."""
        if policy_set.rows_count > self.rows_max:
            raise NoRoom(f"the policy needs more rows than one set holds: {self.rows_max} (limits.policy-rows-per-set)")
        if len(self._table.desired) > self.table_rows_max:
            raise NoRoom(f"the policies need more rows than the policy map holds: {self.table_rows_max} (datapath.policy-rows)")

    def edit_in_place(self, number: int, compiled: CompiledPolicy) -> Iterator[list[RowReference]]:
        """The mistake rule 1 forbids (known_bad.py)."""
        for _ in self.retire(number):
            pass
        self.by_number[number] = policy_set = PolicySet(number, compiled)
        return self.fill(policy_set)

    def retire(self, number: int) -> Iterator[int]:
        """No group points to the set any more: step by step its rows go, its number stays used. Gives back what each cost."""
        policy_set = self.by_number.pop(number)
        for keys in policy_set.rows_by_identity.values():
            for key in keys:
                self._table.drop(key)
            yield len(keys)
        for peer in policy_set.compiled.peers:
            self._selector_cache.remove_user(peer, number)
            yield 1

    def add_identity(self, identity: int, labels: LabelSet) -> None:
        """A new identity: every set that selects it gets its rows, the first ones at once, the others by `go_on`."""
        self._labels_by_identity[identity] = labels
        selectors = self._selector_cache.add_identity(identity, labels)
        users = {number for selector in selectors for number in self._selector_cache.users_by_selector[selector]}
        if users:
            self._sets_to_fill[identity] = sorted(users, reverse=True)
            self._table.incomplete.add(identity)
            if len(self._sets_to_fill) == 1:
                self.go_on()

    @property
    def is_behind(self) -> bool:
        """Is there more for `go_on`?"""
        return bool(self._sets_to_fill)

    def go_on(self) -> None:
        """One slice of the rows that new identities lack."""
        rows_left = self.rows_at_once
        for identity in list(self._sets_to_fill):
            selectors = self._selector_cache.selectors_of(self._labels_by_identity[identity])
            numbers = self._sets_to_fill[identity]
            while numbers and rows_left > 0:
                policy_set = self.by_number.get(numbers.pop())
                if policy_set is not None and identity not in policy_set.rows_by_identity:
                    rows_left -= 1 + len(self._want_rows(policy_set, identity, selectors))
            if numbers:
                return
            self._complete(identity)

    def _complete(self, identity: int) -> None:
        if self._sets_to_fill.pop(identity, None) is not None:
            self._table.incomplete.discard(identity)

    def remove_identity(self, identity: int) -> int:
        """Nothing names or remembers the identity any more; gives back how many rows go with it."""
        rows_count = 0
        selectors = self._selector_cache.remove_identity(identity)
        del self._labels_by_identity[identity]
        self._complete(identity)
        for number in sorted({number for selector in selectors for number in self._selector_cache.users_by_selector[selector]}):
            policy_set = self.by_number.get(number)
            if policy_set is None:
                continue
            keys = policy_set.rows_by_identity.pop(identity, ())
            policy_set.rows_count -= len(keys)
            rows_count += len(keys)
            for key in keys:
                self._table.drop(key)
        return rows_count

    def _want_rows(self, policy_set: PolicySet, identity: int, peers: Iterable[Peer | None]) -> list[RowReference]:
        values = policy_set.compiled.values_by_peer
        rows: dict[Block, PolicyValue] = resolve(pair for peer in peers for pair in values.get(peer, ()))
        keys = tuple(PolicyKey(policy_set.number, identity, *block) for block in rows)
        policy_set.rows_count += len(keys) - len(policy_set.rows_by_identity.get(identity, ()))
        policy_set.rows_by_identity[identity] = keys
        return [self._table.want(key, value) for key, value in zip(keys, rows.values(), strict=True)]
