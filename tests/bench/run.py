"""What `namegate run` adds to a command: beside a namespace that is there already, a Python that does nothing, and one load of
the programs, which is what any such tool needs at least.

Rule 1: time is the wall's, from the start of the first process to the end of the last: somebody waits for it.
Rule 2: every run but the first on a host finds an agent, so that is what the bound is about; the first one is measured as well.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.datapath.datapath import Datapath, Settings, cleanup
from tests.bench.harness import Bench, Contestant, Race
from tests.bpf.lab import inside
from tests.bpf.lab import lab as datapath_lab
from tests.bpf.scene import Scene
from tests.netns.lab import Lab
from tests.netns.runs import Host

RATIO_MAX: Final = 2.0
_ONE_EACH: Final = 1  # of a round's length in nanoseconds: what takes longer is done once
_IDLE_S_MAX: Final = 10.0


def _times(do: Callable[[], object]) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            do()

    return run


@contextlib.contextmanager
def _races() -> Iterator[list[Race]]:
    with Lab() as lab, datapath_lab() as other:
        host = Host(lab)
        settings = Settings(pin_directory=Path("/sys/fs/bpf", other.host))
        scene = Scene(other, settings)

        def floor() -> None:
            subprocess.run(["ip", "netns", "exec", lab.client.namespace, "/usr/bin/python3", "-c", "pass"], check=True)
            with inside(other.host):
                datapath = Datapath.open(settings)
                try:
                    datapath.attach(scene.attach)
                finally:
                    datapath.close()

        def ours() -> None:
            done = host.run("--allow", "a.test", "--", "true")
            assert done.returncode == 0, done.stderr

        def no_agent(_: int) -> None:
            inode = Path(f"/run/netns/{lab.host}").stat().st_ino
            deadline = time.monotonic() + _IDLE_S_MAX
            while Path(f"/run/namegate-runs/{inode}/control.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        reference = Contestant("netns, python, load", _times(floor))
        lasting: list[subprocess.Popen[str]] = []

        def an_agent(_: int) -> None:
            """A run that lasts keeps it."""
            if not lasting:
                lasting.append(host.start("--", "sh", "-c", "echo started; exec sleep 3600"))
                assert lasting[0].stdout is not None
                assert lasting[0].stdout.readline() == "started\n"

        def leave() -> None:
            for run in lasting:
                run.kill()
                run.communicate()
            lasting.clear()
            no_agent(0)

        clock = time.perf_counter_ns
        contestants = [reference, Contestant("namegate run", _times(ours), an_agent)]
        first = [reference, Contestant("namegate run, first", _times(ours), no_agent)]
        try:
            yield [
                Race("the first run on a host, which starts an agent", reference.name, first, None, clock, _ONE_EACH),
                Race("a run, when an agent is there", reference.name, contestants, RATIO_MAX, clock, _ONE_EACH),
            ]
        finally:
            leave()
            with inside(other.host):
                cleanup(settings)


RUN = Bench("run", "what does `namegate run` add to a command?", _races, needs_root=True, is_long=True)
