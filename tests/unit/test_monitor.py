"""What is made of facts: lines, filters, Hubble's events, counts for a screen."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.cli.environment import Environment
from agent.control import ControlError
from agent.control.client import Feed
from agent.core.names import NamePattern
from agent.monitor.facts import KnownEndpoints, is_endpoint, verdict_of
from agent.monitor.filters import Filter
from agent.monitor.hubble import Exporter
from agent.monitor.lines import line_of
from agent.monitor.pace import LINES_PER_SECOND, Pace
from agent.monitor.tally import ROWS_MAX, WINDOW_S, Count, Tally, rows_of
from tests.facts import Row, denied, drop, endpoint, flow, question

ENDPOINTS = KnownEndpoints(lambda: [endpoint(1), endpoint(2, {"app": "e2", "namespace": "lab"})])
LOST = {"kind": "lost", "count": 1234}
CHATTER = drop("224.0.0.251", 5353, kind="chatter", protocol="udp")
AUDITED = question("c.test.", verdict="audited", rule="no rule")


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        (question("a.test.", "198.51.100.7"), "03:04:05.000 ep1    allowed A    a.test 198.51.100.7 p.txt:3 1.5 ms"),
        (question("a.test.", rcode=3), "03:04:05.000 ep1    allowed A    a.test NXDOMAIN p.txt:3 1.5 ms"),
        (question("a.test.", type="TXT"), "03:04:05.000 ep1    allowed TXT  a.test no address p.txt:3 1.5 ms"),
        (denied(), "03:04:05.000 ep1    denied  A    b.test (no policy allows this name)"),
        (AUDITED, "03:04:05.000 ep1    audited A    c.test no address (no policy allows this name) 1.5 ms"),
        (
            denied(outcome="failed", verdict="allowed", why="too late"),
            "03:04:05.000 ep1    failed  A    b.test (too late)",
        ),
        (flow("198.51.100.7", 443, "a.test."), "03:04:05.000 ep1    allowed tcp  a.test:443 (198.51.100.7) p.txt:3"),
        (drop(), "03:04:05.000 ep1    denied  tcp  198.51.100.9:443 not resolved through the proxy"),
        (drop("2001:db8::9", audited=True, why=None), "03:04:05.000 ep1    audited tcp  [2001:db8::9]:443 policy"),
        (
            flow(direction="ingress", source="198.51.100.7", port=22),
            "03:04:05.000 ep1    allowed tcp  from 198.51.100.7 to :22 p.txt:3",
        ),
        (flow(protocol="icmp", port=8), "03:04:05.000 ep1    allowed icmp 198.51.100.7 p.txt:3"),
        (CHATTER, "03:04:05.000 ep1    chatter udp  224.0.0.251:5353"),
        ({"kind": "policy", "policies": 2, "endpoints": 3}, "             -      policy  2 policies in force for 3 endpoints"),
        (LOST, "             -      lost    1,234 events came faster than they could be told"),
    ],
)
def test_a_fact_is_one_line(fact: Row, line: str) -> None:
    """When, whose, verdict, what."""
    assert line_of(fact, ENDPOINTS) == line


def test_a_line_fits_a_terminal_and_colours_its_verdict() -> None:
    """An ellipsis says that there is more; colour takes no room."""
    line = line_of(drop(), ENDPOINTS, width=60)
    assert len(line) == 60
    assert line.endswith("…")
    coloured = line_of(drop(), ENDPOINTS, width=60, is_coloured=True)
    assert coloured.replace("\x1b[31mdenied\x1b[0m", "denied") == line


def test_a_name_gives_a_terminal_no_orders() -> None:
    """The network chose it: escape sequences are shown, not obeyed."""
    line = line_of(denied("\x1b[2J.test."), ENDPOINTS)
    assert "\x1b" not in line
    assert r"\x1b[2J.test" in line


def test_a_flood_is_as_many_lines_as_can_be_looked_at() -> None:
    """Alike ones are one; of the rest it is said how many there were, and so is what was lost, once a second."""
    now = 0.0
    pace = Pace(lambda fact, times: f"{fact['kind']} {fact.get('count', times)}", lambda: now)
    assert list(pace.lines([drop(), drop(), denied()])) == ["drop 2", "question 1"]
    many = [drop(port=port) for port in range(500)]
    assert len(list(pace.lines([LOST, *many]))) == LINES_PER_SECOND - 2
    assert list(pace.lines([LOST])) == []
    now = 1.0
    assert list(pace.lines([])) == [f"{500 - LINES_PER_SECOND + 2} more are not shown: `-o json` has them all", "lost 2468"]
    assert list(pace.lines([drop()])) == ["drop 1"]


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [
        (Filter(), 6),
        (Filter(verdicts=frozenset({"denied"})), 2),
        (Filter(verdicts=frozenset({"allowed", "audited"})), 4),
        (Filter(name=NamePattern("*.test.")), 5),
        (Filter(name=NamePattern("b.test.")), 1),
        (Filter(port=443), 2),
        (Filter(port=53), 3),
        (Filter(port=8443), 1),
        (Filter(endpoint="app=e2"), 1),
        (Filter(endpoint="ep1"), 5),
        (Filter(endpoint="2"), 1),
        (Filter(endpoint="2", verdicts=frozenset({"allowed"})), 0),
    ],
)
def test_filters_take_what_they_say(chosen: Filter, taken: int) -> None:
    """All that is given must hold; what was lost is taken by every one."""
    facts = [
        question("a.test.", "198.51.100.7"),
        denied(),
        AUDITED,
        flow("198.51.100.7", 443, "a.test."),
        drop(),
        drop("198.51.100.9", 8443, "a.test.", endpoint=2, audited=True),
    ]
    wanted = chosen.kinds_wanted()
    assert [fact for fact in facts if chosen.takes(fact, ENDPOINTS) and fact["kind"] not in wanted] == []
    assert sum(chosen.takes(fact, ENDPOINTS) for fact in facts) == taken
    assert chosen.takes(LOST, ENDPOINTS)


def test_the_agent_is_asked_for_no_more_than_can_be_shown() -> None:
    """To hear of allowed flows costs an event each: who wants denials does not ask for them."""
    assert Filter(verdicts=frozenset({"denied"})).kinds_wanted() == ["question", "drop"]
    assert Filter(port=443).kinds_wanted() == ["verdict", "drop", "chatter"]
    assert Filter(kinds=frozenset({"policy"}), port=443).kinds_wanted() == []
    assert Filter(endpoint="7").endpoint_number() == 7
    assert Filter(endpoint="ep7").endpoint_number() is None


def test_an_endpoint_that_came_later_is_asked_for_once_a_second_at_most() -> None:
    """A flood of facts about one that is already gone is not a flood of questions."""
    rows, asked, now = [endpoint(1)], 0, 0.0

    def ask() -> list[Row]:
        nonlocal asked
        asked += 1
        return rows

    known = KnownEndpoints(ask, lambda: now)
    rows.append(endpoint(2))
    assert known.of(denied(endpoint=2)) is None
    now = 1.0
    for _ in range(3):
        assert known.of(denied(endpoint=2)) == endpoint(2)
        assert known.of(denied(endpoint=3)) is None
    assert asked == 2
    assert not is_endpoint(endpoint(2), "app=e1")


# --- Hubble ----------------------------------------------------------------------------------------------------------


def exported(fact: Row) -> list[Row]:
    return list(Exporter(ENDPOINTS, "host").events(fact))


def test_an_answered_question_is_a_request_and_a_response() -> None:
    """As Cilium's proxy tells it: redirected, then forwarded the other way, with what was answered."""
    fact = question("a.test.", "198.51.100.7", "198.51.100.8", cnames=["x.test."])
    request, response = (event["flow"] for event in exported(fact))
    assert (request["verdict"], response["verdict"]) == ("REDIRECTED", "FORWARDED")
    assert (request["Type"], request["event_type"]["type"], request["is_reply"]) == ("L7", 129, False)
    assert request["time"] == "2026-01-02T03:04:04.998500Z"
    assert request["source"] == response["destination"] == {
        "ID": 1, "namespace": "default", "labels": ["k8s:app=e1"], "pod_name": "ep1",
    }  # fmt: skip
    assert request["l7"] == {
        "type": "REQUEST",
        "dns": {"query": "a.test.", "qtypes": ["A"], "observation_source": "proxy"},
    }
    assert response["l7"]["latency_ns"] == "1500000"
    dns = response["l7"]["dns"]
    assert (dns["ips"], dns["ttl"], dns["cnames"], dns["rcode"]) == (["198.51.100.7", "198.51.100.8"], 60, ["x.test."], 0)
    assert response["Summary"] == 'DNS Answer "198.51.100.7,198.51.100.8" TTL: 60 (Proxy a.test. A)'


@pytest.mark.parametrize(
    ("fact", "verdicts"),
    [
        (denied(), ["DROPPED"]),
        (AUDITED, ["AUDIT", "FORWARDED"]),
        (denied(outcome="failed", verdict="allowed"), ["REDIRECTED", "FORWARDED"]),
        (denied(outcome="gone", verdict="allowed"), ["REDIRECTED"]),
        ({"kind": "question", "time": denied()["time"], "endpoint": 1, "outcome": "ignored"}, []),
        (flow(), ["FORWARDED"]),
        (drop(), ["DROPPED"]),
        (CHATTER, ["DROPPED"]),
        (drop(audited=True), ["AUDIT"]),
    ],
)
def test_verdicts_have_hubbles_words(fact: Row, verdicts: list[str]) -> None:
    """Also where there was no answer to tell of."""
    assert [event["flow"]["verdict"] for event in exported(fact)] == verdicts


def test_packets_are_policy_verdicts_and_drops() -> None:
    """With the names that --to-fqdn compares, which have no final dot, and the far side's kind."""
    ((event,), (dropped,)) = exported(flow("198.51.100.7", 443, "a.test.")), exported(drop())
    allowed = event["flow"]
    assert (allowed["event_type"], allowed["destination_names"]) == ({"type": 5}, ["a.test"])
    assert allowed["l4"] == {"TCP": {"source_port": 40000, "destination_port": 443}}
    assert allowed["egress_allowed_by"] == [{"name": "/etc/p.txt:3"}]
    assert event["node_name"] == "host"
    assert event["time"] == allowed["time"] == "2026-01-02T03:04:05.000000Z"
    flow_of_drop = dropped["flow"]
    assert (flow_of_drop["event_type"], flow_of_drop["drop_reason_desc"]) == ({"type": 1, "sub_type": 133}, "POLICY_DENIED")
    assert flow_of_drop["destination"] == {"identity": 2, "labels": ["reserved:world"]}


def test_another_endpoint_is_told_by_its_labels() -> None:
    """So that policies between endpoints can be made of it."""
    ((event,)) = exported(flow("192.0.2.2"))
    assert event["flow"]["destination"]["labels"] == ["k8s:app=e2", "k8s:namespace=lab"]
    assert event["flow"]["destination"]["namespace"] == "lab"


def test_what_is_no_flow_is_an_event() -> None:
    """64-bit numbers are texts in proto3 JSON."""
    policy = {"kind": "policy", "time": denied()["time"], "policies": 2, "endpoints": 1}
    assert exported(policy)[0]["agent_event"] == {"type": "POLICY_UPDATED", "policy_update": {"rule_count": "2"}}
    assert exported(LOST)[0]["lost_events"] == {"source": "OBSERVER_EVENTS_QUEUE", "num_events_lost": "1234"}


# --- counting --------------------------------------------------------------------------------------------------------


def test_rates_are_of_whole_seconds_that_are_over() -> None:
    """The second that has just begun would make every rate look small."""
    tally = Tally()
    for second in range(WINDOW_S + 3):
        for _ in range(10 + second):
            tally.take(drop(), ENDPOINTS, second + 0.5)
    now = WINDOW_S + 2.9
    counted = range(2, WINDOW_S + 2)
    assert tally.everybody.per_second(Count.DROPS, now) == sum(10 + second for second in counted) / WINDOW_S
    assert tally.by_endpoint[1].totals[Count.DROPS] == sum(10 + second for second in range(WINDOW_S + 3))
    assert tally.everybody.per_second(Count.DROPS, now + WINDOW_S + 1) == 0


def test_one_that_floods_does_not_push_out_the_others() -> None:
    """Each endpoint has rows of its own, and what is seen again is the latest again."""
    tally = Tally()
    tally.take(question("quiet.test.", endpoint=2), ENDPOINTS, 0.0)
    for number in range(3 * ROWS_MAX):
        tally.take(denied(f"n{number}.test."), ENDPOINTS, 0.0)
        tally.take(denied("again.test."), ENDPOINTS, 0.0)
    rows = rows_of(tally.names, None)
    assert len(rows) == ROWS_MAX + 1
    assert [row.name for row in rows_of(tally.names, 2)] == ["quiet.test."]
    assert (rows[0].name, rows[0].asked, rows[0].verdict) == ("again.test.", 3 * ROWS_MAX, "denied")
    tally.take(LOST, ENDPOINTS, 0.0)
    assert tally.lost == 1234
    tally.keep([1])
    assert rows_of(tally.names, 2) == []


# --- the command -----------------------------------------------------------------------------------------------------


class Agent:
    """Tells these facts to who listens, and ends."""

    def __init__(self, *facts: Row) -> None:
        self.facts = facts
        self.wanted: tuple[Any, ...] = ()

    def connect(self, _path: Path, _patience: float) -> Agent:
        return self

    def ask(self, command: str, /, **_arguments: object) -> object:
        assert command == "endpoints"
        return [endpoint(1), endpoint(2)]

    def listen(self, path: Path, kinds: Any, number: int | None) -> Feed:
        self.wanted = (list(kinds), number)
        ours, theirs = socket.socketpair()
        lines = [{"data": {}}, *({"fact": fact} for fact in self.facts)]
        theirs.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        theirs.close()
        return Feed(path, ours)


def call(agent: Agent, *arguments: str, root: bool = True) -> Result:
    environment = Environment(connect=agent.connect, listen=agent.listen, is_root=lambda: root)
    return CliRunner(env={"COLUMNS": None, "NAMEGATE_CONTROL": None}).invoke(main, arguments, obj=environment)


def test_monitor_writes_lines_and_says_that_the_agent_ended() -> None:
    """Exit code 2: it was to go on. In a pipe nothing is cut, coloured or left out."""
    result = call(Agent(*[denied()] * 300, drop()), "monitor")
    assert result.exit_code == 2
    assert len(result.stdout.splitlines()) == 301
    assert "\x1b" not in result.stdout
    assert result.stderr == "the agent at /run/namegate/control.sock ended\n"


def test_monitor_filters_and_tells_the_agent_what_it_wants() -> None:
    """By pattern as in a policy."""
    agent = Agent(question("a.x.test.", "198.51.100.7"), denied("b.test."), LOST)
    result = call(agent, "monitor", "--name", "*.X.test", "--endpoint", "1", "-o", "json")
    assert [json.loads(line)["kind"] for line in result.stdout.splitlines()] == ["question", "lost"]
    assert agent.wanted == (["question", "verdict", "drop", "guard"], 1)


def test_monitor_speaks_hubble() -> None:
    """Every line is JSON of its own."""
    lines = call(Agent(question("a.test.", "198.51.100.7"), drop()), "monitor", "-o", "hubble").stdout.splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["flow"] * 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("monitor", "--name", "https://a.test"), "is a URL"),
        (("monitor", "--kind", "policy", "--verdict", "denied"), "nothing can be shown"),
        (("top",), "this is none: `namegate monitor` writes lines"),
    ],
)
def test_wrong_uses_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    """Before an agent is asked."""
    result = call(Agent(), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


@pytest.mark.parametrize("command", ["monitor", "top"])
def test_who_is_not_root_is_told(command: str) -> None:
    """And why."""
    result = call(Agent(), command, root=False)
    assert result.exit_code == 2
    assert "needs root" in result.stderr


def test_a_verdict_is_what_became_of_it() -> None:
    """A question may be allowed and fail."""
    facts = (question(), denied(), AUDITED, denied(outcome="gone", verdict="allowed"), flow(), drop(), drop(audited=True), LOST)
    found = [verdict_of(fact) for fact in facts]
    assert found == ["allowed", "denied", "audited", "failed", "allowed", "denied", "audited", None]


# --- the feed and the screen -----------------------------------------------------------------------------------------


def test_a_feed_gives_whole_lines_and_says_when_it_ended() -> None:
    """However they are cut on the way; a refusal is a ControlError."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b'{"data": 1}\n{"fact": {"kind": "x"}}\n{"fact": ')
        with Feed(Path("c.sock"), ours) as feed:
            assert feed.data == 1
            assert feed.read(0) == [{"fact": {"kind": "x"}}]
            assert feed.read(0) == []
            theirs.sendall(b'{"kind": "y"}}\n')
            assert feed.read() == [{"fact": {"kind": "y"}}]
            theirs.shutdown(socket.SHUT_RDWR)
            with pytest.raises(ControlError, match="ended"):
                feed.read()
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"error": "no such thing", "exit": 1}\n')
    with ours, theirs, pytest.raises(ControlError, match="no such thing"):
        Feed(Path("c.sock"), ours)


def test_the_screen_follows_its_keys() -> None:
    """Orders, endpoints, a standstill, and the end; all of it at 80 columns."""
    from textual.widgets import Static

    from agent.monitor.screen import Top

    now = 10.0
    ours, theirs = socket.socketpair()
    facts = [question("b.test.", endpoint=2), *[denied("a.test.")] * 3, drop(), question("z.test.", "198.51.100.7")]
    theirs.sendall(b'{"data": {}}\n' + b"".join(json.dumps({"fact": fact}).encode() + b"\n" for fact in facts))
    screen = Top(Feed(Path("c.sock"), ours), ENDPOINTS, lambda: now)

    def shown(name: str) -> list[str]:
        return str(screen.query_one(f"#{name}", Static).render()).splitlines()

    def names() -> list[str]:
        return [line.split()[0] for line in shown("names")[1:]]

    async def use() -> None:
        nonlocal now
        async with screen.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.05)
            now += 1.0
            await pilot.press("space", "space")
            assert names() == ["z.test", "a.test", "b.test"]
            await pilot.press("s")
            assert names() == ["a.test", "z.test", "b.test"]
            await pilot.press("s", "e", "e")
            assert names() == ["b.test"]
            assert shown("totals")[0].startswith("asked 0/s")
            assert shown("totals")[0].endswith("ep2, by name")
            await pilot.press("a")
            assert names() == ["a.test", "b.test", "z.test"]
            assert shown("drops")[1].startswith("198.51.100.9:443")
            assert max(len(line) for part in ("totals", "endpoints", "names", "drops") for line in shown(part)) <= 80
            theirs.close()
            await pilot.pause(0.05)

    asyncio.run(use())
    assert screen.ended is not None
    ours.close()
