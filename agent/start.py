"""The start: all that has to be known before the first packet is judged by us, then the loop until somebody stops it.

Rule 1: nothing is touched before the lock is held: a second agent would replace what the first one enforces with.
Rule 2: a start that cannot be (a mistake in a file, an interface that is not there, no room) changes nothing and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import signal
import sys

from agent.config import Config
from agent.control import ControlError
from agent.control.lock import AgentLock
from agent.control.server import ControlServer
from agent.datapath.datapath import Datapath, pinned_map_id
from agent.datapath.datapath import Settings as DatapathSettings
from agent.datapath.errors import DatapathError
from agent.documents.remarks import PolicyError
from agent.host.endpoints import HostEndpoints
from agent.host.interfaces import Interfaces
from agent.shell import Shell, Start, policies_at
from agent.state import Journal, StateError, read_journal

log = logging.getLogger("namegate")

# EX_SOFTWARE of sysexits.h: a supervisor starts the agent again.
EXIT_MISTAKE = 70

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def run(config: Config) -> int:
    """The agent in the foreground until it is told to stop; its exit code."""
    lock = AgentLock(config.control.socket)
    _raise_descriptor_limit()
    try:
        # Before the datapath: a second agent would replace what the first one enforces with.
        lock.acquire()
        policies = policies_at(config.policies)
        interfaces = Interfaces()
        settings = DatapathSettings(**dataclasses.asdict(config.datapath))
        journal_path = config.control.socket.with_name("journal")
        pinned = pinned_map_id(settings)
        records = read_journal(journal_path, pinned)
        with contextlib.ExitStack() as stack:
            datapath = stack.enter_context(contextlib.closing(Datapath.open(settings, take_over=records is not None)))
            if not datapath.is_taken_over:
                if pinned is not None or records is not None:
                    why = "no journal explains the tables found" if records is None else datapath.why_not
                    log.info("names are learned anew: %s", why)
                records = None
            journal = stack.enter_context(contextlib.closing(Journal(journal_path, datapath.policy_map_id, records or ())))
            start = Start(records, interfaces, HostEndpoints(config.endpoints, records or ()), tuple(policies))
            return asyncio.run(_serve(config, start, datapath, journal, lock))
    except (ControlError, PolicyError, DatapathError, StateError) as error:
        print(f"namegate: {error}", file=sys.stderr)
        return 2
    finally:
        lock.release()


def _raise_descriptor_limit() -> None:
    """256 ports for each upstream and 1,024 connections of clients are more than the usual 1,024 descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(
    config: Config,
    start: Start,
    datapath: Datapath,
    journal: Journal,
    lock: AgentLock,
) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(exit_code: int) -> None:
        if not stopped.done():
            stopped.set_result(exit_code)

    def give_up(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Our own mistake: what the engine holds may be wrong from here. The pinned datapath goes on enforcing."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_ROOM and "socket" in context:
            # asyncio tells a failed accept() of the control socket in this way, and tries again in a second.
            log.error("the control socket takes nobody: %s", error.strerror)
            return
        log.critical("%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None)
        stop(EXIT_MISTAKE)

    def refused(sentence: str) -> None:
        """The policies cannot be in force from the start: nothing is enforced, so do not look as if it were."""
        print(f"namegate: {sentence}", file=sys.stderr)
        stop(2)

    loop.set_exception_handler(give_up)
    shell = Shell(config, datapath, journal, refused)
    server = ControlServer(config.control.socket, shell.answer, lock)
    await server.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, 0)
        shell.start(start)
        exit_code = await stopped
        if exit_code == 0:
            log.info("stopped; the kernel goes on enforcing, `namegate cleanup` ends that")
        return exit_code
    finally:
        await server.close()
        shell.close()
