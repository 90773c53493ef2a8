"""The fair queue and the tally against twins that look at everything."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.tally import Tally
from agent.dns.fairness import PASS_MAX, PASS_MIN, PASS_S, Desk, FairQueue

Question = tuple[str, int]  # client, number
CLIENTS = "abcd"
PASS, WAITING = 3, 8
BATCHES = st.lists(st.lists(st.sampled_from(CLIENTS), max_size=14), max_size=12)


def queue(drop: Callable[[Question], None]) -> FairQueue[Question]:
    fair = FairQueue(lambda question: question[0], drop, WAITING)
    fair.pass_max = PASS
    return fair


def numbered(batches: Sequence[Sequence[str]]) -> list[list[Question]]:
    numbers = iter(range(1_000))
    return [[(client, next(numbers)) for client in batch] for batch in batches]


@given(BATCHES)
def test_what_is_given_out_and_what_is_lost(batches: list[list[str]]) -> None:
    """Every question is given out or lost, once; per client in order; nobody loses one who has less waiting than another."""
    lost: list[Question] = []

    def lose(question: Question) -> None:
        lost.append(question)
        lengths = Counter({client: len(waiting) for client, waiting in fair._queues.items()})
        assert lengths[question[0]] + 1 >= max(lengths.values())

    fair = queue(lose)
    out: list[Question] = []
    for batch in numbered(batches):
        out += fair.take(batch)
        assert len(fair) <= WAITING
    while len(fair):
        out += fair.take([])
    everything = [question for batch in numbered(batches) for question in batch]
    assert sorted(out + lost) == sorted(everything)
    assert fair.dropped_by_client == Counter(client for client, _ in lost)
    for client in CLIENTS:
        assert [q for q in out if q[0] == client] == [q for q in everything if q[0] == client and q not in lost]


class Naive:
    """All that waits in one list, oldest first; who was served longest ago is next. Nothing is ever lost."""

    def __init__(self) -> None:
        self.waiting: list[Question] = []
        self.turns: deque[str] = deque()

    def take(self, batch: Sequence[Question]) -> list[Question]:
        if not self.waiting and len(batch) <= PASS:
            return list(batch)
        self.waiting += batch
        self.turns += [client for client in dict.fromkeys(client for client, _ in batch) if client not in self.turns]
        out = []
        for _ in range(min(PASS, len(self.waiting))):
            client = self.turns.popleft()
            out.append(next(question for question in self.waiting if question[0] == client))
            self.waiting.remove(out[-1])
            if any(question[0] == client for question in self.waiting):
                self.turns.append(client)
        return out


@given(st.lists(st.lists(st.sampled_from(CLIENTS), max_size=4), max_size=12))
def test_the_order_is_the_twins(batches: list[list[str]]) -> None:
    """As long as there is room."""
    fair = FairQueue[Question](lambda question: question[0], lambda _: None)
    fair.pass_max = PASS
    naive = Naive()
    for batch in [*numbered(batches), *[[]] * 20]:
        assert list(fair.take(batch)) == naive.take(batch)


def test_without_pressure_a_batch_passes_untouched() -> None:
    """It is the very same list, and nobody is asked whose questions these are."""

    def nobody_asks(_: Question) -> None:
        raise AssertionError("somebody asked")

    batch = [("a", number) for number in range(PASS_MAX)]
    fair: FairQueue[Question] = FairQueue(nobody_asks, nobody_asks)
    assert fair.take(batch) is batch


def test_one_question_behind_a_thousand_is_in_the_next_pass() -> None:
    """However long the other's queue is; and the one who fills it pays for what does not fit."""
    lost: list[Question] = []
    fair: FairQueue[Question] = FairQueue(lambda question: question[0], lost.append)
    assert all(client == "flood" for client, _ in fair.take([("flood", number) for number in range(5_000)]))
    assert ("quiet", 0) in fair.take([("quiet", 0)])
    assert fair.dropped_by_client == {"flood": len(lost)}
    fair.forget("flood")
    assert not fair.dropped_by_client


def test_many_clients_with_one_question_each_lose_the_one_that_comes_last() -> None:
    """Nobody's only question makes way for another's only one."""
    lost: list[Question] = []
    fair = queue(lost.append)
    first = fair.take([(f"client {number}", number) for number in range(WAITING + 2)])
    assert [number for _, number in lost] == [WAITING, WAITING + 1]
    assert [number for _, number in first] == [0, 1, 2]


def test_a_pass_is_as_long_as_it_may_be() -> None:
    """Whatever one question costs, within bounds; and what was dear once is not dear for ever."""
    fair = queue(lambda _: None)
    for cost_s, wanted in ((PASS_S / 10, 10), (1.0, PASS_MIN), (0.0, PASS_MAX), (PASS_S / 20, 20)):
        for _ in range(200):
            fair.took(fair.pass_max, cost_s * fair.pass_max)
        assert fair.pass_max == pytest.approx(wanted, abs=1)


def test_what_does_not_fit_into_one_pass_follows() -> None:
    """In a real loop, by itself; closing ends it."""
    passes: list[list[int]] = []

    async def ask() -> int:
        loop = asyncio.get_running_loop()
        desk: Desk[int] = Desk(loop, work, lambda number: number % 2, lambda _: None)
        desk.queue.pass_max = 4
        desk.take(range(0, 12, 2))
        loop.call_soon(desk.take, [1])
        for _ in range(5):
            await asyncio.sleep(0)
        desk.queue.pass_max = 4
        desk.take(range(6))
        desk.close()
        await asyncio.sleep(0)
        return len(desk.queue)

    def work(numbers: Sequence[int]) -> None:
        passes.append(list(numbers))

    assert asyncio.run(ask()) == 2
    assert passes == [[0, 2, 4, 6], [8, 10], [1], [0, 1, 2, 3]]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=60))
def test_the_tally_knows_who_has_most(steps: list[tuple[bool, str]]) -> None:
    tally: Tally[str] = Tally()
    naive: Counter[str] = Counter()
    for is_added, owner in steps:
        if is_added:
            tally.add(owner)
            naive[owner] += 1
        elif naive[owner]:
            tally.take(owner)
            naive[owner] -= 1
        else:
            with pytest.raises(KeyError):
                tally.take(owner)
        assert tally.total == naive.total()
        assert {owner: tally.of(owner) for owner in "abc"} == {owner: naive[owner] for owner in "abc"}
        if tally.total:
            assert naive[tally.greatest()] == max(naive.values())
