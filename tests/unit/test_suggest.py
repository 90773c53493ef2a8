"""Records, the policies made of them, and records judged by other policies."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.cli.environment import Environment
from agent.control import ControlError
from agent.control.client import Feed
from agent.policy.files import read_policy_text
from agent.suggest.propose import Proposal, as_list, as_policies, propose
from agent.suggest.record import Recorder, RecordError, read_record
from agent.suggest.replay import Replay, replay
from agent.suggest.traffic import read_traffic
from tests.facts import Row, at, denied, drop, endpoint, flow, question

HEAD = {"record": "namegate", "version": 1, "time": at(0), "host": "here"}
ENDPOINTS = {"kind": "endpoints", "time": at(0), "endpoints": [endpoint(1), endpoint(2), endpoint(3, {"app": "e1"})]}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A record of these facts."""

    def written(*facts: Row, rows: Row = ENDPOINTS) -> Path:
        path = tmp_path / "one.rec"
        path.write_text("".join(json.dumps(row) + "\n" for row in (HEAD, rows, *facts)))
        return path

    return written


def proposals(path: Path, **how: bool) -> list[Proposal]:
    return [propose(party, **how) for party in read_traffic([path]).parties]


def entries(path: Path, **how: bool) -> list[str]:
    """Of a list, without comments."""
    lines = as_list(proposals(path, **how), []).splitlines()
    return [line.split()[0] for line in lines if not line.startswith("#")]


def replayed(path: Path, policy: str) -> Replay:
    reading = read_policy_text("p.txt", policy.encode())
    assert not reading.mistakes, reading.mistakes
    return replay(read_traffic([path]), reading.policies)


def changes(path: Path, policy: str) -> list[str]:
    return [str(change) for change in replayed(path, policy).changes]


# --- what a policy would be ------------------------------------------------------------------------------------------


def test_a_flow_belongs_to_the_name_that_was_asked(write: Write) -> None:
    """Exact, with its port; an address without a name stands for itself; ports of one name are entries of their own."""
    record = write(
        question("a.test.", "198.51.100.7", "2001:db8::7"),
        flow("198.51.100.7", 443),
        flow("2001:db8::7", 8443, protocol="udp"),
        flow("198.51.100.9", 25),
        flow("2001:db8::9", 25),
        flow("198.51.100.7", 8, protocol="icmp"),
    )
    assert entries(record) == [
        "a.test/icmp", "a.test:443/tcp", "a.test:8443/udp", "198.51.100.9:25/tcp", "[2001:db8::9]:25/tcp",
    ]  # fmt: skip


def test_names_that_share_an_address_are_all_suggested(write: Write) -> None:
    """Nobody sees which one was meant, and tomorrow they may be at different addresses. One asked long ago is not."""
    record = write(
        question("old.test.", "198.51.100.7", seconds=0),
        question("a.test.", "198.51.100.7", seconds=100),
        question("b.test.", "198.51.100.7", seconds=101),
        flow("198.51.100.7", 443, seconds=102),
    )
    assert entries(record) == ["a.test:443/tcp", "b.test:443/tcp", "old.test/icmp"]
    assert "on an address of other names too" in as_list(proposals(record), [])


def test_a_name_asked_before_the_record_began_is_what_the_agent_knew(write: Write) -> None:
    """And a name that is only asked opens nothing but questions."""
    record = write(flow("198.51.100.7", 443, "a.test."), question("nowhere.test.", rcode=3))
    assert entries(record) == ["a.test:443/tcp", "nowhere.test/icmp"]


def test_what_was_denied_says_so_and_can_be_left_out(write: Write) -> None:
    """Audit's too. A name that was asked and denied, and nothing more, is told and not suggested: nobody knows what for."""
    record = write(
        question("a.test.", "198.51.100.7"),
        flow("198.51.100.7"),
        denied("b.test."),
        question("c.test.", "198.51.100.8", verdict="audited"),
        drop("198.51.100.8", audited=True),
        question("d.test.", rcode=3, verdict="audited"),
        drop("198.51.100.9"),
    )
    text = as_list(proposals(record), [])
    first, *rest = text.splitlines()
    assert first == "# b.test: only asked, 1 x; ep1; was denied; what for was not seen"
    comments = {line.split()[0]: line.partition("# ")[2] for line in rest}
    assert comments == {
        "a.test:443/tcp": "1 flow; asked 1 x; ep1",
        "d.test/icmp": "only asked, 1 x; ep1; audited: would have been denied",
        "c.test:443/tcp": "1 flow; asked 1 x; ep1; audited: would have been denied",
        "198.51.100.9:443/tcp": "no name was seen for it; 1 flow; ep1; was denied",
    }
    assert entries(record, only_allowed=True) == ["a.test:443/tcp"]


def test_what_no_policy_would_change_is_not_suggested(write: Write) -> None:
    """A rule's denial was meant; a spoofed source, a zone transfer, what came in are not what this is about."""
    record = write(
        drop("198.51.100.66", reason="deny", rule="/etc/p.txt:9"),
        drop("198.51.100.67", reason="source"),
        denied("b.test.", why="no zone transfers"),
        denied("b.test.", verdict=None, outcome="failed", why="too many open questions"),
        flow(direction="ingress", source="198.51.100.7", port=22),
        drop("198.51.100.9", 0, protocol="47"),
    )
    (proposal,) = proposals(record)
    assert proposal.entries == []
    assert proposal.besides == [
        "1 flow of IP protocol 47 to 198.51.100.9: no entry opens that alone",
        "1 flow denied by /etc/p.txt:9: left so",
        "1 flow came in: this is about what goes out",
    ]


@pytest.mark.parametrize("name", ["198.51.100.7.", "*.test.", r"a\.b.test.", "x" * 70 + ".test.", "."])
def test_a_name_that_a_policy_would_read_otherwise_is_not_written(write: Write, name: str) -> None:
    """The workload has chosen it."""
    assert entries(write(denied(name))) == []
    assert entries(write(flow("198.51.100.7", 443, name))) == ["198.51.100.7:443/tcp"]


def test_patterns_are_for_who_asks_and_never_take_strangers_names(write: Write) -> None:
    """Three siblings are a pattern; two are written out; below a public suffix nobody's are."""
    few = [f"n{number}.few.example.com." for number in range(2)]
    many = [f"n{number}.many.example.com." for number in range(3)]
    public = [f"n{number}.co.uk." for number in range(3)]
    facts = [question(name, f"198.51.100.{number}") for number, name in enumerate((*few, *many, *public))]
    record = write(*facts, *(flow(f"198.51.100.{number}") for number in range(len(facts))))
    exact = sorted(name.removesuffix(".") + ":443/tcp" for name in (*few, *many, *public))
    assert sorted(entries(record)) == exact
    assert sorted(entries(record, patterns=True)) == sorted(
        ["*.many.example.com:443/tcp", *(each for each in exact if ".many." not in each)]
    )


def test_endpoints_with_the_same_labels_are_one_policy(write: Write) -> None:
    """A CiliumNetworkPolicy for each set of labels; both forms are taken without a mistake or a doubt."""
    record = write(
        question("a.test.", "198.51.100.7"),
        flow("198.51.100.7"),
        flow("198.51.100.7", 8, protocol="icmp"),
        flow("198.51.100.9", 25),
        question("b.test.", "198.51.100.8", endpoint=3),
        question("c.test.", "198.51.100.8", endpoint=2),
        *(flow("198.51.100.8", port, endpoint=2) for port in range(1000, 1050)),
    )
    found = proposals(record)
    assert [str(each.party) for each in found] == ["app=e1", "app=e2"]
    policies = read_policy_text("p.yaml", as_policies(found, ["a heading"]).encode())
    assert (policies.mistakes, policies.cautions) == ((), ())
    assert [policy.name for policy in policies.policies] == ["suggested-app-e1", "suggested-app-e2"]
    of_e2 = policies.policies[1]
    assert of_e2.selects({"app": "e2"})
    assert not of_e2.selects({"app": "e1"})
    assert len(of_e2.rules) == 3, "DNS, and ports in two lists, for there are at most 40 in one"
    assert replay(read_traffic([record]), policies.policies).changes == []
    listed = read_policy_text("p.txt", as_list(found, ["a heading"]).encode())
    assert (listed.mistakes, listed.cautions) == ((), ())


# --- what would change -----------------------------------------------------------------------------------------------


def test_what_passed_and_would_be_denied_breaks(write: Write) -> None:
    """An audited packet passed as well."""
    record = write(
        question("a.test.", "198.51.100.7"),
        flow("198.51.100.7"),
        question("c.test.", "198.51.100.8", verdict="audited"),
        drop("198.51.100.8", audited=True),
    )
    assert replayed(record, "a.test:443/tcp\nc.test:443\n") == Replay([], 4)
    assert changes(record, "a.test:443/tcp\n") == [
        "now denied: question for c.test. of app=e1 (was 1 x audited)",
        "now denied: tcp/443 to 198.51.100.8 (c.test.) of app=e1 (was 1 x audited)",
    ]
    assert changes(record, "a.test:80/tcp\nc.test\n!198.51.100.8/32\n") == [
        "now denied: tcp/443 to 198.51.100.7 (a.test.) of app=e1 (was 1 x allowed)",
        "now denied by p.txt:3: tcp/443 to 198.51.100.8 (c.test.) of app=e1 (was 1 x audited)",
    ]


def test_a_name_that_cannot_be_asked_is_not_learned(write: Write) -> None:
    """Then what opens the name opens nothing, as it would be with the agent."""
    record = write(question("a.test.", "198.51.100.7"), flow("198.51.100.7"))
    policy = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\nspec:\n  endpointSelector: {}\n"
    policy += "  egress:\n  - toFQDNs: [{matchName: a.test}]\n"
    policy += "  - toPorts: [{ports: [{port: '53', protocol: ANY}], rules: {dns: [{matchName: %s}]}}]\n"
    assert changes(record, policy % "a.test") == []
    assert changes(record, policy % "other.test") == [
        "now denied: question for a.test. of app=e1 (was 1 x allowed)",
        "now denied: tcp/443 to 198.51.100.7 (a.test.) of app=e1 (was 1 x allowed)",
    ]


def test_what_was_denied_and_would_pass_is_told_and_breaks_nothing(write: Write) -> None:
    """With the line that would let it."""
    record = write(denied("b.test."), drop("198.51.100.9"), drop("198.51.100.66", reason="deny", rule="/etc/p.txt:9"))
    found = replayed(record, "b.test\n198.51.100.0/24:443\n")
    assert [str(change) for change in found.changes] == [
        "now allowed by p.txt:1: question for b.test. of app=e1 (was 1 x denied)",
        "now allowed by p.txt:2: tcp/443 to 198.51.100.9 of app=e1 (was 1 x denied)",
        "now allowed by p.txt:2: tcp/443 to 198.51.100.66 of app=e1 (was 1 x denied)",
    ]
    assert found.breaks == []


def test_what_comes_in_is_judged_too(write: Write) -> None:
    """A list closes what goes out alone."""
    record = write(flow(direction="ingress", source="198.51.100.7", port=22))
    assert changes(record, "a.test\n") == []
    policy = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\n"
    policy += "spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {app: e2}}]}]}\n"
    assert changes(record, policy) == ["now denied: tcp/22 from 198.51.100.7 of app=e1 (was 1 x allowed)"]
    assert changes(write(flow(direction="ingress", source="192.0.2.2", port=22), denied(endpoint=2)), policy) == [
        "now allowed: question for b.test. of app=e2 (was 1 x denied)"
    ]


def test_an_endpoint_that_learns_alone_is_not_taught_by_others(write: Write) -> None:
    """A name that only the other one asked is not open to it; endpoints that share do learn of each other."""
    facts = question("a.test.", "198.51.100.7", endpoint=2), flow("198.51.100.7")
    assert changes(write(*facts), "a.test\n") == []
    alone = {**ENDPOINTS, "endpoints": [endpoint(1, scope="endpoint 1"), endpoint(2)]}
    assert changes(write(*facts, rows=alone), "a.test\n") == ["now denied: tcp/443 to 198.51.100.7 of app=e1 (was 1 x allowed)"]


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"a.test:443\n", "is no record"),
        (b'{"record": "namegate", "version": 2}\n', "of version 2"),
        (b'{"record": "namegate", "version": 1}\nnonsense\n', "one.rec:2: this is no line"),
    ],
)
def test_what_is_no_record_is_said(tmp_path: Path, content: bytes, sentence: str) -> None:
    """With the line where one is wrong."""
    path = tmp_path / "one.rec"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=sentence):
        list(read_record(path))
    with pytest.raises(RecordError, match="cannot be read"):
        list(read_record(tmp_path / "none.rec"))


def test_a_torn_last_line_is_dropped(write: Write) -> None:
    """The machine died while it was written."""
    path = write(denied())
    with path.open("a") as file:
        file.write('{"kind": "dr')
    assert len(list(read_record(path))) == 3


def test_loss_and_gaps_are_said_above_the_policy(write: Write) -> None:
    """What is suggested may not be enough."""
    record = write(question("a.test."), {"kind": "lost", "count": 1234}, {"kind": "gap", "time": at(9), "seconds": 3.0})
    result = call("suggest", str(record))
    assert "# Events that the record lacks: 1,234; gaps in it: 1. More may be needed than this." in result.stdout


class Agents:
    """Agents that tell their facts one after the other; None is a time without one. The last one tells and goes on."""

    def __init__(self, *agents: Sequence[Row] | None) -> None:
        self._left: Iterator[Sequence[Row] | None] = iter(agents)
        self._ends: list[socket.socket] = []
        self.rows = [endpoint(1)]

    def connect(self, _path: Path, _patience: float) -> Agents:
        return self

    def ask(self, command: str, /, **_arguments: object) -> object:
        assert command == "endpoints"
        return self.rows

    def listen(self, path: Path, kinds: Any, number: int | None) -> Feed:
        assert (list(kinds), number) == (["question", "verdict", "drop"], None)
        for each in self._ends:
            each.close()
        facts = next(self._left, None)
        if facts is None:
            raise ControlError("no agent is running")
        ours, theirs = socket.socketpair()
        theirs.sendall(b'{"data": {}}\n' + b"".join(json.dumps({"fact": fact}).encode() + b"\n" for fact in facts))
        if self._left.__length_hint__():  # type: ignore[attr-defined]
            theirs.close()
        else:
            self._ends.append(theirs)
        return Feed(path, ours)

    def close(self) -> None:
        for each in self._ends:
            each.close()


@pytest.fixture
def agents() -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(*each: Sequence[Row] | None) -> Agents:
        made.append(Agents(*each))
        return made[-1]

    yield make
    for one in made:
        one.close()


def call(*arguments: str, agent: Agents | None = None, root: bool = True) -> Result:
    world = agent or Agents()
    environment = Environment(connect=world.connect, listen=world.listen, is_root=lambda: root)
    return CliRunner(env={"COLUMNS": None, "NAMEGATE_CONTROL": None}).invoke(main, arguments, obj=environment)


def test_a_record_goes_on_with_the_next_agent(tmp_path: Path, agents: Callable[..., Agents]) -> None:
    """The gap is in the file, so are the endpoints as the next one numbers them; nobody else may read it."""
    path = tmp_path / "one.rec"
    agent = agents([denied(), {"kind": "lost", "count": 7}], None, [denied("c.test.", endpoint=2)])
    agent.rows = [endpoint(1), endpoint(2)]
    result = call("record", str(path), "--for", "1500ms", agent=agent)
    assert result.exit_code == 0, result.output
    assert [line.get("kind", "head") for line in read_record(path)] == [
        "head", "endpoints", "question", "lost", "gap", "endpoints", "question",
    ]  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    began, ended = result.stderr.splitlines()
    assert began == f"recording into {path}"
    assert ended.startswith(f"2 questions, 0 flows, 0 drops in {path}; 7 events are not there")
    assert ended.endswith("; gaps without an agent: 1")


def test_a_record_ends_with_its_size(tmp_path: Path, agents: Callable[..., Agents]) -> None:
    """Without any --for."""
    path = tmp_path / "one.rec"
    result = call("record", str(path), "--size", "5K", agent=agents([denied()] * 100))
    assert result.exit_code == 0
    assert 5 << 10 <= path.stat().st_size < 100 << 10


def test_a_record_is_on_disk_however_it_ends(tmp_path: Path, agents: Callable[..., Agents]) -> None:
    """Ctrl-C is the usual end, and a good one; the file is synced before."""
    synced = threading.Event()
    agent = agents([denied()])
    recorder = Recorder(
        tmp_path / "one.rec", lambda kinds: agent.listen(Path("c"), kinds, None), list, for_s=None, octets_max=1
    )
    before = os.fsync

    def fsync(file: int) -> None:
        synced.set()
        before(file)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            recorder.run(interrupt)
    assert synced.is_set()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--for", "soon"), "`soon` is not a duration"),
        (("--size", "large"), "`large` is not a size"),
        (("--size", "0"), "`0` is not a size"),
        ((), "is there already"),
    ],
)
def test_record_says_what_it_cannot_do(
    write: Write, agents: Callable[..., Agents], arguments: tuple[str, ...], sentence: str
) -> None:
    """A record that is there is never written over."""
    path = write()
    before = path.read_bytes()
    result = call("record", str(path), *arguments, agent=agents([]))
    assert (result.exit_code, path.read_bytes()) == (2, before)
    assert sentence in result.stderr


# --- the commands ----------------------------------------------------------------------------------------------------


def test_suggest_needs_no_root_and_speaks_both_forms(write: Write, tmp_path: Path) -> None:
    """What it prints is taken by `check`, also against the same record."""
    record = write(question("a.test.", "198.51.100.7"), flow("198.51.100.7"), denied("b.test.", endpoint=2))
    for form in ("list", "cnp"):
        result = call("suggest", "-o", form, str(record), root=False)
        policy = tmp_path / "p"
        policy.with_suffix(".yaml").write_text(result.stdout)
        checked = call("check", "--against", str(record), str(policy.with_suffix(".yaml")), root=False)
        assert checked.exit_code == 0, checked.output
        assert "0 now denied" in checked.stdout
        assert "# app=e2: b.test: only asked, 1 x; ep2; was denied; what for was not seen\n" in result.stdout
    one = call("suggest", "--endpoint", "app=e2", str(record))
    assert (one.exit_code, one.stdout, "app=e2: b.test: only asked, 1 x" in one.stderr) == (1, "", True)


def test_suggest_says_when_there_is_nothing(write: Write) -> None:
    """Exit code 1: the answer is no."""
    result = call("suggest", str(write()))
    assert (result.exit_code, result.stderr) == (1, "nothing was recorded that a policy could allow\n")


def test_check_against_a_record_is_a_no_where_something_breaks(write: Write, tmp_path: Path) -> None:
    """And a wrong use where the record is none."""
    policy = tmp_path / "p.txt"
    policy.write_text("b.test\n")
    result = call("check", "--against", str(write(flow())), str(policy), root=False)
    assert result.exit_code == 1
    assert result.stdout.endswith("1 now denied, 0 now allowed, 0 as recorded\n")
    assert call("check", "--against", str(policy), str(policy)).exit_code == 2
