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
import time
from functools import partial

from agent.attachments import Attachments
from agent.config import Config, asking_ourselves
from agent.control import ControlError
from agent.control.lock import AgentLock
from agent.control.server import ControlServer
from agent.datapath import syscall
from agent.datapath.datapath import Datapath, cleanup, pinned_map_id
from agent.datapath.datapath import Settings as DatapathSettings
from agent.datapath.errors import DatapathError
from agent.documents.remarks import PolicyError
from agent.holder.client import HolderLink, dismiss
from agent.host.endpoints import HostEndpoints
from agent.host.firewall import Firewall, Unreadable
from agent.host.interfaces import Interfaces
from agent.host.marks import settled
from agent.left_runs import sweep
from agent.shell import Shell, Start, policies_at
from agent.state import Journal, StateError, read_journal

log = logging.getLogger("namegate")

# EX_SOFTWARE of sysexits.h: a supervisor starts the agent again.
EXIT_MISTAKE = 70

# An agent for runs that finds another one waits so long for its end.
LOCK_PATIENCE_S = 3.0
_ENDED_IDLE = -1

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def run(config: Config, *, is_for_runs: bool = False) -> int:
    """The agent in the foreground until it is told to stop; its exit code.

    is_for_runs: it has nothing to do but to serve leases. It ends when there are none, and leaves nothing in the kernel.
    """
    lock = AgentLock(config.control.socket)
    _raise_descriptor_limit()
    try:
        # Before the datapath: a second agent would replace what the first one enforces with.
        _acquire(lock, LOCK_PATIENCE_S if is_for_runs else 0.0)
        policies = policies_at(config.policies)
        interfaces = _network()
        sentence = asking_ourselves(config.dns.upstreams, config.endpoints, interfaces.host_addresses().__contains__)
        if sentence is not None:
            raise ControlError(sentence)
        syscall.pretend_without(config.testing.without)
        config = dataclasses.replace(config, datapath=settled(config.datapath))
        settings = DatapathSettings(**dataclasses.asdict(config.datapath))
        attachments = Attachments(config.control.socket.with_name("attachments"), settings.device)
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
            device = settings.interception_device
            never = device.name, device.peer
            host_endpoints = HostEndpoints(config.endpoints, records or (), never, attachments.by_ifindex)
            start = Start(records, interfaces, host_endpoints, tuple(policies))
            exit_code = asyncio.run(_serve(config, start, datapath, journal, attachments, lock, ends_when_idle=is_for_runs))
        if exit_code == _ENDED_IDLE:
            cleanup(settings)
            for path in config.control.socket.parent.iterdir():
                if path != lock.path:
                    path.unlink()
            return 0
        return exit_code
    except (ControlError, PolicyError, DatapathError, StateError) as error:
        print(f"namegate: {error}", file=sys.stderr)
        return 2
    finally:
        lock.release()
        if is_for_runs:
            with contextlib.suppress(OSError):  # there is something in it: it was stopped, and the next one goes on
                config.control.socket.parent.rmdir()


def _acquire(lock: AgentLock, patience_s: float) -> None:
    """One that is about to end is waited for."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return lock.acquire()
        except ControlError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def _network() -> Interfaces:
    try:
        return Interfaces()
    except OSError as error:
        raise DatapathError(error.errno or errno.EIO, f"the network cannot be looked at: {error.strerror}") from None


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
    attachments: Attachments,
    lock: AgentLock,
    *,
    ends_when_idle: bool,
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
    holder = HolderLink(config.control.socket, config.datapath.mark, config.dns.holder_patience) if config.dns.holder else None
    idle = partial(stop, _ENDED_IDLE) if ends_when_idle else None
    shell = Shell(config, datapath, journal, attachments, refused, idle, holder)
    server = ControlServer(config.control.socket, shell.answer, lock)
    await server.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, 0)
        if holder is None:
            dismiss(config.control.socket)  # one of a process before, which had another configuration
        shell.start(start)
        loop.run_in_executor(None, _warn_of_firewall, config.datapath.device)  # it may have thousands of rules to read
        if ends_when_idle:
            loop.run_in_executor(None, sweep)
        exit_code = await stopped
        if exit_code == 0:
            await shell.drain()
            log.info("stopped; the kernel goes on enforcing, `namegate cleanup` ends that")
        return exit_code
    finally:
        await server.close()
        await shell.close()


def _warn_of_firewall(device: str) -> None:
    """It drops what the gate hands over, and only its owner can change that."""
    with contextlib.suppress(Unreadable):
        for obstacle in Firewall.read().obstacles(device):
            log.warning("%s drops DNS on its way to us: %s", obstacle.chain, obstacle.remedy)
