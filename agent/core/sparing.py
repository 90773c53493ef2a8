"""What would be said a thousand times a second is said once a second, with how many there were besides."""

from __future__ import annotations

from collections.abc import Hashable

SAID_EVERY_S = 1.0


class Sparing:
    """By subject, such as an endpoint. After a burst a count is left that is never said: the counters have it."""

    def __init__(self) -> None:
        self._next_by_subject: dict[Hashable, float] = {}
        self._unsaid_by_subject: dict[Hashable, int] = {}

    def may_say(self, subject: Hashable, now: float) -> int | None:
        """None: not now, and it is counted. Else how many were counted since somebody was told."""
        if now < self._next_by_subject.get(subject, now):
            self._unsaid_by_subject[subject] = self._unsaid_by_subject.get(subject, 0) + 1
            return None
        self._next_by_subject[subject] = now + SAID_EVERY_S
        return self._unsaid_by_subject.pop(subject, 0)

    def forget(self, subject: Hashable) -> None:
        self._next_by_subject.pop(subject, None)
        self._unsaid_by_subject.pop(subject, None)
