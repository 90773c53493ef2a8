"""One run from its beginning to COMMAND's end.

    agent found or started ─┐
    init forked ── ready ── veth pair ──┬── attach ──────────┬── go ── COMMAND ── ended ── summary
                                        ├── NAT, firewall    │
                                        └── inside prepared ─┘

Until COMMAND starts, a signal ends the runner as it does any program, and with it all that was made. From then on signals are
COMMAND's: what somebody sent to the runner is passed on, what the terminal sent has reached COMMAND already.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.control import ControlError
from agent.runner import CannotRun, inside, kernel, masks, network
from agent.runner.identity import identity
from agent.runner.lease import Agents, Lease
from agent.runner.report import Report
from agent.runner.terminal import Terminal

# Not those of a program's own mistakes, nor SIGPIPE and its like, which only a program itself can earn.
_OURS: Final = frozenset({
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS, signal.SIGPIPE,
    signal.SIGXCPU, signal.SIGXFSZ, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU,
})  # fmt: skip
_PASSED_ON: Final = frozenset(signal.valid_signals()) - _OURS
_FIRST_REAL_TIME: Final = 34  # 32 and 33 are the C library's own


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for. policies: {"name", "text"} each. control: the agent's socket if the caller named one.
    administrators: where the administrator's agent listens by default. kept_sockets: not to be covered.
    allow_addresses: networks that names may stand for although they are private.
    """

    command: Sequence[str]
    policies: Sequence[Mapping[str, str]]
    is_audit: bool
    wants_summary: bool
    user: str | None
    control: Path | None
    administrators: Path
    kept_sockets: Sequence[Path]
    allow_addresses: Sequence[str]


def run(order: Order) -> int:
    """The exit code; where COMMAND was ended by a signal this process is, too. Raises CannotRun."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # Python's handler; Ctrl-C is to end us as any signal does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    inherited = _inherited()
    _fill_standard_descriptors()
    _require_seccomp()
    who = identity(order.user, os.environ)
    report = Report(wants_summary=order.wants_summary)
    agents = Agents(order.control, order.administrators)
    agents.ensure()
    terminal = Terminal()
    terminal.has_given_group = terminal.is_ours_alone()
    hidden = masks.masked(who.uid, who.name, [agents.socket], order.kept_sockets)
    environment = who.environment(_given_environment())
    plan = inside.Plan(order.command, environment, who, hidden, terminal.fd, terminal.has_given_group)
    init, channel = inside.fork_init(plan)
    around = network.surroundings()
    _expect(channel, "ready")
    link = network.connect(init, around)
    channel.tell(link=link.said())
    arguments = {
        "interface": link.interface,
        "labels": {"namegate.run": str(link.number)},
        "addresses": link.addresses,
        "audit": order.is_audit,
        "policies": order.policies,
        "allow_addresses": order.allow_addresses,
        "lease": True,
        "learn": "per-endpoint",
        "forwarding": True,
    }
    lease = Lease(agents, arguments)
    lease.begin()
    translation = network.AddressTranslation(link)
    firewall = network.firewall()
    _expect(channel, "prepared")  # where it fails, its sentence says more than an agent's that sees the interface go
    answer = lease.attach()
    if firewall is not None:
        network.require_passage(firewall, link, around.uplinks, answer["device"])
    if not network.await_carrier(link.interface):
        raise CannotRun(f"{link.interface} stays without a carrier")
    for warning in answer.get("warnings", ()):
        report.say(f"warning: {warning}")
    if order.wants_summary:
        report.say(f"the host reaches what COMMAND serves at {' and '.join(link.addresses)}")

    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGTTOU})
    channel.tell(go=True, ipv6=answer["ipv6"])
    pidfd = _expect(channel, "started")[0]
    _let_go(inherited)
    report.start()
    status = _Waiting(init, channel, pidfd, lease, terminal, report).until_ended()
    del translation
    terminal.take_back()
    _be_killable()
    summary = None
    for message in lease.end():
        if "fact" in message:
            report.take(message["fact"])
        summary = message.get("summary")
    report.finish(summary)
    return _end_like(status)


def _require_seccomp() -> None:
    try:
        import seccomp  # noqa: F401 - init needs it, and could not say so as well
    except ImportError:
        raise CannotRun("Python's seccomp library is missing: apt install python3-seccomp") from None


def _expect(channel: inside.Channel, what: str) -> list[int]:
    """The descriptors that came with it; raises CannotRun."""
    try:
        message, descriptors = channel.hear()
    except (EOFError, OSError):
        message, descriptors = {"problem": "the run's first process was ended from outside"}, []
    if "problem" in message:
        raise CannotRun(message["problem"])
    assert what in message, f"init says {message}, not {what}"
    return descriptors


class _Waiting:
    """For COMMAND's end, while signals, facts and the agent's end come."""

    def __init__(
        self, init: int, channel: inside.Channel, pidfd: int, lease: Lease, terminal: Terminal, report: Report
    ) -> None:
        self._init = init
        self._channel = channel
        self._pidfd = pidfd
        self._lease = lease
        self._terminal = terminal
        self._report = report
        self._command = _pid_of(pidfd)
        self._is_told_of_loss = False
        self._is_told_of_refusal = False

    def until_ended(self) -> int:
        """COMMAND's status, as wait(2) has it."""
        signals = kernel.Signals(number for number in _PASSED_ON if number not in {32, 33})
        try_at = 0.0
        while True:
            watched = select.poll()
            for fd in (signals.fd, self._channel.connection.fileno(), self._lease.fileno()):
                if fd >= 0:
                    watched.register(fd, select.POLLIN)
            wait_s = self._lease.wait_s()
            if wait_s is not None and try_at <= time.monotonic():
                try_at = time.monotonic() + wait_s
            for fd, _ in watched.poll(None if wait_s is None else max(0.0, try_at - time.monotonic()) * 1000 + 1):
                if fd == signals.fd:
                    self._take_signal(signals.read())
                elif fd == self._lease.fileno():
                    self._take_facts()
                elif (status := self._take_message()) is not None:
                    return status
            if self._lease.is_lost and self._lease.fileno() < 0 and try_at <= time.monotonic():
                self._lease.again()

    def _take_signal(self, received: kernel.Received) -> None:
        """What the terminal sends to our group has reached COMMAND, unless that has one of its own (a job that was in the
        background is the foreground again). One that is hung up tells its session's leader alone."""
        number, is_told = received
        with contextlib.suppress(ProcessLookupError):
            if not is_told and self._terminal.has_given_group:
                self._terminal.pass_on(self._command, number)
            elif is_told or (number in {signal.SIGHUP, signal.SIGCONT} and os.getsid(0) == os.getpid()):
                signal.pidfd_send_signal(self._pidfd, number)

    def _take_message(self) -> int | None:
        try:
            message, _ = self._channel.hear()
        except (EOFError, OSError):
            message = {"ended": int(signal.SIGKILL)}
            self._report.say("the run's first process was ended from outside, and COMMAND with it")
        if "continued" in message:
            return None
        if "stopped" in message:
            # Somebody inside may continue COMMAND, or end it: then nobody else would continue us.
            with self._channel.continuing_us():
                self._terminal.stopped(self._command, int(message["stopped"]))
            return None
        os.waitpid(self._init, 0)  # whoever is left inside has ended when this returns
        return int(message["ended"])

    def _take_facts(self) -> None:
        try:
            for fact in self._lease.facts():
                self._report.take(fact)
        except ControlError as refusal:
            if not self._is_told_of_refusal:
                self._report.say(f"the agent does not take the run again: {refusal.sentence}")
            self._is_told_of_refusal = True
        if self._lease.is_lost and not self._is_told_of_loss:
            self._is_told_of_loss = True
            self._report.say("the agent ended; the kernel goes on enforcing, and names are asked again when an agent is there")


def _pid_of(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def _given_environment() -> dict[str, str]:
    """Without the LC_CTYPE that Python adds where the locale is "C" (PEP 538)."""
    environment = dict(os.environ)
    if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
        environment.pop("LC_CTYPE", None)
    return environment


def _inherited() -> list[int]:
    """The caller's descriptors, besides the standard ones; to be looked at before libraries make some that are like them."""
    found = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    there = []
    for fd in found:
        with contextlib.suppress(OSError):  # the listing's own
            if fd > 2 and os.get_inheritable(fd):
                there.append(fd)
    return there


def _fill_standard_descriptors() -> None:
    """Where the caller closed one, nothing of ours may get its number; COMMAND finds it closed."""
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(fd)


def _let_go(inherited: Sequence[int]) -> None:
    """Who reads what COMMAND writes, or writes what it reads, is to see its end when COMMAND closes it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if sys.stdout is not None:  # the caller had closed it
        sys.stdout.flush()
    for fd in (0, 1):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    for fd in inherited:
        os.close(fd)


def _be_killable() -> None:
    """Who reads what we say at the end may take any time. What was sent until here was for COMMAND as well."""
    while signal.sigtimedwait(_PASSED_ON, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def _end_like(status: int) -> int:
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    kernel.be_undumpable()
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return 128 + number  # not reached but for a signal that ends nobody
