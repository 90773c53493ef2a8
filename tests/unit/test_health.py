"""The order of upstreams by how they answered: its own promises, then what a client sees of it."""

from __future__ import annotations

import statistics

import pytest

from agent.core.events import UpstreamFailed
from agent.core.health import REST_FIRST_S, REST_LAST_S, SILENT_QUESTIONS, Health
from agent.core.proxy import QUESTION_S_MAX, TRY_S_MAX
from agent.core.settings import Settings, Upstream
from agent.core.types import packed
from tests.sim.world import World, allow

A, B, C, D = (Upstream(packed(f"203.0.113.{host}")) for host in (53, 54, 55, 56))
NOBODYS = Upstream(packed("198.51.100.1"))


def silent(health: Health, *upstreams: Upstream, now: float = 0.0) -> None:
    for upstream in upstreams:
        for _ in range(SILENT_QUESTIONS):
            health.failed(upstream, now)


def test_the_order_is_the_configured_one_until_a_row_of_silences() -> None:
    """A reply in between begins the row anew."""
    health = Health((A, B, C))
    for _ in range(SILENT_QUESTIONS - 1):
        health.failed(A, 0.0)
    health.answered(A)
    for _ in range(SILENT_QUESTIONS - 1):
        health.failed(A, 0.0)
    assert (health.order(0.0), health.resting()) == ([A, B, C], [])
    health.failed(A, 0.0)
    assert (health.order(0.0), health.resting()) == ([B, C, A], [A])
    health.answered(A)
    assert (health.order(0.0), health.resting()) == ([A, B, C], [])


def test_all_silent_is_the_configured_order() -> None:
    """Nobody is left out."""
    health = Health((A, B, C))
    silent(health, C, B, A)
    assert health.order(0.0) == [A, B, C]


def test_after_a_rest_one_question_looks_and_the_rests_grow() -> None:
    """The next question goes without it until the one that looked has its answer, or the next rest is over."""
    health = Health((A, B))
    silent(health, A)
    now, rests = 0.0, []
    for _ in range(7):
        begun = now
        while health.order(now) == [B, A]:
            now += 0.5
        rests.append(now - begun)
        assert health.order(now) == [B, A], "a second question at the same time"
        health.failed(A, now + TRY_S_MAX)
    assert rests == [REST_FIRST_S, 4.0, 8.0, 16.0, 32.0, REST_LAST_S, REST_LAST_S]
    health.answered(A)
    silent(health, A, now=now)
    assert health.order(now + REST_FIRST_S) == [A, B], "the silences of before count no more"


def test_a_question_looks_at_one_upstream_at_most() -> None:
    """It would wait for both."""
    health = Health((A, B, C))
    silent(health, A, B)
    assert health.order(REST_FIRST_S) == [A, C, B]
    assert health.order(REST_FIRST_S) == [B, C, A]
    assert health.order(REST_FIRST_S) == [C, A, B]


def test_questions_given_up_while_it_rests_do_not_lengthen_the_rest() -> None:
    """A thousand may have been on their way when it went silent."""
    health = Health((A, B))
    silent(health, A)
    for _ in range(1_000):
        health.failed(A, 1.0)
    assert health.order(REST_FIRST_S) == [A, B]


def test_a_server_named_by_a_policy_is_not_remembered() -> None:
    """Clients choose those: what they have not answered would fill the memory."""
    health = Health((A, B))
    silent(health, NOBODYS)
    assert health.silences == {}


# --- as a client sees it ----------------------------------------------------------------------------------------------


class Client:
    """Asks one question after the other; upstreams in `down` say nothing, the others answer at once."""

    def __init__(self, *upstreams: Upstream, down: set[Upstream]) -> None:
        self.world = World(Settings(upstreams=upstreams))
        self.world.start(allow("*.a.test"))
        self.down = down
        self.asked: list[Upstream] = []
        self._count = 0

    def lookup(self) -> float:
        """Seconds until the answer, which is not SERVFAIL unless all are down."""
        world, begun, name = self.world, self.world.now, f"n{self._count}.a.test"
        self._count += 1
        asker = world.ask(name)
        self.asked.clear()
        while not world.answers_of(asker):
            number = world.transaction_of(asker)
            assert number is not None
            upstream = Upstream(world.asked[number].server, world.asked[number].port)
            self.asked.append(upstream)
            if upstream in self.down:
                deadline = world.engine.next_deadline()
                assert deadline is not None
                world.advance(deadline - world.now)
            else:
                world.reply(asker, "198.51.100.7")
        answer = world.answer_of(asker)
        assert (answer.rcode == "NOERROR") is not (self.down >= set(world.settings.upstreams))
        assert answer.at - begun <= QUESTION_S_MAX
        return answer.at - begun


def test_a_dead_first_upstream_costs_the_first_questions_alone() -> None:
    """Then one in every rest; when it is back it is the first again."""
    client = Client(A, B, down={A})
    assert [client.lookup() for _ in range(SILENT_QUESTIONS)] == [TRY_S_MAX] * SILENT_QUESTIONS
    took = []
    for _ in range(1_000):
        took.append(client.lookup())
        client.world.advance(0.1)
    assert statistics.median(took) == 0
    assert sum(seconds > 0 for seconds in took) == 5, "in 108 s: after rests of 2, 4, 8, 16 and 32 s"
    client.down = set()
    client.world.advance(REST_LAST_S)
    assert (client.lookup(), client.asked) == (0, [A])
    assert (client.lookup(), client.asked) == (0, [A])


def test_the_fourth_upstream_is_reached() -> None:
    """Within one question there is time for three; what the others did not say is remembered."""
    client = Client(A, B, C, D, down={A, B, C})
    for _ in range(SILENT_QUESTIONS):
        client.world.ask("x.a.test")
    client.world.advance(QUESTION_S_MAX)
    assert (client.lookup(), client.asked) == (TRY_S_MAX, [A, D]), "the first one has rested by now"


@pytest.mark.parametrize("down", [{A}, {A, B}])
def test_a_question_is_answered_in_time_whoever_is_down(down: set[Upstream]) -> None:
    """By the one that is up, or SERVFAIL; through rests and looks."""
    client = Client(A, B, down=down)
    for _ in range(50):
        client.lookup()
        client.world.advance(1.0)


def test_an_upstream_that_refuses_is_asked_last() -> None:
    """A refusal is quick, but a server that is not there is no first choice; the name of it is for people to read."""
    client = Client(A, B, down=set())
    for _ in range(SILENT_QUESTIONS):
        asker = client.world.ask("x.a.test")
        number = client.world.transaction_of(asker)
        assert number is not None
        client.world.handle(UpstreamFailed(number, "connection refused"))
        client.world.reply(asker, "198.51.100.7")
    assert (client.lookup(), client.asked) == (0, [B])
    assert [str(upstream) for upstream in client.world.engine.proxy.health.resting()] == ["203.0.113.53"]


def test_an_upstream_is_written_as_in_the_configuration() -> None:
    """That is where whoever reads `status` will look for it."""
    texts = [str(Upstream(packed(address), port)) for address in ("203.0.113.53", "2001:db8::53") for port in (53, 5353)]
    assert texts == ["203.0.113.53", "203.0.113.53:5353", "2001:db8::53", "[2001:db8::53]:5353"]


def test_servfail_is_an_answer() -> None:
    """The next upstream is asked for this name; the order stays."""
    client = Client(A, B, down=set())
    for _ in range(2 * SILENT_QUESTIONS):
        asker = client.world.ask("x.a.test")
        client.world.reply(asker, rcode="SERVFAIL")
        client.world.reply(asker, "198.51.100.7")
        assert client.world.answer_of(asker).rcode == "NOERROR"
    assert (client.lookup(), client.asked) == (0, [A])
