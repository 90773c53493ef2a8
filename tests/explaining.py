"""`explain` over the world of the simulation: its engine, and the rows that its kernel of dictionaries holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent.core.rules import Policy
from agent.core.types import Key, Table, Value
from agent.datapath.maps import Flow
from agent.policy.files import read_policies
from agent.why.explain import Explain, at_once
from agent.why.rows import KeptRows
from tests.sim.world import World


class WorldTables(KeptRows):
    def __init__(self, world: World) -> None:
        self._world = world
        self.kept: list[Flow] = []
        super().__init__(self._find)

    def _find(self, table: Table, key: Key) -> Value | None:
        return self._world.kernel.rows[table].get(key)

    def flows(self) -> Iterator[Flow]:
        return iter(self.kept)


def read(paths: Sequence[str]) -> tuple[Policy, ...]:
    return read_policies(map(Path, paths))


def explain_in(world: World, tables: WorldTables | None = None, drops: Sequence[dict[str, object]] = ()) -> Explain:
    return Explain(world.engine, tables or WorldTables(world), lambda: world.host, lambda: list(drops), read, lambda: world.now)


def explained(world: World, target: str, packet: str | None = None, **arguments: object) -> dict[str, Any]:
    return at_once(explain_in(world).explained({"target": target, "packet": packet, **arguments}))
