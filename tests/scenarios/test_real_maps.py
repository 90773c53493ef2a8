"""The same stories on the kernel's own maps: what the fake kernel does, they do, and in the end they hold the same rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.types import Table, Write
from agent.datapath.datapath import Datapath, Settings, cleanup
from tests.bpf.lab import inside, lab
from tests.scenarios.script import read_scenario
from tests.scenarios.stage import CountingKernel, Stage
from tests.scenarios.test_scenarios import each_story

pytestmark = pytest.mark.root


class MappedKernel(CountingKernel):
    """Performs in the kernel whatever the fake one performs, and empties it first."""

    def __init__(self, datapath: Datapath) -> None:
        super().__init__()
        self.datapath = datapath
        left = [Write(table, key, None) for table, rows in datapath.rows().items() for key in rows]
        assert not any(datapath.apply(left))

    def apply(self, write: Write) -> int:
        was_there = write.key in self.rows[write.table]
        error = super().apply(write)
        if error == 0 and (write.value is not None or was_there):
            assert self.datapath.apply([write]) == [0], f"the kernel refuses {write}"
        return error


@pytest.fixture(scope="module")
def datapath() -> Iterator[Datapath]:
    """Maps and programs in a namespace of their own; nothing is attached."""
    settings = Settings(
        pin_directory=Path(f"/sys/fs/bpf/namegate-test-scenarios-{os.getpid()}"),
        ipcache_rows=1_024,
        policy_rows=1_024,
        flow_rows=1_024,
        fragment_rows=256,
        last_seen_rows=1_024,
    )
    with lab() as namespaces, inside(namespaces.host):
        opened = Datapath.open(settings)
        try:
            yield opened
        finally:
            opened.close()
            cleanup(settings)


@each_story
def test_on_real_maps(path: Path, datapath: Datapath) -> None:
    scenario = read_scenario(path)
    kernel = MappedKernel(datapath)
    Stage(scenario, kernel=kernel).play(scenario.setup, scenario.steps)
    found = datapath.rows()
    assert {table: found[table] for table in Table} == kernel.rows
