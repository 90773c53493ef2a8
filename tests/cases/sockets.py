"""The DNS proxy's cases about identifiers, ports and streams: on a running agent, by real sockets. Needs root.

The client is in a namespace of its own, and so is the server, which says what the case says. It is at the address that is
asked: a server that a rule names by network is asked itself (decision 5).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import dns.message
import dns.rcode

from agent.core.names import normalise_name
from tests.cases.runner import DoesNotApply, Fields, Sheet
from tests.netns.asking import exchange
from tests.netns.lab import Lab
from tests.netns.running import RunningAgent
from tests.netns.spoken import Spoken

SERVER: Final = "203.0.113.101"
# A reply that must not be delivered is not waited for until the agent gives up: what comes comes in milliseconds.
PATIENCE_S: Final = 1.0
# So that what one case taught is soon forgotten for the next, and not before it is looked for.
LIFETIME: Final = "2s"

# Connects, sends the octets in pieces of these sizes, each when the kernel at the other end has the one before, and prints what
# comes back. With nothing to send it closes at once.
_IN_PIECES = """
import array, fcntl, json, socket, sys, termios, time
server, port, message, pieces, within = json.load(sys.stdin)
octets, heard = bytes.fromhex(message), b""
if octets: octets = len(octets).to_bytes(2, "big") + octets
s = socket.create_connection((server, port), within)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for size in [*pieces, len(octets)]:
    s.sendall(octets[:size])
    octets, unacknowledged = octets[size:], array.array("i", [1])
    deadline = time.monotonic() + within
    while unacknowledged[0] and time.monotonic() < deadline: fcntl.ioctl(s, termios.TIOCOUTQ, unacknowledged)
while message and (len(heard) < 2 or len(heard) < 2 + int.from_bytes(heard[:2], "big")):
    received = s.recv(65535)
    if not received: break
    heard += received
print(heard[2:].hex())
"""


def ask_in_pieces(lab: Lab, message: bytes, pieces: Sequence[int], namespace: str, server: str, port: int = 53) -> bytes | None:
    """The answer over TCP, None without one; pieces: octets of the first segments, two of the length among them."""
    asking = lab.start(namespace, sys.executable, "-c", _IN_PIECES, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    said, _ = asking.communicate(json.dumps([server, port, message.hex(), list(pieces), PATIENCE_S]), timeout=PATIENCE_S + 10)
    return bytes.fromhex(said) or None


class OverSockets:
    """The lab, an agent with one endpoint, and the server. Use as a context manager."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="namegate-cases-"))
            self._lab = stack.enter_context(Lab(ports=(443,)))
            self._lab.run(self._lab.internet, "ip", "address", "add", f"{SERVER}/32", "dev", "lo")
            self._server = Spoken(self._lab, SERVER)
            dns = {"ttl-floor": LIFETIME, "ttl-cap": LIFETIME}
            self._agent = stack.enter_context(RunningAgent(self._lab, "none.test", Path(directory), dns=dns))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def judge(self, case: Fields, sheet: Sheet) -> None:
        upstream, wanted, query = case["upstream"], case["expect"], bytes.fromhex(case["query_hex"])
        upstream.only("must_not_be_asked", "reply_hex", "id_field", "from_")
        self._allow(case["rules"])
        self._server.asked()
        if "learned" in wanted:
            self._agent.await_status(lambda status: not status["names"], within_s=10)
        way = "another id" if "use another" in upstream.get("id_field", "") else "as asked"
        way = "another port" if "from_" in upstream else way
        self._server.tell(*([bytes.fromhex(upstream["reply_hex"])] if "reply_hex" in upstream else []), how=way)
        reply = self._ask(case, query)
        asked = self._server.asked()
        if upstream.get("must_not_be_asked"):
            sheet.compare("forwarded", bool(asked), theirs=False)
        for key, theirs in wanted.items():
            match key:
                case "rcode":
                    sheet.compare(key, _rcode(reply), theirs)
                case "rcode_in":
                    said = _rcode(reply)
                    sheet.compare(key, said, said if said in theirs else theirs)
                case "id":
                    sheet.compare(key, reply and int.from_bytes(reply[:2], "big"), int(theirs, 16))
                case "answers":
                    sheet.compare(key, [str(rrset) for rrset in dns.message.from_wire(reply).answer] if reply else [], theirs)
                case "delivered":
                    sheet.compare(key, _rcode(reply) == "NOERROR", theirs)
                case "learned":
                    may = {(normalise_name(name), text) for name, texts in theirs.items() for text in texts}
                    sheet.compare_members("learned", self._learned(), may)
                case "upstream_id":
                    # One in 65,536 would be the client's by chance; not twice.
                    self._ask(case, query)
                    ids = {seen.message[:2] for seen in (*asked, *self._server.asked())}
                    sheet.compare(key, "the client's" if ids == {query[:2]} else theirs, theirs)
                case "alive_after":
                    self._server.tell(bytes.fromhex("000081800001000000000000") + _QUESTION)
                    still = exchange(self._lab, [_QUERY], server=SERVER, transport=case["proto"], within_s=PATIENCE_S)
                    sheet.compare(key, bool(still), theirs)
                case "over_queries" | "distinct_identifiers_at_least" | "distinct_source_ports_at_least":
                    of = {"over_queries": asked, "distinct_identifiers_at_least": {seen.message[:2] for seen in asked}}
                    sheet.compare(key, min(len(of.get(key, {seen.port for seen in asked})), theirs), theirs)
                case _:
                    raise DoesNotApply(f"unknown field {key!r} of what is expected")

    def _ask(self, case: Fields, query: bytes) -> bytes | None:
        """The first reply to the question, None without one."""
        if case.get("original_server") == "unknown":
            return ask_in_pieces(self._lab, query, [], self._lab.host, "127.0.0.1", self._listener())
        if "chunks" in case or not query:
            return ask_in_pieces(self._lab, query, case.get("chunks", []), self._lab.client.namespace, SERVER, case["port"])
        rounds = [[query]] * case.get("repeat", 1)
        replies = exchange(self._lab, *rounds, server=SERVER, transport=case["proto"], within_s=PATIENCE_S * len(rounds))
        return replies[0] if replies else None

    def _allow(self, rules: Sequence[Fields]) -> None:
        """These names, of the server, by both transports: a case's rule speaks of one, its question may come by the other."""
        names = [name for rule in rules for name in rule.only("client", "server", "port", "proto", "names")["names"]]
        dns = ", ".join(f"{{matchName: {json.dumps(name.rstrip('.'))}}}" for name in names)
        ports = f'[{{ports: [{{port: "53", protocol: ANY}}], rules: {{dns: [{dns}]}}}}]'
        self._agent.apply(
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\n"
            f'spec:\n  endpointSelector: {{}}\n  egress: [{{toCIDR: ["{SERVER}/32"], toPorts: {ports}}}]\n'
        )

    def _learned(self) -> set[tuple[str, str]]:
        return {(row["name"], row["address"]) for row in self._agent.ask("names")}

    def _listener(self) -> int:
        """Where the agent takes connections from the gate; a TCP socket on loopback."""
        listening = self._lab.run(self._lab.host, "ss", "-Hltn", "src", "127.0.0.1").stdout.split()
        return int(next(word for word in listening if word.startswith("127.0.0.1:")).partition(":")[2])


_QUESTION: Final = b"\x06cilium\x02io\x00\x00\x01\x00\x01"
_QUERY: Final = bytes.fromhex("000101000001000000000000") + _QUESTION


def _rcode(reply: bytes | None) -> str:
    return dns.rcode.to_text(dns.message.from_wire(reply).rcode()) if reply else "no reply"
