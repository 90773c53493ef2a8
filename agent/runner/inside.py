"""`init`, the first process of a run's namespaces: makes the inside, starts COMMAND, and waits for everybody.

It speaks with the runner over one socket, a JSON object a message:

    init -> runner   {"ready": true}             the namespaces are there
    runner -> init   {"link": …}                 the other end of the veth pair is there
    init -> runner   {"prepared": true}          network, files and sysctls are
    runner -> init   {"go": true, "ipv6": bool}  the interface is policed
    init -> runner   {"started": true}           with a pidfd of COMMAND
    init -> runner   {"stopped": SIGNAL}, {"continued": true}, …
    init -> runner   {"ended": STATUS}           as wait(2) has it; init ends then, and whoever is left with it
    init -> runner   {"problem": "…"}            instead of any of these; init ends then

The runner's end of the socket is closed by its death: then init ends too, whatever it was doing (the kernel kills it besides).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from agent.runner import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_OURS, CannotRun, kernel, masks, network
from agent.runner.identity import Identity
from agent.runner.network import Link

MESSAGE_OCTETS_MAX: Final = 1 << 16

# Docker's default set but for MKNOD; <linux/capability.h>. Without SYS_ADMIN, NET_ADMIN and SYS_PTRACE root inside cannot leave
# the namespaces; files are another matter (docs/run.md).
_CAPABILITIES: Final = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
_TIOCLINUX: Final = 0x541C


@dataclass(frozen=True, slots=True)
class Plan:
    """command: and its arguments. hidden: what is to be covered. terminal: its descriptor, or -1. has_own_group: COMMAND is
    to be its foreground by itself (see terminal.py)."""

    command: Sequence[str]
    environment: Mapping[str, str]
    identity: Identity
    hidden: Sequence[Path]
    terminal: int
    has_own_group: bool


class Channel:
    """The socket; SOCK_SEQPACKET, so that a message is a packet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def tell(self, descriptors: Sequence[int] = (), **message: object) -> None:
        socket.send_fds(self.connection, [json.dumps(message).encode()], list(descriptors))

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """Raises EOFError when the other side is gone."""
        octets, descriptors, _, _ = socket.recv_fds(self.connection, MESSAGE_OCTETS_MAX, 1)
        if not octets:
            raise EOFError
        message: dict[str, Any] = json.loads(octets)
        return message, descriptors

    @contextlib.contextmanager
    def continuing_us(self) -> Iterator[None]:
        """Whatever the other side says meanwhile continues this process, should it be stopped (fcntl(2), F_SETSIG)."""
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, fcntl.F_SETSIG, signal.SIGCONT)
        flags = fcntl.fcntl(self.connection, fcntl.F_GETFL)
        fcntl.fcntl(self.connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        try:
            yield
        finally:
            fcntl.fcntl(self.connection, fcntl.F_SETFL, flags)


def fork_init(plan: Plan) -> tuple[int, Channel]:
    """The process id of init and the socket to it. Raises CannotRun."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
    except OSError as problem:
        raise CannotRun(f"no pid namespace can be made: {problem.strerror}{_in_a_container(problem)}") from None
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_init(Channel(theirs), plan)
    theirs.close()
    # Children that are made later (an agent) belong where this process is.
    kernel.setns(before, kernel.CLONE_NEWPID)
    os.close(before)
    return pid, Channel(ours)


def _in_a_container(problem: OSError) -> str:
    return ": in a container it takes CAP_SYS_ADMIN" if problem.errno == errno.EPERM else ""


def _be_init(channel: Channel, plan: Plan) -> NoReturn:
    try:
        kernel.die_with_parent()
        _prepare(channel, plan)
        message, _ = channel.hear()
        if not message["ipv6"]:
            _settle(f"ipv6/conf/{network.INSIDE}/disable_ipv6", "1")
        command = os.fork()
        if command == 0:
            _become(plan)
        channel.tell([os.pidfd_open(command)], started=True)
        # Readers of what COMMAND writes are to see its end when COMMAND closes it, not when init does.
        _let_go(channel.connection.fileno())
        while True:
            pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
            if pid != command:
                continue
            if os.WIFCONTINUED(status):
                channel.tell(continued=True)
            elif os.WIFSTOPPED(status):
                channel.tell(stopped=os.WSTOPSIG(status))
            else:
                channel.tell(ended=status)
                os._exit(0)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except CannotRun as problem:
        channel.tell(problem=str(problem))
    except Exception as error:  # noqa: BLE001 - nobody above could tell it
        channel.tell(problem=f"the inside of the run cannot be made ({type(error).__name__}: {error})")
    os._exit(1)


def _prepare(channel: Channel, plan: Plan) -> None:
    try:
        kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    except OSError as problem:
        raise CannotRun(f"no network namespace can be made: {problem.strerror}{_in_a_container(problem)}") from None
    channel.tell(ready=True)
    message, _ = channel.hear()
    link = Link.of(message["link"])
    with subprocess.Popen(["ip", "-batch", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as configuring:
        assert configuring.stdin is not None
        configuring.stdin.write("\n".join(link.inside()))
        configuring.stdin.close()
        try:
            masks.cover(link.gateway, plan.hidden)
        except OSError as problem:
            raise CannotRun(f"{problem.filename or 'the mounts of the run'}: {problem.strerror}") from None
        # ping(8) without privileges: whoever is inside may, as the network is nobody else's.
        _settle("ipv4/ping_group_range", "0 2147483647")
        if link.network6 is None:
            _settle(f"ipv6/conf/{network.INSIDE}/disable_ipv6", "1")
        assert configuring.stderr is not None
        said = configuring.stderr.read().strip()
    if configuring.returncode:
        raise CannotRun(f"the network inside cannot be made: {said}")
    if not network.await_carrier(network.INSIDE):
        raise CannotRun(f"{network.INSIDE} inside stays without a carrier")
    channel.tell(prepared=True)


def _settle(name: str, value: str) -> None:
    """A kernel without IPv6 has none of its settings."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net", name).write_text(value, encoding="ascii")


def _let_go(kept: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd, inheritable=False)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _become(plan: Plan) -> NoReturn:
    """COMMAND, in a process of its own."""
    try:
        if plan.has_own_group:
            os.setpgid(0, 0)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            os.tcsetpgrp(plan.terminal, os.getpgrp())
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _refuse_ways_round()
        kernel.keep_capabilities(_CAPABILITIES.values())
        who = plan.identity
        if who.is_changed:
            os.setgroups(who.groups)
            os.setresgid(who.gid, who.gid, who.gid)
            os.setresuid(who.uid, who.uid, who.uid)
        if who.uid != 0:
            kernel.forbid_new_privileges()
        # Python ignores these two, and who is ignored in a program stays so in the next one.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        code, problem = _execute(plan.command, plan.environment)
    except Exception as error:  # noqa: BLE001 - the same
        code, problem = EXIT_OURS, f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # who cannot be told sees the exit code
        os.write(2, f"namegate: {plan.command[0]} cannot be run: {problem}\n".encode(errors="backslashreplace"))
    os._exit(code)


def _refuse_ways_round() -> None:
    """What no namespace closes. Docker's default profile refuses the last three as well.

    TIOCSTI, TIOCLINUX: characters in the terminal's input, which the caller's shell, outside, takes for typed. The request is
    compared in its low 32 bits, as the kernel reads it.
    AF_VSOCK: to the hypervisor, or to one's own virtual machines; it knows no network namespace.
    io_uring_setup: it makes sockets that no filter sees. A kernel without it has the same answer.
    request_key with a callout: the kernel starts /sbin/request-key outside for it, which resolves names (`dns_resolver`).

    Of an architecture that runs on this one as well the system calls have other numbers, which libseccomp knows.
    """
    import seccomp

    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    rules.set_attr(seccomp.Attr.CTL_NNP, 0)  # whether there is a way to more privileges is not decided here
    for native, others in (
        (seccomp.Arch.X86_64, (seccomp.Arch.X86, seccomp.Arch.X32)),
        (seccomp.Arch.AARCH64, (seccomp.Arch.ARM,)),
    ):
        # The binding has the constants signed and what it returns unsigned.
        if seccomp.system_arch() == native & 0xFFFF_FFFF:
            for arch in others:
                rules.add_arch(arch)
    for request in (termios.TIOCSTI, _TIOCLINUX):
        rules.add_rule(seccomp.ERRNO(errno.EPERM), "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFF_FFFF, request))
    rules.add_rule(seccomp.ERRNO(errno.EAFNOSUPPORT), "socket", seccomp.Arg(0, seccomp.MASKED_EQ, 0xFFFF_FFFF, socket.AF_VSOCK))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "io_uring_setup")
    rules.add_rule(seccomp.ERRNO(errno.ENOKEY), "request_key", seccomp.Arg(2, seccomp.NE, 0))
    rules.load()


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """As execvp(3) does it; comes back with exit code and reason when it cannot be."""
    name = command[0]
    directories = environment.get("PATH", os.defpath).split(os.pathsep)
    problem = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in [name] if "/" in name else [f"{directory or '.'}/{name}" for directory in directories if name]:
        try:
            os.execve(path, [*command], environment)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve("/bin/sh", ["sh", path, *command[1:]], environment)
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                problem = error
    is_found = problem.errno not in {errno.ENOENT, errno.ENOTDIR}
    return EXIT_NOT_EXECUTABLE if is_found else EXIT_NOT_FOUND, problem.strerror or str(problem)
