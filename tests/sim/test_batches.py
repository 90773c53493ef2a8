"""What is heard together is answered as if it had come one by one, in one group of writes and one of records."""

from __future__ import annotations

import random

import pytest

from agent.core.events import Event, Reply, Save, WriteRows
from agent.core.settings import Settings
from tests.sim.world import UPSTREAM, World, allow

ADDRESSES = ["198.51.100.1", "198.51.100.2", "198.51.100.3", "10.0.0.9"]  # the last one is guarded
NAMES = ["a.test.", "b.test.", "c.cold.test.", "x.other."]


def asked(seed: int) -> tuple[World, list[tuple[int, list[str]]]]:
    """A world with questions open, and what each is to be answered."""
    draw = random.Random(seed)
    world = World(Settings(upstreams=(UPSTREAM,)), auto=True)
    world.start(allow("*.test."), allow("*.cold.test.", port=8080, name="q"), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    for name in NAMES[:2]:
        world.resolve(name, draw.choice(ADDRESSES[:3]))  # some of it is known
    replies = []
    for _ in range(draw.randrange(1, 9)):
        before = len(world.answers)
        asker = world.ask(draw.choice(NAMES), endpoint=draw.choice((1, 2)))
        if len(world.answers) == before:  # not denied
            replies.append((asker, draw.sample(ADDRESSES, draw.randrange(1, 4))))
    draw.shuffle(replies)
    return world, replies


def together(world: World, replies: list[tuple[int, list[str]]]) -> list[Event]:
    """The replies as one batch."""
    batch: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "handle", lambda _, event: batch.append(event))
        for asker, addresses in replies:
            world.reply(asker, *addresses)
    return batch


@pytest.mark.parametrize("seed", range(60))
def test_a_batch_is_answered_like_its_parts(seed: int) -> None:
    """The same answers, names, identities and rows."""
    one_by_one, replies = asked(seed)
    for asker, addresses in replies:
        one_by_one.reply(asker, *addresses)
    at_once, replies = asked(seed)
    at_once.engine.handle_all(together(at_once, replies), at_once.now)
    at_once.perform()
    for asker, _ in replies:
        mine, other = at_once.answer_of(asker), one_by_one.answer_of(asker)
        assert (mine.rcode, mine.addresses) == (other.rcode, other.addresses)
    assert at_once.kernel.rows == one_by_one.kernel.rows
    assert set(at_once.engine.records()) == set(one_by_one.engine.records())
    assert not at_once.engine.proxy.transactions


def test_a_batch_is_one_group_of_writes_behind_one_of_records() -> None:
    """And no reply that needs a row leaves before it."""
    world = World(Settings(upstreams=(UPSTREAM,)), auto=True)
    world.start(allow("*.test."), endpoints={1: "192.0.2.11"})
    replies = [(world.ask(f"n{number}.test."), [f"198.51.100.{number}"]) for number in range(1, 9)]
    batch = together(world, replies)
    assert all(isinstance(event, Reply) for event in batch)
    world.engine.handle_all(batch, world.now)
    effects = world.engine.effects()
    assert [type(effect) for effect in effects] == [Save, WriteRows]
    assert sum(len(effect.writes) for effect in effects if isinstance(effect, WriteRows)) == len(replies)
