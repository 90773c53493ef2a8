"""Everything that can happen to the core, and everything it can ask for.

The shell hands events to `Engine.handle` and performs what `Engine.effects` gives back. Nothing else crosses the wall.
Times are seconds of CLOCK_BOOTTIME, as float.

What there is for every question is a class with slots: to make a named tuple and to read its fields costs several times as
much, compiled (agent/compiled.py) and not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.core.records import Record
from agent.core.rules import Policy
from agent.core.types import Address, Key, Orientation, Table, Value, Write

# --- events ----------------------------------------------------------------------------------------------------------


class Query:
    """A question reached the proxy.

    asker: opaque to the core; the shell knows from it where an answer goes. client, server: the addresses of the packet.
    port, protocol: as asked. message: the DNS message as it came (without the two length bytes of TCP).
    """

    __slots__ = ("asker", "client", "message", "port", "protocol", "server")

    def __init__(self, asker: Hashable, client: Address, server: Address, port: int, protocol: int, message: bytes) -> None:
        self.asker = asker
        self.client = client
        self.server = server
        self.port = port
        self.protocol = protocol
        self.message = message


class Reply:
    """An upstream answered an open transaction; socket, id and question were compared by the shell."""

    __slots__ = ("message", "transaction")

    def __init__(self, transaction: int, message: bytes) -> None:
        self.transaction = transaction
        self.message = message


class UpstreamFailed(NamedTuple):
    """The upstream cannot be asked: refused, unreachable, connection closed."""

    transaction: int
    why: str


class AskerGone(NamedTuple):
    """Nobody waits for this answer any more: the client's TCP connection was closed."""

    asker: Hashable


class RowsWritten(NamedTuple):
    """What the kernel said to each write: 0 or an errno."""

    results: tuple[tuple[Write, int], ...]


class RowsLost(NamedTuple):
    """The kernel does not hold these rows as it was told to: read this moment, with no write of theirs on its way."""

    rows: tuple[tuple[Table, Key], ...]


@dataclass(frozen=True, slots=True)
class EndpointAdded:
    """An interface whose traffic is to be policed. `endpoint` is a small number that the shell gives once and never again.

    Said again of one that is known: all of it but index and orientation, which never change, is so from now on.
    addresses: what is known as this endpoint, and as no other. also_from: what it may send from as well: an uplink sends from
    the addresses of the host's other interfaces too, and so does every other uplink. policies: its own, which alone judge it;
    None: it is judged by everybody's that select it.
    """

    endpoint: int
    interface: str
    ifindex: int
    labels: Mapping[str, str]
    addresses: tuple[Address, ...]
    orientation: Orientation = Orientation.BEHIND
    audit: bool = False
    isolated: bool = False  # learn: per-endpoint
    dhcp: bool = False  # may ask for an address
    silent: bool = False  # denied: drop
    also_from: tuple[Address, ...] = ()
    policies: tuple[Policy, ...] | None = None


class EndpointRemoved(NamedTuple):
    endpoint: int


class HostAddresses(NamedTuple):
    """The host's own addresses, all of them, each time they change."""

    addresses: frozenset[Address]


@dataclass(frozen=True, slots=True)
class PoliciesChanged:
    """All policies from now on. `ticket` is settled when every endpoint is judged by them, or with the error if refused.

    policies: None leaves them as they are: the ticket is for the endpoints that were said before.
    """

    policies: tuple[Policy, ...] | None
    ticket: Hashable = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What the process before left: its records, in order, and the rows in the kernel. Comes first or not at all."""

    records: tuple[Record, ...]
    rows: Mapping[Table, Mapping[Key, Value]]


class LastSeen(NamedTuple):
    """When a packet of a flow of this address was last seen in this scope; None: never."""

    scope: int
    address: Address
    at: float | None


class FlowsSeen(NamedTuple):
    """A pass over the flow table ended: these identities are remembered by flows in it."""

    pass_number: int
    identities: frozenset[int]


class SourceReported(NamedTuple):
    """A source of labels has said all it knows at start (`state`, `policies`, `host`, `endpoints`)."""

    source: str


class Tick(NamedTuple):
    """Time went by; what is due is done."""


Event = (
    Query
    | Reply
    | UpstreamFailed
    | AskerGone
    | RowsWritten
    | RowsLost
    | EndpointAdded
    | EndpointRemoved
    | HostAddresses
    | PoliciesChanged
    | Restored
    | LastSeen
    | FlowsSeen
    | SourceReported
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


class SendReply:
    """To the client: exactly one for each Query that is answered at all."""

    __slots__ = ("asker", "message")

    def __init__(self, asker: Hashable, message: bytes) -> None:
        self.asker = asker
        self.message = message


class AskUpstream:
    """Send the question to this server; asking again with the same transaction replaces the try before.

    question: wire form of the question section (name in the client's case, type, class); the shell compares it with the
    reply's.
    """

    __slots__ = ("message", "port", "protocol", "question", "server", "transaction")

    def __init__(self, transaction: int, server: Address, port: int, protocol: int, message: bytes, question: bytes) -> None:
        self.transaction = transaction
        self.server = server
        self.port = port
        self.protocol = protocol
        self.message = message
        self.question = question


class Forget(NamedTuple):
    """The transaction is closed: what still comes for it is late."""

    transaction: int


class Save(NamedTuple):
    """Append to the journal, before whatever effect comes next."""

    records: tuple[Record, ...]


class WriteRows(NamedTuple):
    """Perform these writes, in this order, and report each (RowsWritten)."""

    writes: tuple[Write, ...]


class Attach(NamedTuple):
    """Everything this endpoint's packets are judged by is in the kernel: put the programs on the interface."""

    endpoint: int
    interface: str
    ifindex: int
    orientation: Orientation


class Detach(NamedTuple):
    endpoint: int
    interface: str
    ifindex: int


class ReadLastSeen(NamedTuple):
    scope: int
    address: Address


class PassOverFlows(NamedTuple):
    pass_number: int


class Settled(NamedTuple):
    """What the ticket stood for is in the kernel (error None), or cannot be (a sentence)."""

    ticket: Hashable
    error: str | None


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a person may want to read: structured, never needed for the work itself.

    kind: question, guard, policy, endpoint. is_for_log: false where only who watches this endpoint wants to hear of it.
    """

    kind: str
    at: float
    fields: Mapping[str, object] = field(default_factory=dict)
    is_for_log: bool = True


Effect = SendReply | AskUpstream | Forget | Save | WriteRows | Attach | Detach | ReadLastSeen | PassOverFlows | Settled | Fact
