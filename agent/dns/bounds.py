"""What clients can make the DNS sockets hold, and what was given up because of it (I9)."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the sockets towards the clients.

    idle_seconds: a connection without progress for this long is closed; progress is a whole message in, or octets out. RFC 7766
    6.2.3 asks for seconds; it must be longer than the life of a question, since a wait for an upstream shows no progress.
    open_max: questions of one connection not answered yet; at the bound it is not read from.
    unsent_octets_max: at this bound it is not read from either; so it holds at most this and open_max replies more.
    questions_per_second, question_burst: of all connections of one client together; a connection that is over them waits.
    0 a second: no limit.
    """

    connections_max: int = 1024
    connections_per_client_max: int = 64
    open_max: int = 64
    unsent_octets_max: int = 128 << 10
    idle_seconds: float = 10.0
    questions_per_second: int = 2000
    question_burst: int = 500


@dataclass(slots=True)
class Counters:
    """What was given up, by reason; only ever grows."""

    datagrams_lost: int = 0  # by the kernel, for lack of room in our receive buffer
    over_share: int = 0  # too many of one client waited while others had less
    datagrams_direct: int = 0  # sent to the listener itself, not by the gate
    replies_unsent: int = 0  # the kernel refused to send
    replies_late: int = 0  # the connection was closed before
    connections_refused: int = 0  # over a bound, direct, or no descriptor for it
    connections_idle: int = 0  # closed for want of progress, or to make room
    connections_put_off: int = 0  # times that one waited, for its client had asked as much as it may

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
