"""Which facts are shown. What need not be told the agent is not asked for: a flow that is allowed costs the kernel an event.

What was lost is always shown: nobody can say what it would have been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.core.names import NamePattern
from agent.core.types import PORT_DNS
from agent.monitor.facts import KINDS, KnownEndpoints, Row, is_endpoint, names_of, verdict_of

_KINDS_BY_VERDICT: Final = {
    "allowed": {"question", "verdict"},
    "denied": {"question", "drop"},
    "audited": {"question", "drop"},
    "failed": {"question"},
}
_HAVE_NAMES: Final = {"question", "verdict", "drop", "guard"}
_HAVE_PORTS: Final = {"question", "verdict", "drop", "chatter"}


@dataclass(frozen=True, slots=True)
class Filter:
    """All that are given must hold; of several verdicts, or kinds, one."""

    endpoint: str | None = None
    verdicts: frozenset[str] = frozenset()
    name: NamePattern | None = None
    port: int | None = None
    kinds: frozenset[str] = frozenset()

    def kinds_wanted(self) -> list[str]:
        """Of which something can be shown."""
        wanted = self.kinds or set(KINDS)
        if self.verdicts:
            wanted = wanted & set().union(*(_KINDS_BY_VERDICT[verdict] for verdict in self.verdicts))
        if self.name is not None:
            wanted = wanted & _HAVE_NAMES
        if self.port is not None:
            wanted = wanted & (_HAVE_PORTS if self.port == PORT_DNS else _HAVE_PORTS - {"question"})
        return [kind for kind in KINDS if kind in wanted]

    def endpoint_number(self) -> int | None:
        """So that the agent tells of no other; what is about no endpoint it does not tell either."""
        return int(self.endpoint) if self.endpoint is not None and self.endpoint.isdecimal() else None

    def takes(self, fact: Row, endpoints: KnownEndpoints) -> bool:
        """A fact of a wanted kind."""
        if fact["kind"] == "lost":
            return True
        if self.verdicts and verdict_of(fact) not in self.verdicts:
            return False
        if self.port is not None and fact.get("port", PORT_DNS) != self.port:
            return False
        if self.name is not None and not any(self.name.matches_question(name) for name in names_of(fact)):
            return False
        if self.endpoint is None:
            return True
        row = endpoints.of(fact)
        return row is not None and is_endpoint(row, self.endpoint)
