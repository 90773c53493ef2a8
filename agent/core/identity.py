"""Identities: a number for each label set.

Rule 1 (I4): a number never stands for another label set; there is no free list.
Rule 2: an identity is released when no ipcache row and no selector refers to it, no row in the kernel names it, and a pass over
the flows, begun after that, found none that remembers it.

Rule 2 needs the pass because a flow keeps the identity it was allowed to (DECISIONS 17): its policy rows have to outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from agent.core.known_bad import KnownBad
from agent.core.types import IDENTITY_HOST, IDENTITY_LOCAL_FIRST, IDENTITY_WORLD, LABEL_HOST, LABEL_WORLD, LabelSet


class NoRoom(Exception):
    """A bound is reached; the sentence says which."""


class IdentityAllocator:
    """Distinct label set to number, counted.

    is_named: does a row in the kernel, or on its way there, name this identity?
    """

    def __init__(
        self, identities_max: int, is_named: Callable[[int], bool], known_bad: frozenset[KnownBad] = frozenset()
    ) -> None:
        self.identities_max = identities_max
        self.labels_by_identity: dict[int, LabelSet] = {
            IDENTITY_HOST: frozenset({LABEL_HOST}),
            IDENTITY_WORLD: frozenset({LABEL_WORLD}),
        }
        self.new: list[int] = []  # allocated since somebody looked
        self._identity_by_labels = {labels: identity for identity, labels in self.labels_by_identity.items()}
        self._references: dict[int, int] = {IDENTITY_HOST: 1, IDENTITY_WORLD: 1}
        self._unused: dict[int, int] = {}  # nobody refers to them: identity -> when that began, a serial number
        self._releases = 0
        self.next_number = IDENTITY_LOCAL_FIRST
        self._is_named = is_named
        self._known_bad = known_bad
        self._reusable: list[int] = []

    def acquire(self, labels: LabelSet, *, beyond_bound: bool = False) -> int:
        """The identity of this label set, one reference more; raises NoRoom.

        beyond_bound: for what is left when something is taken away, where refusing would leave open what nobody allows any
        more, or shut what is still allowed; and for addresses of the host and of endpoints. It adds at most one identity for
        each row there is.
        """
        identity = self._identity_by_labels.get(labels)
        if identity is None:
            if len(self._identity_by_labels) >= self.identities_max and not beyond_bound:
                raise NoRoom(f"all {self.identities_max} identities are in use (limits.identities)")
            identity = self._number()
            self._identity_by_labels[labels] = identity
            self.labels_by_identity[identity] = labels
            self.new.append(identity)
        self._references[identity] = self._references.get(identity, 0) + 1
        self._unused.pop(identity, None)
        return identity

    def restore(self, identity: int, labels: LabelSet) -> None:
        """A number of the process before keeps its meaning; nobody refers to it yet."""
        self.labels_by_identity[identity] = labels
        self._identity_by_labels[labels] = identity
        self._references[identity] = 0
        self._releases += 1
        self._unused[identity] = self._releases
        self.next_number = max(self.next_number, identity + 1)

    def _number(self) -> int:
        if KnownBad.IDENTITY_REUSED in self._known_bad and self._reusable:
            return self._reusable.pop()
        self.next_number += 1
        return self.next_number - 1

    def release(self, identity: int) -> None:
        """One reference less."""
        count = self._references[identity] - 1
        assert count >= 0, f"identity {identity} released more often than acquired"
        self._references[identity] = count
        if count == 0:
            self._releases += 1
            self._unused[identity] = self._releases
            if KnownBad.IDENTITY_REUSED in self._known_bad:
                self._reusable.append(identity)
                self._identity_by_labels.pop(self.labels_by_identity[identity], None)

    @property
    def has_unused(self) -> bool:
        return bool(self._unused)

    def unused(self) -> dict[int, int]:
        """What a pass over the flows that begins now may release: identities no reference and no row names."""
        return {identity: serial for identity, serial in self._unused.items() if not self._is_named(identity)}

    def retire(self, candidates: Mapping[int, int], remembered: frozenset[int]) -> Iterator[int]:
        """After a pass: gives back the identities that are gone. `candidates` is `unused()` as it was when the pass began."""
        for identity, serial in candidates.items():
            if self._unused.get(identity) == serial and identity not in remembered and not self._is_named(identity):
                del self._unused[identity]
                del self._references[identity]
                labels = self.labels_by_identity.pop(identity)
                if self._identity_by_labels.get(labels) == identity:
                    del self._identity_by_labels[labels]
                yield identity

    def __len__(self) -> int:
        return len(self.labels_by_identity)
