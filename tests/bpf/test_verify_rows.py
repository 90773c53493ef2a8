"""Between a write and its answer: what the kernel holds then is no difference, whoever looks at that moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from agent.control.listings import Listings
from agent.core.types import IpcacheKey, Prefix, Table, Write, packed
from agent.datapath.datapath import Datapath, Settings, cleanup
from agent.facts import Facts
from agent.hooks import Hooks
from agent.verify import Round, Verify
from tests.bpf.lab import inside, lab
from tests.scenarios.test_real_maps import MappedKernel
from tests.sim.world import World, allow, any_question

pytestmark = pytest.mark.root


@pytest.fixture
def datapath() -> Iterator[Datapath]:
    """Maps and programs in a namespace of their own; nothing is attached."""
    settings = Settings(pin_directory=Path(f"/sys/fs/bpf/namegate-test-verify-{os.getpid()}"), flow_rows=1_024)
    with lab() as namespaces, inside(namespaces.host):
        opened = Datapath.open(settings)
        try:
            yield opened
        finally:
            opened.close()
            cleanup(settings)


def verify_of(world: World, datapath: Datapath) -> Verify:
    nothing_attached = cast(Hooks, None)
    listings = Listings(world.engine, world.now)
    return Verify(world.engine, datapath, nothing_attached, Facts(lambda: None), lambda _: None, lambda: listings, 0)


def test_a_row_on_its_way_is_no_difference(datapath: Datapath) -> None:
    """Each write of a name's coming, of another policy, and of a name's end, performed and not yet acknowledged."""
    world = World(kernel=MappedKernel(datapath))
    verify = verify_of(world, datapath)
    world.start(allow("a.example."), any_question())
    assert verify.differences(*Table) == []
    world.auto = False
    writes = 0

    def look_at_each_write() -> None:
        nonlocal writes
        while world.waiting_writes:
            (write, *_) = world.waiting_writes[0]
            world.kernel.apply(write)
            assert verify.differences(*Table) == []
            world.write_one()  # the same again, and its answer
            assert verify.differences(*Table) == []
            writes += 1

    world.reply(world.ask("a.example."), "192.0.2.101")
    look_at_each_write()
    world.apply(allow("a.example.", "b.example.", "198.51.100.0/24"), any_question())
    look_at_each_write()
    world.auto = False
    for _ in range(4):
        world.advance(61.0)
        look_at_each_write()
    assert writes > 5


def test_many_foreign_rows_go_in_one_round(datapath: Datapath) -> None:
    """Whole batches of them, so that nothing is left of where the round was; the agent's own rows stay."""
    world = World(kernel=MappedKernel(datapath))
    verify = verify_of(world, datapath)
    world.start(allow("a.example."), any_question())
    world.resolve("a.example.", "192.0.2.101")
    before = datapath.rows()
    foreign = [IpcacheKey(1, Prefix.of(packed(f"198.18.{i // 250}.{i % 250}"))) for i in range(1_000)]
    assert not any(datapath.apply([Write(Table.IPCACHE, key, 2) for key in foreign]))
    one = Round(mends=True)
    slices = sum(1 for _ in verify._slices(one))
    assert datapath.rows() == before
    assert one.found == len(foreign)
    assert all(row["mended"] for row in one.told())
    assert slices < 100
