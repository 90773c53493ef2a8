"""Several values under one key, where nearly always it is one.

A set for each of a million keys would be 216 bytes each before anything is in it; here a value that is alone stands by itself.
Values come back in the order in which they came, so that the core does the same in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class _Several(dict[V, None]):
    """Two or more values, or one that is left of them."""

    __slots__ = ()


class MultiMap(Generic[K, V]):
    """Values by key, each once; a key without values is not there. No value is None."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[K, V | _Several[V]] = {}

    def add(self, key: K, value: V) -> bool:
        """Says whether it was not there before."""
        held = self._held.get(key)
        if held is None:
            self._held[key] = value
        elif isinstance(held, _Several):
            if value in held:
                return False
            held[value] = None
        elif held == value:
            return False
        else:
            self._held[key] = _Several({held: None, value: None})
        return True

    def discard(self, key: K, value: V) -> bool:
        """Says whether it was there."""
        held = self._held.get(key)
        if isinstance(held, _Several):
            if value not in held:
                return False
            del held[value]
            if not held:
                del self._held[key]
        elif held is None or held != value:
            return False
        else:
            del self._held[key]
        return True

    def of(self, key: K) -> Collection[V]:
        """The key's values, none if it is not there. Not to be kept: it may change with the map."""
        held = self._held.get(key)
        if isinstance(held, _Several):
            return held.keys()
        return () if held is None else (held,)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
