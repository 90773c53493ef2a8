"""The holder: a process that keeps the DNS sockets while there is no agent (DECISIONS 20).

    agent ── unix socket ── holder
      take                        → its version and process id, how many questions it answered, and the sockets it has
      serve, with the sockets     keep these, and say so; from then on the agent reads from them while this connection lives
      leave                       end, and close everything

A socket that is closed leaves the datapath's table of sockets, and with it go the questions and connections that wait in its
queue. The holder has descriptors of the same sockets, so both stay; and of the memory in which questions stand that were read
and not answered (`agent.dns.ledger`). Connections that were accepted end with the agent, and their clients know at once. The
end of the agent's connection to the holder, however it comes about, is the end of the agent; a moment later, if no other one
serves, the holder reads the sockets itself and answers SERVFAIL.

Rule 1: there is one reader at a time, who answers what it reads: the agent begins when the holder has said that it stopped, and
the holder when the agent is gone. So what is first in a queue stays there until its reader has noted it.
Rule 2: the holder knows nothing else: no policy, no names, no tables. What it says teaches nobody anything.
Rule 3: who does not speak the same version gets no sockets from it: their options are part of the version.

A message is one datagram of JSON on a connection that keeps datagrams apart, with the descriptors beside it (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

# Counted up when messages, or options of the sockets (`agent.dns.sockets`), change.
VERSION: Final = 1

# `Listeners.descriptors`: four sockets, and the memory of what was read and not answered.
KEPT: Final = 5

_MESSAGE_OCTETS_MAX: Final = 1024

Message = Mapping[str, object]


def path_beside(control: Path) -> Path:
    """Where the holder of the agent with this control socket listens."""
    return control.with_name("holder.sock")


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """OSError when the other side is gone, or has not read for long."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def receive(connection: socket.socket) -> tuple[Message, tuple[int, ...]]:
    """The next message and the descriptors that came with it, which are the caller's. EOFError at the end of the connection.

    ValueError for what is no message; descriptors that came with it are closed. (`socket.recv_fds` of Python 3.11 forgets its
    flags, and the descriptors would be inherited.)
    """
    room = socket.CMSG_SPACE(KEPT * array.array("i").itemsize)
    octets, ancillary, _, _ = connection.recvmsg(_MESSAGE_OCTETS_MAX, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not octets:
        raise EOFError
    try:
        message = json.loads(octets)
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
    except ValueError:
        close_all(descriptors)
        raise
    return message, tuple(descriptors)


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
