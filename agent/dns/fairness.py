"""Work that waits: a queue for each client, served in turn.

One socket holds what all clients ask, in the order of its coming: behind a thousand questions of one client the next client
would wait for them all. So whoever reads the socket takes out what there is, and works on a few of each client at a time. The
same is true of replies, which cost more than questions.

Rule 1: a client's questions keep their order.
Rule 2: where there is no room, the longest queue loses its newest question: nobody loses one while another has more waiting.
Rule 3: what is worked on at a time takes about a millisecond, for that is what somebody else's question waits for. How many
that are is learned from how long they take: dozens where everything is known, a few where all is new.
Rule 4: as much as fits into one such pass is not queued, looked at or copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

from agent.core.tally import Tally

T = TypeVar("T")

PASS_S: Final = 0.001
PASS_MIN: Final = 4
PASS_MAX: Final = 64  # more at a time is not cheaper
PASSES_REMEMBERED: Final = 8
# What waits longer than a second is asked again by its client; the slowest machine does a few thousand in that time.
WAITING_MAX: Final = 2_048


class FairQueue(Generic[T]):
    """client_of: whose question it is. drop: told of each question that is given up."""

    def __init__(self, client_of: Callable[[T], Hashable], drop: Callable[[T], None], waiting_max: int = WAITING_MAX) -> None:
        self.dropped_by_client: dict[Hashable, int] = {}
        self.pass_max = PASS_MAX
        self._client_of = client_of
        self._drop = drop
        self._waiting_max = waiting_max
        self._cost_s = PASS_S / PASS_MAX
        self._queues: dict[Hashable, deque[T]] = {}  # none is empty
        self._turns: deque[Hashable] = deque()  # each client that waits once, whose turn it is first
        self._lengths: Tally[Hashable] = Tally()

    def take(self, batch: Sequence[T]) -> Sequence[T]:
        """What came, possibly nothing; gives back what to work on now. `len` says how many still wait: call again then."""
        if not self._queues and len(batch) <= self.pass_max:
            return batch
        for question in batch:
            self._put(question)
        return [self._next() for _ in range(min(self.pass_max, len(self)))]

    def took(self, count: int, seconds: float) -> None:
        """So long for so many."""
        self._cost_s += (seconds / count - self._cost_s) / PASSES_REMEMBERED
        self.pass_max = min(max(PASS_MIN, int(PASS_S / self._cost_s)), PASS_MAX) if self._cost_s > 0 else PASS_MAX

    def __len__(self) -> int:
        """How many wait."""
        return self._lengths.total

    def forget(self, client: Hashable) -> None:
        """The client is gone: what it lost is not counted any more. What it asked is still given out."""
        self.dropped_by_client.pop(client, None)

    def _put(self, question: T) -> None:
        client = self._client_of(question)
        if len(self) >= self._waiting_max:
            longest = self._lengths.greatest()
            if self._lengths.of(client) + 1 >= self._lengths.of(longest):
                self._lose(client, question)
                return
            self._lose(longest, self._queues[longest].pop())
            self._lengths.take(longest)
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = deque()
            self._turns.append(client)
        queue.append(question)
        self._lengths.add(client)

    def _lose(self, client: Hashable, question: T) -> None:
        self.dropped_by_client[client] = self.dropped_by_client.get(client, 0) + 1
        self._drop(question)

    def _next(self) -> T:
        client = self._turns.popleft()
        queue = self._queues[client]
        question = queue.popleft()
        self._lengths.take(client)
        if queue:
            self._turns.append(client)
        else:
            del self._queues[client]
        return question


class Desk(Generic[T]):
    """A fair queue with its own place in the loop: what does not fit into one pass follows, and sockets are looked at between.

    work: gets what is to be worked on; never called from inside itself.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[Sequence[T]], None],
        client_of: Callable[[T], Hashable],
        drop: Callable[[T], None],
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.queue = FairQueue(client_of, drop, waiting_max)
        self._loop = loop
        self._work = work
        self._next_pass: asyncio.Handle | None = None

    def take(self, batch: Sequence[T]) -> None:
        """What came."""
        some = self.queue.take(batch)
        if some:
            began = self._loop.time()
            self._work(some)
            self.queue.took(len(some), self._loop.time() - began)
        if len(self.queue) and self._next_pass is None:
            self._next_pass = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_pass = None
        self.take(())

    def close(self) -> None:
        """What waits is not worked on any more."""
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = None
