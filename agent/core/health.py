"""Whom to ask first: the upstreams as configured, but one that has stayed silent comes last for a while.

Rule 1: it is an order and no more. Nobody is left out, and with all of them silent the order is the configured one.
Rule 2: nothing is asked but what clients ask. When a rest is over, one question asks the upstream in its place again; others go
on without it until that one has its answer.
Rule 3: any reply ends the silence. SERVFAIL does too: it speaks of a name more often than of the resolver, and costs no wait.

Why: a silent upstream is given up after 1.5 s. Without this every question pays that for as long as the first one is down, and
of four upstreams the last is never asked within the budget of a question.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.core.settings import Upstream

# One lost datagram is the network's; three questions in a row without any reply in between are the upstream's.
SILENT_QUESTIONS = 3
# While it is down, one question pays for a look after each rest: after 2, 4, 8, 16, 32 s, then once in a minute.
REST_FIRST_S, REST_LAST_S = 2.0, 60.0


@dataclass(slots=True)
class Silence:
    """questions: asked in vain since its last reply. rests_until: when it is looked at again, for which it is in its place."""

    questions: int = 0
    rests_until: float = 0.0
    rest_s: float = REST_FIRST_S


class Health:
    """silences: of upstreams with a question in vain since their last reply; at most one for each that is configured."""

    def __init__(self, upstreams: tuple[Upstream, ...]) -> None:
        self.silences: dict[Upstream, Silence] = {}
        self._upstreams = upstreams

    def order(self, now: float) -> list[Upstream]:
        """Whom one question is to ask, in turn. Of those whose rest is over it looks at one at most, and in first place."""
        if not self.silences:
            return list(self._upstreams)
        first: list[Upstream] = []
        last: list[Upstream] = []
        for upstream in self._upstreams:
            silence = self.silences.get(upstream)
            if silence is None or silence.questions < SILENT_QUESTIONS:
                first.append(upstream)
            elif first or now < silence.rests_until:
                last.append(upstream)
            else:
                self._rest(silence, now)
                first.append(upstream)
        return first + last

    def failed(self, upstream: Upstream, now: float) -> None:
        """A question was given up there; servers that are not configured, but named by a policy, have no health."""
        if upstream not in self._upstreams:
            return
        silence = self.silences.setdefault(upstream, Silence())
        silence.questions += 1
        if silence.questions == SILENT_QUESTIONS:
            self._rest(silence, now)

    def answered(self, upstream: Upstream) -> None:
        self.silences.pop(upstream, None)

    def resting(self) -> list[Upstream]:
        """Those that are asked last."""
        return [upstream for upstream, silence in self.silences.items() if silence.questions >= SILENT_QUESTIONS]

    @staticmethod
    def _rest(silence: Silence, now: float) -> None:
        silence.rests_until = now + silence.rest_s
        silence.rest_s = min(2 * silence.rest_s, REST_LAST_S)
