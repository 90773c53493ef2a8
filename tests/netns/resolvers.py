"""Upstreams besides the lab's own name server: unbound, dnsmasq, a signed zone, and one that does as it is told.

They run on the internet of a lab, on any of its server addresses, until the lab ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.netns.lab import NAME_SERVERS, READY_S_MAX, Lab, LabError
from tests.netns.spoken import Server

_TOLD = """
import collections, contextlib, json, os, random, select, socket, struct, sys
import dns.flags, dns.message, dns.rcode, dns.rdatatype, dns.rrset

address, names = sys.argv[1], json.loads(sys.argv[2])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
for s in (udp, listener): s.bind((address, 53))
listener.listen(64)
held, asked, unread, commands = [], collections.Counter(), {}, b""

def answer(message, transport, send):
    query = dns.message.from_wire(message)
    question = query.question[0]
    name, kind = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
    asked[f"{transport} {name} {kind}"] += 1
    how = names.get(name, {"rcode": "REFUSED"})
    how = {**how, **how.get(transport, {})}
    reply = dns.message.make_response(query)
    reply.set_rcode(dns.rcode.from_text(how.get("rcode", "NOERROR")))
    records = [record for record in how.get("records", ()) if record.split()[0] in (kind, "CNAME")]
    for record in random.sample(records, min(how.get("choose", len(records)), len(records))):
        of, data = record.split(None, 1)
        reply.answer.append(dns.rrset.from_text(question.name, how.get("ttl", 60), "IN", of, data))
    if how.get("tc"):
        reply.flags |= dns.flags.TC
    wire = reply.to_wire(max_size=65535)
    if how.get("hold"):
        held.append((send, wire))
    else:
        send(wire)

def send_framed(connection):
    return lambda wire: connection.send(struct.pack("!H", len(wire)) + wire)

print("ready", flush=True)
while True:
    for s in select.select([0, udp, listener, *unread], [], [])[0]:
        if s == 0:
            commands += os.read(0, 65536)
            *lines, commands = commands.split(b"\\n")
            for line in lines:
                if line == b"release":
                    for send, wire in held:
                        with contextlib.suppress(OSError):  # a connection may be closed by now
                            send(wire)
                    print(len(held), flush=True)
                    held.clear()
                elif line == b"asked":
                    print(json.dumps(asked), flush=True)
                else:
                    names.update(json.loads(line))
                    print("told", flush=True)
        elif s is udp:
            message, peer = udp.recvfrom(65535)
            answer(message, "udp", lambda wire, peer=peer: udp.sendto(wire, peer))
        elif s is listener:
            unread[listener.accept()[0]] = b""
        else:
            received = s.recv(65535)
            unread[s] += received
            if not received:
                del unread[s]
                s.close()
                continue
            while len(unread[s]) >= 2 and len(unread[s]) >= 2 + (length := int.from_bytes(unread[s][:2], "big")):
                message, unread[s] = unread[s][2:2 + length], unread[s][2 + length:]
                answer(message, "tcp", send_framed(s))
"""


class Told(Server):
    """An upstream on this address that does as it is told.

    names: by name with its final dot: `records` ("A 198.51.100.7"), `rcode`, `ttl`; `tc`: that bit is set; `hold`: the reply
    waits for `release`; `choose`: so many of the records, at random; `udp`, `tcp`: the same for this transport alone. It
    refuses names it was told nothing about.
    """

    def __init__(self, lab: Lab, address: str, names: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(lab, _TOLD, address, json.dumps(names))

    def tell(self, names: Mapping[str, Mapping[str, Any]]) -> None:
        assert self._said(json.dumps(names)) == "told"

    def release(self) -> int:
        """Send the replies that are held; gives how many."""
        return int(self._said("release"))

    def asked(self) -> dict[str, int]:
        """How often each question came: "udp a.test. A"."""
        counted: dict[str, int] = json.loads(self._said("asked"))
        return counted


# Answers one question, for an A record, by the address that is right; around it come forged replies with the other one, in all
# the ways in which a forger can be wrong. Prints for each way how many it sent.
_LIAR = """
import collections, json, random, socket, sys, time
address, elsewhere, right, wrong, count = *sys.argv[1:5], int(sys.argv[5])
chance = random.Random(1)

def at(address, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((address, port))
    return s

upstream, other_port, other_address = at(address, 53), at(address, 54), at(elsewhere, 53)
print("ready", flush=True)
asked, peer = upstream.recvfrom(4096)
end = asked.index(0, 12) + 5
number, question = asked[:2], asked[12:end]

def reply(number, question, told, flags="8180", questions=1):
    record = bytes.fromhex("c00c000100010000003c0004") + socket.inet_aton(told)
    return number + bytes.fromhex(flags) + bytes((0, questions, 0, 1, 0, 0, 0, 0)) + question + record

def another():
    return (int.from_bytes(number, "big") ^ chance.randrange(1, 65536)).to_bytes(2, "big")

other_questions = (
    bytes([1]) + b"b" + question[2:],
    question[:-4] + bytes.fromhex("001c0001"),
    question[:-2] + bytes.fromhex("0003"),
    bytes([question[0]]) + question[1:].swapcase(),
)
ways = {
    "wrong id": lambda: upstream.sendto(reply(another(), question, wrong), peer),
    "wrong question": lambda: upstream.sendto(reply(number, chance.choice(other_questions), wrong), peer),
    "no reply": lambda: upstream.sendto(reply(number, question, wrong, flags="0100"), peer),
    "no question": lambda: upstream.sendto(reply(number, b"", wrong, questions=0), peer),
    "wrong port": lambda: other_port.sendto(reply(number, question, wrong), peer),
    "wrong address": lambda: other_address.sendto(reply(number, question, wrong), peer),
    "any port": lambda: upstream.sendto(reply(another(), question, wrong), (peer[0], chance.randrange(1024, 65536))),
}
sent, begun, is_answered = collections.Counter(), time.monotonic(), False
for n in range(count):
    way = list(ways)[n % len(ways)]
    ways[way]()
    sent[way] += 1
    # The forger is to be heard: a full buffer at the other end would lose its work, and the real answer.
    if n % 50 == 0: time.sleep(0.0002)
    if not is_answered and (n > count * 3 // 4 or time.monotonic() > begun + 2):
        is_answered = True
        time.sleep(0.2)
        upstream.sendto(reply(number, question, right), peer)
print(json.dumps(sent), flush=True)
"""


class Liar:
    """An upstream whose one answer comes in a shower of `count` forged replies that say `wrong` instead of `right`."""

    def __init__(self, lab: Lab, address: str, *, elsewhere: str, right: str, wrong: str, count: int) -> None:
        self._process = lab.start(lab.internet, sys.executable, "-c", _LIAR, address, elsewhere, right, wrong, str(count))
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def sent(self) -> dict[str, int]:
        """Wait for its end; how many forged replies it sent in each way."""
        said, _ = self._process.communicate(timeout=60)
        counted: dict[str, int] = json.loads(said)
        return counted


def start_dnsmasq(lab: Lab, address: str, *options: str, namespace: str | None = None) -> None:
    """A cache in front of the lab's name server, on the internet if no other namespace is said."""
    inside = namespace or lab.internet
    line = ("dnsmasq", "-k", "-p", "53", "--no-resolv", "--no-hosts", "-C", "/dev/null", "--user=root", "--pid-file=")
    at = (f"--listen-address={address}", "--bind-interfaces", f"--server={NAME_SERVERS[0]}")
    lab.start(inside, *line, *at, *options, stdout=subprocess.DEVNULL)
    await_answers(lab, address, inside)


def start_unbound(lab: Lab, address: str, anchors: Mapping[str, str], stubs: Mapping[str, str]) -> None:
    """A validating resolver. anchors: a zone's key as in a zone file; stubs: a zone's server, the lab's own for the others."""
    configuration = lab.directory / "unbound.conf"
    stubs = {**stubs, ".": NAME_SERVERS[0]}
    configuration.write_text(
        f'server:\n  interface: {address}\n  do-daemonize: no\n  username: ""\n  chroot: ""\n  directory: "{lab.directory}"\n'
        '  pidfile: ""\n  use-syslog: no\n  logfile: ""\n  access-control: 0.0.0.0/0 allow\n  do-ip6: no\n'
        '  module-config: "validator iterator"\n  local-zone: "test." nodefault\n'
        + "".join(f'  trust-anchor: "{zone} {key}"\n' for zone, key in anchors.items())
        + "remote-control:\n  control-enable: no\n"
        + "".join(f'stub-zone:\n  name: "{zone}"\n  stub-addr: {server}\n' for zone, server in stubs.items())
    )
    lab.run(lab.internet, "unbound-checkconf", configuration)
    lab.start(lab.internet, "unbound", "-d", "-c", configuration, stdout=subprocess.DEVNULL)
    await_answers(lab, address, lab.internet)


def await_answers(lab: Lab, server: str, namespace: str) -> None:
    """Until it answers; before it listens, dig is refused at once and gives up."""
    deadline = time.monotonic() + READY_S_MAX
    while lab.run(namespace, "dig", f"@{server}", "ns.test", "+tries=1", "+time=1", "+short", check=False).returncode:
        if time.monotonic() > deadline:
            raise LabError(f"{server} does not answer after {READY_S_MAX} s")
        time.sleep(0.02)


def signed_zone(directory: Path, zone: str, lines: Sequence[str]) -> tuple[Path, str]:
    """A zone signed with a key of its own (RFC 6781 calls it a single type signing scheme): its file, and the key's record."""
    directory.mkdir(exist_ok=True)
    make_key = ("dnssec-keygen", "-q", "-a", "ECDSAP256SHA256", "-f", "KSK", "-K", directory, zone)
    stem = subprocess.run(make_key, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    key = directory / f"{stem}.key"
    source, signed = directory / f"{zone}zone", directory / f"{zone}signed"
    head = [f"$TTL 60\n$ORIGIN {zone}", f"@ SOA ns.test. hostmaster.{zone} 1 3600 600 86400 60", "@ NS ns.test."]
    source.write_text("\n".join([*head, *lines, f"$INCLUDE {key}"]) + "\n")
    sign = ("dnssec-signzone", "-q", "-z", "-K", directory, "-d", directory, "-o", zone, "-f", signed, source, directory / stem)
    subprocess.run(sign, capture_output=True, timeout=30, check=True)
    record = next(line for line in key.read_text().splitlines() if "DNSKEY" in line and not line.startswith(";"))
    return signed, record[record.index("DNSKEY") :]
