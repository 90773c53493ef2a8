"""Hosts that are not as the agent would like them: found by `namegate doctor` with a remedy, and worked around where possible.

Every condition is made true in a namespace's own settings; the judge of "worked around" is a client that asks and connects.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agent.datapath import syscall
from tests.bpf.lab import inside
from tests.netns.asking import ask, connect
from tests.netns.lab import NAME_SERVERS, Lab, fresh_address, fresh_name
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

POLICY = "*.test:7/tcp\n"
_CILIUM = ("ip", "rule", "add", "fwmark", "0x200/0xf00", "lookup", "99", "priority", "5000")


def doctor(agent: RunningAgent) -> tuple[int, dict[str, dict[str, str]]]:
    """Its exit code, and its conditions by name; of several with one name the worst."""
    lab = agent.lab
    said = lab.run(
        lab.host, sys.executable, "-m", "agent", "doctor", "-c", agent.configuration, "-o", "json", timeout_s=60, check=False
    )
    rows = sorted(json.loads(said.stdout), key=lambda row: ["good", "worked around", "bad"].index(row["state"]))
    return said.returncode, {row["name"]: row for row in rows}


def bad(agent: RunningAgent) -> dict[str, str]:
    """What is bad, and the remedy."""
    code, found = doctor(agent)
    wrong = {name: row["remedy"] for name, row in found.items() if row["state"] == "bad"}
    assert code == (1 if wrong else 0)
    return wrong


def forwarding_warnings(agent: RunningAgent, wanted: int) -> list[str]:
    """Whose, as soon as there are so many."""
    until = time.monotonic() + 10
    while True:
        found = re.findall(r"WARNING.* ip_forward is 0: what (.*) sends", agent.log.read_text().replace("net.ipv4.", ""))
        if len(found) >= wanted or time.monotonic() > until:
            return found
        time.sleep(0.02)


def assert_gate_works(lab: Lab, number: int = 0) -> None:
    """Both families and transports, and the first packet after the answer."""
    for options in ((), ("+tcp",)):
        for server in NAME_SERVERS:
            answer = ask(lab, fresh_name(number), "A", *options, server=server)
            assert (answer.status, answer.addresses) == ("NOERROR", (fresh_address(number),))
    assert connect(lab, fresh_address(number), 7) == "connected"
    assert ask(lab, "denied.example").status == "NXDOMAIN"


def started(agent: RunningAgent) -> tuple[int, str]:
    """A start that should fail: its exit code, and all that it said."""
    done = agent.lab.run(
        agent.lab.host, sys.executable, "-m", "agent", "agent", "-c", agent.configuration, timeout_s=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_good_host(tmp_path: Path) -> None:
    """With an agent and without one: nothing is bad, and nothing is changed by looking."""
    with Lab(fresh=1) as lab:
        agent = RunningAgent(lab, POLICY, tmp_path / "agent")
        assert bad(agent) == {}
        assert lab.run(lab.host, "ip", "-br", "link", "show", "type", "veth").stdout.count("ng-gate") == 0
        with agent:
            code, found = doctor(agent)
            assert code == 0
            assert found["agent"]["found"] == "runs and enforces"
            assert found["compiler"]["found"].startswith("the program is compiled already")
            assert found["upstreams"]["state"] == "good"


def test_strict_source_validation(tmp_path: Path) -> None:
    """src_valid_mark (wg-quick) and strict reverse path filters: our device has its own rule and filter."""
    strict = {f"ipv4/conf/{name}/{key}": 1 for name in ("all", "default", "ep1") for key in ("src_valid_mark", "rp_filter")}
    with Lab(fresh=1) as lab:
        lab.settle(lab.host, strict)
        with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
            code, found = doctor(agent)
            assert code == 0
            assert (found["src_valid_mark"]["state"], found["rp_filter"]["state"]) == ("worked around", "worked around")
            assert_gate_works(lab)


_CLOSED = """
table inet host {
  chain input {
    type filter hook input priority filter; policy drop
    ct state established,related accept
    iifname "lo" accept
    meta l4proto { icmp, ipv6-icmp } accept
  }
}
"""


def test_a_firewall(tmp_path: Path) -> None:
    """A closed INPUT keeps questions from the agent: doctor and the log say which chain, and the rule they give opens it."""
    rules = tmp_path / "closed.nft"
    rules.write_text(_CLOSED)
    with Lab(fresh=1) as lab:
        lab.run(lab.host, "nft", "-f", rules)
        with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
            assert ask(lab, fresh_name(0)).status == "no answer"
            code, found = doctor(agent)
            assert code == 1
            assert found["firewall"]["found"].startswith("nftables inet host input drops what comes by ng-gate")
            assert "nftables inet host input drops DNS on its way to us" in agent.log.read_text()
            assert found["runs"]["found"].startswith("nftables inet host input drops what comes by ng-runs")
            for title in ("firewall", "runs"):
                lab.run(lab.host, "sh", "-e", "-c", found[title]["remedy"].partition("  (")[0])
            assert bad(agent) == {}
            assert_gate_works(lab)


def test_a_port_of_a_bridge(tmp_path: Path) -> None:
    """With bridge-nf-call-iptables a bridged packet loses the socket it was given; ours goes to the device first."""
    call = "bridge/bridge-nf-call-iptables"
    if not Path("/proc/sys/net", call).exists():
        pytest.skip("this kernel has no br_netfilter")
    with Lab(fresh=1) as lab:
        v4, v6 = lab.client.gateways
        for command in (
            "link add br0 type bridge",
            "link set br0 up",
            f"addr del {v4}/30 dev ep1",
            f"-6 addr del {v6}/64 dev ep1",
            "link set ep1 master br0",
            f"addr add {v4}/30 dev br0",
            f"-6 addr add {v6}/64 dev br0 nodad",
        ):
            lab.run(lab.host, "ip", *command.split())
        lab.settle(lab.host, {call: 1, "bridge/bridge-nf-call-ip6tables": 1, "ipv4/ip_forward": 1})
        with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
            code, found = doctor(agent)
            assert code == 0
            assert found["bridges"]["state"] == "worked around"
            assert_gate_works(lab)


def test_a_program_in_front(tmp_path: Path) -> None:
    """Whoever puts a program before ours may hide it: doctor says where it is, status that nothing is certain any more."""
    with Lab(fresh=1) as lab, RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        assert bad(agent) == {}
        with _foreign_program(lab, "ep1"):
            assert "bpftool net show dev ep1" in bad(agent)["programs"]
            assert agent.status()["state"] == "degraded"
        assert bad(agent) == {}


@contextlib.contextmanager
def _foreign_program(lab: Lab, interface: str) -> Iterator[None]:
    """First at the interface's ingress; lets everything by."""
    with inside(lab.host):
        program = syscall.program_load(bytes.fromhex("b7000000000000009500000000000000"), "foreign")
        link = syscall.tcx_attach(program, socket.if_nametoindex(interface), syscall.TCX_INGRESS)
    try:
        yield
    finally:
        os.close(link)
        os.close(program)


def test_mark_bits_in_use(tmp_path: Path) -> None:
    """Bits that a routing rule looks at are left to it; a restart keeps the choice, though they are free again by then."""
    with Lab(fresh=2) as lab:
        lab.run(lab.host, *_CILIUM)
        with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
            assert_gate_works(lab)
            code, found = doctor(agent)
            assert code == 0
            assert (found["mark"]["state"], "0x2000/0x3000" in found["mark"]["found"]) == ("worked around", True)
            lab.run(lab.host, *_CILIUM[:2], "del", *_CILIUM[3:])
            agent.end(signal.SIGTERM)
            agent.start()
            assert "mark 0x2000/0x3000" in lab.run(lab.host, "ip", "link", "show", "ng-gate").stdout
            assert_gate_works(lab, 1)


@pytest.mark.parametrize(
    ("command", "stated", "sentence", "condition"),
    [
        ("ip rule add fwmark 0x200/0xf00 lookup 99 priority 9", {}, "choose another `datapath.rule-priority`", "routing"),
        ("ip rule add from all lookup 99 priority 3", {}, "choose another `datapath.rule-priority`", "routing"),
        ("ip rule add from 10.0.0.0/8 lookup 2004 priority 700", {}, "choose another `datapath.routing-table`", "routing"),
        ("ip route add 10.1.0.0/16 dev up0 table 2004", {}, "choose another `datapath.routing-table`", "routing"),
        ("ip link add ng-gate type bridge", {}, "choose another `datapath.device`", "routing"),
        (" ".join(_CILIUM), {"mark": 0xA00}, "has bits of the rule `5000:", "mark"),
    ],
)
def test_somebody_has_it_already(tmp_path: Path, command: str, stated: dict[str, int], sentence: str, condition: str) -> None:
    """A rule, table, device or mark of somebody else is refused in a sentence that says which setting to change; nothing is
    attached, and doctor says the same."""
    with Lab() as lab:
        agent = RunningAgent(lab, POLICY, tmp_path / "agent", datapath=stated)
        lab.run(lab.host, *command.split())
        before = lab.run(lab.host, "sh", "-c", "ip link; ip rule; ip -6 rule; ip route show table all").stdout
        code, said = started(agent)
        assert code == 2
        assert sentence in said
        assert "Traceback" not in said
        assert not agent.pins.exists()
        assert lab.run(lab.host, "sh", "-c", "ip link; ip rule; ip -6 rule; ip route show table all").stdout == before
        assert condition in bad(agent)


def test_forwarding_is_off(tmp_path: Path) -> None:
    """What the endpoint sends would end at this host, whatever policy says; the remedy is the host's setting."""
    with Lab(fresh=1) as lab:
        lab.settle(lab.host, {"ipv4/ip_forward": 0})
        assert bad(RunningAgent(lab, POLICY, tmp_path / "agent")) == {"forwarding": "sysctl -w net.ipv4.ip_forward=1"}


def test_the_log_says_that_forwarding_is_off(tmp_path: Path) -> None:
    """Once at the start and once for an interface that is attached; not of one that forwards for itself alone."""
    with Lab(fresh=1, clients=2) as lab:
        one, two = (each.endpoint for each in lab.clients)
        lab.settle(lab.host, {"ipv4/ip_forward": 0})
        with RunningAgent(lab, POLICY, tmp_path / "agent", endpoints=[{"interface": one, "addresses": ["10.0.0.2"]}]) as agent:
            assert forwarding_warnings(agent, 1) == [one]
            agent.ask("attach", interface=two, addresses=["10.0.0.6"])
            assert forwarding_warnings(agent, 2) == [one, two]
            lab.settle(lab.host, {f"ipv4/conf/{two}/forwarding": 1})
            agent.end(signal.SIGTERM)
            agent.start()
            assert forwarding_warnings(agent, 3) == [one, two, one]


def test_upstreams_that_do_not_answer(tmp_path: Path) -> None:
    """None answers: bad; one of two: the other is asked."""
    with Lab(fresh=1) as lab:
        silent = "198.51.100.77"  # there, but no name server
        agent = RunningAgent(lab, POLICY, tmp_path / "agent", dns={"upstreams": [silent]})
        assert "upstreams" in bad(agent)
        agent = RunningAgent(lab, POLICY, tmp_path / "agent", dns={"upstreams": [silent, NAME_SERVERS[0]]})
        assert doctor(agent)[1]["upstreams"]["state"] == "worked around"


@pytest.mark.parametrize(
    ("dropped", "missing"), [("-net_admin", "CAP_NET_ADMIN"), ("-bpf,-sys_admin,-perfmon", "CAP_BPF, CAP_PERFMON")]
)
def test_root_without_its_rights(tmp_path: Path, dropped: str, missing: str) -> None:
    """Root in a container has often not all capabilities: one sentence says which are missing."""
    with Lab() as lab:
        agent = RunningAgent(lab, POLICY, tmp_path / "agent")
        done = lab.run(
            lab.host, "setpriv", f"--bounding-set={dropped}", sys.executable, "-m", "agent", "agent", "-c", agent.configuration,
            check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert f"root has no {missing} here" in done.stderr
        assert "Traceback" not in done.stderr


def test_no_bpf_file_system(tmp_path: Path) -> None:
    """Pins elsewhere are refused with the command that mounts one; doctor gives it as the remedy."""
    with Lab() as lab:
        agent = RunningAgent(lab, POLICY, tmp_path / "agent", datapath={"pin-directory": str(tmp_path / "pins")})
        code, said = started(agent)
        assert (code, "mount -t bpf bpf" in said, "Traceback" in said) == (2, True, False)
        assert bad(agent)["bpffs"].startswith("mount -t bpf bpf")


def test_without_newer_features(tmp_path: Path) -> None:
    """As on Linux 6.1: clsact filters, and rows read one by one; a restart takes all over, and cleanup leaves no qdisc."""
    with Lab(fresh=2) as lab:
        testing = {"without": ["tcx", "batch"]}
        with RunningAgent(lab, POLICY, tmp_path / "agent", testing=testing) as agent:
            assert "namegate-" in lab.run(lab.host, "tc", "filter", "show", "dev", "ep1", "ingress").stdout
            assert_gate_works(lab)
            agent.end(signal.SIGKILL)
            assert connect(lab, fresh_address(0), 7) == "connected"
            assert connect(lab, fresh_address(1), 7) == "connection refused"
            agent.start()
            assert connect(lab, fresh_address(0), 7) == "connected"
            assert_gate_works(lab, 1)
        assert "clsact" not in lab.run(lab.host, "tc", "qdisc", "show").stdout


def test_the_configuration_is_wrong(tmp_path: Path) -> None:
    """Doctor's exit code is then 2: it was used wrongly."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({"endpoints": []}))
    done = subprocess.run(
        [sys.executable, "-m", "agent", "doctor", "-c", str(wrong)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
