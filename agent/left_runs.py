"""What killed agents for runs left of network namespaces that are gone, as those of containers and laboratories are in the end.

The number of a namespace is given again later, and whoever gets it must not find what was attached in another one.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Final

from agent.config import runs_pins
from agent.control import ControlError
from agent.control.lock import AgentLock
from agent.control.runs import RUNS_DIRECTORY, runs_socket

_MOUNTED: Final = re.compile(r" net:\[([0-9]+)\] ")


def sweep() -> None:
    """Of a namespace without a process and without a name nothing is kept; its interfaces went with it."""
    for namespace in _found() - _alive():
        lock = AgentLock(runs_socket(namespace))
        with contextlib.suppress(ControlError):  # an agent that has just begun
            lock.acquire()
            shutil.rmtree(runs_pins(namespace), ignore_errors=True)
            shutil.rmtree(lock.path.parent, ignore_errors=True)
            lock.release()


def _found() -> set[int]:
    pins = runs_pins(0)
    names = [each.name for each in RUNS_DIRECTORY.iterdir()]
    names += [each.name.removeprefix(pins.name.removesuffix("0")) for each in pins.parent.iterdir()]
    return {int(name) for name in names if name.isdecimal()}


def _alive() -> set[int]:
    """By processes, and by what is mounted somewhere (`ip netns`)."""
    alive = {int(number) for number in _MOUNTED.findall(Path("/proc/self/mountinfo").read_text())}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive.add((process / "ns/net").stat().st_ino)
    return alive
