"""The demo: a refused connection becomes a passed one because a name was asked. Everything in namespaces of its own.

Called by scripts/demo. Every line shown is what a real client in the network of tests/netns/lab.py saw, or what the agent
answered; a step that goes another way ends the demo with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent.core.types import packed
from tests.netns.asking import Answer, ask, connect
from tests.netns.lab import NAME_SERVERS, Capture, Lab, LabError
from tests.netns.pcap import ACK, SYN, TCP, read
from tests.netns.running import AgentFailed, RunningAgent

NAME, SERVER = "api.example.test", "198.51.100.10"
DENIED = "evil.example.test"
POLICY = f"{NAME}:443/tcp\n"
LIFETIME_S = 2


class Failed(Exception):
    """A step went another way than the demo says."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Watch a name open an address, and nothing else.")
    parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    kept = Path(tempfile.mkdtemp(prefix="namegate-demo-"))
    dns = {"ttl-floor": f"{LIFETIME_S}s", "keep-while-flow-seen": "1s"}
    print("building a network of namespaces, and starting the agent in it (the first start compiles the datapath) …")
    begun = time.monotonic()
    try:
        with (
            Lab(records={f"{NAME}.": [f"{LIFETIME_S} A {SERVER}"], f"{DENIED}.": ["A 198.51.100.66"]}, ports=(443,)) as lab,
            RunningAgent(lab, POLICY, kept / "agent", dns=dns) as agent,
        ):
            print(f"… the agent enforces, after {time.monotonic() - begun:.1f} s")
            tell(lab, agent, kept)
    except (Failed, AgentFailed, LabError) as failure:
        print(f"\n  NOT as it should be: {failure}\n  see {kept}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(kept, ignore_errors=True)
        print("\n  stopped; everything the demo made is removed", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `scripts/demo | head`: nobody reads on, and the interpreter's own flush would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        shutil.rmtree(kept, ignore_errors=True)
        return 128 + signal.SIGPIPE
    print(f"  captures, the agent's log and its record of writes: {kept}\n  everything else the demo made is removed again")
    return 0


def stop(_number: int, _frame: FrameType | None) -> None:
    """Ends the demo once: a second, impatient Ctrl-C must not end the removal of what it made, nor the commands that do it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # not a function: ignored is what children inherit
    raise KeyboardInterrupt


def tell(lab: Lab, agent: RunningAgent, kept: Path) -> None:
    client = lab.client
    print(f"""
  client {client.addresses[0]} ── {client.endpoint} [namegate] host ── internet: nsd {NAME_SERVERS[0]}, TCP server {SERVER}

  policy: {POLICY.strip()}, and nothing else
""")
    captures = [
        lab.capture(client.namespace, client.device, name="client"),
        lab.capture(lab.host, lab.uplink, name="uplink"),
    ]
    step(f"connect to {SERVER}:443, which nobody has resolved", connect(lab, SERVER), "refused")
    step(f"ask for {DENIED}, which no rule allows", as_text(ask(lab, DENIED)), "NXDOMAIN")
    step(f"ask for {NAME}", as_text(ask(lab, NAME)), SERVER)
    step("connect, at once", connect(lab, SERVER), "connected")
    for row in agent.ask("names"):
        selectors = ", ".join(row["selectors"])
        print(f"    learned: {row['name']} is {row['address']}, for {row['expires_in']} s more, by {selectors}")
    print(f"    … the lifetime ends ({LIFETIME_S} s here), and no flow uses the address any more …")
    agent.await_status(lambda status: status["names"] == 0, within_s=20)
    step(f"connect to {SERVER}:443 again", connect(lab, SERVER), "refused")
    step(f"ask for {NAME} again, over TCP", as_text(ask(lab, NAME, "A", "+tcp")), SERVER)
    step("connect, at once", connect(lab, SERVER), "connected")
    show_times(agent, captures, kept)


def step(what: str, seen: str, wanted: str) -> None:
    print(f"  {what:<56} {seen}", flush=True)
    if wanted not in seen:
        raise Failed(f"expected: {wanted}")


def as_text(answer: Answer) -> str:
    if answer.addresses:
        return ", ".join(answer.addresses)
    return f"{answer.status}, extended error {answer.error}" if answer.error else answer.status


def show_times(agent: RunningAgent, captures: list[Capture], kept: Path) -> None:
    """From the agent's record of acknowledged writes, and the capture on the client's side of the hook."""
    agent.inject()  # flushes the record
    writes = [json.loads(line) for line in agent.trace.read_text().splitlines()]
    rows = [write["at_ns"] for write in writes if write["key"] == f"{SERVER}/32" and write["put"] and not write["errno"]]
    for capture in captures:
        capture.stop()
        shutil.copy(capture.path, kept)
    replies: list[int] = []
    firsts: list[int] = []
    for packet in read(kept / "client.pcap").packets:
        if packet.source_port == 53 and packed(SERVER) in packet.payload:
            replies.append(packet.at_ns)
        is_syn = packet.protocol == TCP and packet.flags & (SYN | ACK) == SYN
        if is_syn and packet.destination == packed(SERVER) and len(firsts) < len(replies):
            firsts.append(packet.at_ns)
    print("\n  the kernel acknowledged the row, then:   reply on the client's wire    its first SYN")
    for row, reply, first in zip(rows, replies, firsts, strict=False):
        print(f"{'':43}{(reply - row) / 1000:+14.0f} µs     {(first - row) / 1000:+14.0f} µs")
        if reply < row:
            raise Failed("a reply was on the wire before its row was acknowledged")
    if not len(rows) == len(replies) == len(firsts) == 2:
        raise Failed(f"seen: {len(rows)} rows written, {len(replies)} replies, {len(firsts)} first packets; expected 2 each")
    status = agent.status()
    print(f"  questions {status['questions']}, denied {status['denied']}, packets dropped {status['dropped']}\n")


if __name__ == "__main__":
    raise SystemExit(main())
