"""What can be measured: the registry that scripts/bench reads. A module here holds benches of one subject."""

from __future__ import annotations

from tests.bench.core import CORE
from tests.bench.datapath import DATAPATH
from tests.bench.harness import Bench
from tests.bench.map_write import MAP_WRITE
from tests.bench.run import RUN
from tests.bench.wire import WIRE

BENCHES: tuple[Bench, ...] = (WIRE, MAP_WRITE, CORE, DATAPATH, RUN)
