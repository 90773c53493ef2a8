"""What somebody else writes into the kernel's tables is found, told and mended; what the agent is writing is no difference.

VERIFY_NAMES (250 addresses each), VERIFY_CHURN_S and VERIFY_CHURN_PER_S make it longer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from agent.control.client import Control
from tests.netns.asking import ask, connect
from tests.netns.lab import Lab, fresh_address
from tests.netns.lookups import Lookups
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

NAMES: Final = int(os.environ.get("VERIFY_NAMES", "6"))
PER_NAME: Final = 250
CHURN_S: Final = float(os.environ.get("VERIFY_CHURN_S", "3"))
POLICY: Final = "*.test:7/tcp\n198.51.100.128/25:9002/udp\n!198.51.100.200/32\n"
# A busy machine's.
ROW_US_MAX: Final = 15
NETWORKS: Final = 300
CHURN_PER_S: Final = int(os.environ.get("VERIFY_CHURN_PER_S", "1500"))
# Minutes, where nothing is broken, are a second here.
FOUND_S_MAX: Final = 20

RECORDS: Final = {
    f"many{name}.test.": [f"A {ipaddress.ip_address('198.19.0.0') + PER_NAME * name + i}" for i in range(PER_NAME)]
    for name in range(NAMES)
}

MapRow = tuple[list[str], list[str]]  # octets of key and value, as bpftool writes them


class Maps:
    """The pinned maps, in the hands of somebody with bpftool."""

    def __init__(self, agent: RunningAgent) -> None:
        (self._directory,) = (agent.pins / "maps").iterdir()

    def rows(self, name: str) -> list[MapRow]:
        said = self._bpftool("-j", "map", "dump", "pinned", self._directory / name)
        return sorted((row["key"], row["value"]) for row in json.loads(said))

    def put(self, name: str, key: list[str], value: list[str]) -> None:
        self._bpftool("map", "update", "pinned", self._directory / name, "key", *key, "value", *value)

    def delete(self, name: str, key: list[str]) -> None:
        self._bpftool("map", "delete", "pinned", self._directory / name, "key", *key)

    @staticmethod
    def _bpftool(*arguments: str | Path) -> str:
        return subprocess.run(["bpftool", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=RECORDS, fresh=4_000, ttl_s=3600) as lab:
        yield lab


def with_octet(octets: list[str], at: int, value: int) -> list[str]:
    return [f"0x{value:02x}" if place == at else octet for place, octet in enumerate(octets)]


# Map, its table, what is changed: an octet of the value of one row; and an octet of its key that makes another row of it.
CASES: Final = [
    ("groups", "groups", (0, 77), (0, 99)),
    ("groups", "groups", (4, 0), (1, 9)),
    ("endpoints", "endpoints", (4, 88), (1, 9)),
    ("policy", "policy", (0, 3), (5, 9)),  # a verdict; in a set that is not
    ("policy", "policy", (0, 9), (12, 1)),  # no verdict at all; the other direction
    ("policy", "policy", (1, 3), (0, 40)),  # the bits that count; a row of every identity of the set
    ("ipcache4", "ipcache", (0, 1), (11, 99)),  # the host; an address that nobody brought
    ("ipcache6", "ipcache", (3, 9), (23, 99)),
    ("own_addresses", "own_addresses", (0, 0), (19, 99)),
]


@pytest.fixture(scope="class")
def quiet(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that compares only when it is asked."""
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("quiet"), is_talkative=False, datapath={"verify-every": 0}) as agent:
        assert ask(lab, "n1.test").addresses
        assert ask(lab, "n1.test", "AAAA").addresses
        yield agent


class TestWhenAsked:
    def test_each_row_of_each_table_is_compared_and_repaired(self, quiet: RunningAgent) -> None:
        """Changed, added, deleted: one difference, of this table, and after the repair the map is as it was to the octet."""
        maps = Maps(quiet)
        for map_name, table, in_value, in_key in CASES:
            before = maps.rows(map_name)
            key, value = before[-1]
            edits: list[Callable[[], None]] = [
                partial(maps.put, map_name, key, with_octet(value, *in_value)),
                partial(maps.put, map_name, with_octet(key, *in_key), value),
                partial(maps.delete, map_name, key),
            ]
            for edit in edits:
                edit()
                said = quiet.ask("verify")
                assert [(row["table"], row["mended"]) for row in said["differences"]] == [(table, False)], said
                assert said["differences"][0]["should_be"] != said["differences"][0]["is"]
                assert maps.rows(map_name) != before
                said = quiet.ask("verify", repair=True)
                assert [row["mended"] for row in said["differences"]] == [True], said
                assert maps.rows(map_name) == before
                assert quiet.ask("verify")["found"] == 0
        assert quiet.status()["state"] == "enforcing"

    def test_a_key_with_octets_behind_its_prefix_is_the_row_it_is(self, quiet: RunningAgent) -> None:
        """A trie does not look at them: the row of every port is there, whatever stands in its port. Its value counts."""
        maps = Maps(quiet)
        rows = maps.rows("policy")
        key, value = next((key, value) for key, value in rows if key[0] == "0x48")  # 72 bits: every protocol
        maps.put("policy", with_octet(key, 15, 5), value)
        assert quiet.ask("verify")["found"] == 0
        maps.put("policy", with_octet(key, 15, 6), with_octet(value, 0, 1 if value[0] != "0x01" else 3))
        assert quiet.ask("verify", repair=True)["found"] == 1
        assert maps.rows("policy") == rows

    def test_the_command_says_what_comes_of_a_difference(self, quiet: RunningAgent) -> None:
        """Exit code 1 with a difference, also when it is repaired; 0 without."""
        control = quiet.directory / "run" / "control.sock"

        def verify(*options: str) -> tuple[int, str]:
            command = (sys.executable, "-m", "agent", "--control", str(control), "verify", *options)
            done = quiet.lab.run(quiet.lab.host, *command, check=False)
            return done.returncode, done.stdout + done.stderr

        maps = Maps(quiet)
        key, value = next((key, value) for key, value in maps.rows("policy") if key[0] == "0x60" and value[0] == "0x01")
        maps.put("policy", key, with_octet(value, 0, 3))
        code, said = verify()
        assert code == 1
        for line in (r"policy: set 1, identity \d+, egress, (tcp|udp) port \d+", r"  should be  allow, by .*policy.yaml:\d"):
            assert re.search(line, said), said
        assert "  is         deny, by" in said
        assert "  so         what the rule allows is dropped" in said
        code, said = verify("--repair")
        assert (code, said.splitlines()[-2:]) == (1, ["  now        as it should be", "1 difference"])
        code, said = verify()
        assert (code, said.splitlines()[-1]) == (0, "no difference")
        code, said = verify("-o", "json")
        assert (code, json.loads(said)["differences"]) == (0, [])


@pytest.mark.parametrize("batch", [True, False])
def test_in_the_background_rows_and_programs_are_mended(lab: Lab, tmp_path: Path, batch: bool) -> None:
    """An address that was put open is shut again, what was taken away is written again, programs are put back; each is a fact
    and counted. batch: whether the kernel gives many rows at once.
    """
    testing = {"without": [] if batch else ["batch"]}
    datapath = {"verify-every": "0.2s"}
    with RunningAgent(lab, POLICY, tmp_path / "agent", is_talkative=False, datapath=datapath, testing=testing) as agent:
        assert ask(lab, "n1.test").addresses == (fresh_address(1),)
        maps = Maps(agent)
        key, value = next((k, v) for k, v in maps.rows("ipcache4") if k[0] == "0x40" and k[8:10] == ["0xc6", "0x12"])
        elsewhere = with_octet(key, 11, 77)
        control = Control(agent.directory / "run" / "control.sock", patience=FOUND_S_MAX)
        with control.listen("facts", kinds=["repair"], endpoint=None) as facts:

            def told(table: str) -> dict[str, Any]:
                until = time.monotonic() + FOUND_S_MAX
                while time.monotonic() < until:
                    for line in facts.read(within_s=FOUND_S_MAX):
                        fact: dict[str, Any] = line["fact"]
                        if fact.get("table") == table:
                            return fact
                raise AssertionError(f"no fact of {table}")

            maps.put("ipcache4", elsewhere, value)
            fact = told("ipcache")
            assert (fact["row"], fact["mended"]) == ("198.18.0.77/32, scope shared", True)
            assert connect(lab, "198.18.0.77", 7) == "connection refused"

            maps.delete("ipcache4", key)
            assert told("ipcache")["row"] == f"{fresh_address(1)}/32, scope shared"
            assert connect(lab, fresh_address(1), 7) == "connected"

            policy = maps.rows("policy")
            for policy_key, _ in policy:
                maps.delete("policy", policy_key)
            assert told("policy")["mended"]
            await_equal(lambda: maps.rows("policy"), policy)

            for link in (agent.pins / "links").glob("*"):
                if not link.name.startswith(gate_index(lab)):
                    subprocess.run(["bpftool", "link", "detach", "pinned", link], check=True, capture_output=True)
            assert told("hooks")["is"] == "our program is not there: nothing is enforced"
        status = agent.await_status(lambda status: status["state"] == "enforcing", within_s=FOUND_S_MAX)
        assert connect(lab, "198.18.0.77", 7) == "connection refused"
        counted = status["counters"]
        assert counted["foreign kernel rows deleted"] == 1
        assert counted["kernel rows written again"] >= 1 + len(policy)
        assert counted["programs put back"] >= 1
        assert "somebody changed the kernel, mended: ipcache row 198.18.0.77/32" in agent.log.read_text()


def gate_index(lab: Lab) -> str:
    links = json.loads(lab.run(lab.host, "ip", "-j", "link", "show", "ng-gate").stdout)
    return f"{links[0]['ifindex']}-"


def await_equal(read: Callable[[], object], wanted: object) -> None:
    until = time.monotonic() + FOUND_S_MAX
    while read() != wanted:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_the_agent_writes_is_no_difference(lab: Lab, tmp_path: Path) -> None:
    """Names that live for a second are asked all the time, then policies of many rows change; all is compared meanwhile."""
    dns = {"ttl-cap": "1s", "ttl-floor": "0s", "keep-while-flow-seen": "0s"}
    datapath = {"verify-every": "0.1s", "questions-per-second": 0}
    with RunningAgent(lab, POLICY, tmp_path / "agent", is_talkative=False, dns=dns, datapath=datapath) as agent:
        with Lookups(lab, 4_000, CHURN_PER_S) as lookups:
            until = time.monotonic() + CHURN_S
            rounds = 0
            while time.monotonic() < until:
                said = agent.ask("verify")
                assert said["found"] == 0, said
                assert said["background"] is None or said["background"]["found"] == 0, said
                rounds += 1
        with ThreadPoolExecutor(max_workers=1) as beside:
            applied = beside.submit(change_policies, agent)
            while not applied.done():
                assert agent.ask("verify")["found"] == 0
                rounds += 1
            applied.result()
        status = agent.status()
        print(f"\n{rounds} comparisons while {lookups.looked.sent} questions were asked: {status['counters']}")
        assert rounds > 1
        assert not {"foreign kernel rows deleted", "kernel rows written again"} & status["counters"].keys()


def change_policies(agent: RunningAgent) -> None:
    """Hundreds of rows come and go."""
    networks = "".join(f"203.0.{number // 256}.{number % 256}/32:80/tcp\n" for number in range(NETWORKS))
    for policy in (POLICY + networks, POLICY):
        agent.apply(policy)


def test_what_the_background_costs(lab: Lab, tmp_path: Path) -> None:
    """At most a hundredth of a processor. Where the machine has time a row is 4 us: of 100,000 rows a round in a minute."""
    with RunningAgent(lab, POLICY, tmp_path / "agent", is_talkative=False, datapath={"verify-every": "0.5s"}) as agent:
        for name in range(NAMES):
            assert len(ask(lab, f"many{name}.test", "A", "+tcp").addresses) == PER_NAME
        last: dict[str, Any] = {"rows": 0}
        until = time.monotonic() + 120
        while last["rows"] < NAMES * PER_NAME and time.monotonic() < until:
            with contextlib.suppress(TypeError):
                last = {**last, **agent.ask("verify")["background"]}
            time.sleep(0.2)
        print(f"\n{last}")
        assert last["rows"] >= NAMES * PER_NAME
        assert last["worked_ms"] / 1000 <= 0.01 * last["took_s"]
        assert last["worked_ms"] * 1000 / last["rows"] <= ROW_US_MAX
