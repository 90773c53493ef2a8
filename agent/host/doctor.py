"""What of this host stands in the way of the agent, or would if the agent did not work around it. Looks, and changes nothing.

Each condition is one function: what was found in a sentence, whether it is good, worked around or bad, and the remedy. The
order is that of a start: the kernel, what compiles the program, the network, DNS. Some of it a start refuses too, with the same
words; the rest (a firewall, a foreign program) is for its owner to decide.

Synchronous, of the network namespace of the caller; needs root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import errno
import fnmatch
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from agent.config import Config
from agent.control import ControlError
from agent.control.client import Control
from agent.control.runs import RUNS_DEVICE
from agent.core.settings import Upstream
from agent.core.types import Orientation, text_of
from agent.datapath import attach, datapath, device, loader, syscall
from agent.datapath.attach import Hook
from agent.datapath.errors import DatapathError
from agent.host import forwarding, hook_directories, marks
from agent.host.firewall import Firewall, Unreadable
from agent.host.interfaces import Interfaces


class State(StrEnum):
    GOOD = "good"
    WORKED_AROUND = "worked around"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Condition:
    """remedy: a command where there is one; empty where nothing is to be done."""

    name: str
    state: State
    found: str
    remedy: str = ""


_NEVER_WRONG_BEFORE: Final = 2025  # whoever has a clock before this year has none
_UPSTREAM_PATIENCE_S: Final = 1.0
_UPSTREAMS_MAX: Final = 4
_PROC_NET: Final = Path("/proc/sys/net")


def examine(config: Config) -> list[Condition]:
    """Every condition, in the order of a start."""
    host = _Host(config)
    return [condition for look in _LOOKS for condition in look(host)]


class _Host:
    """What several conditions look at, looked at once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.interfaces = Interfaces()
        self.mark_refusal: DatapathError | None = None
        self.has_device = config.datapath.device in self.interfaces.links
        self.chosen_before = marks.chosen_before(config.datapath)
        settled = config.datapath
        try:
            settled = marks.settled(config.datapath)
        except DatapathError as refusal:
            self.mark_refusal = refusal
        self.settings = datapath.Settings(**dataclasses.asdict(settled))
        self.device = self.settings.interception_device

    def endpoints(self) -> dict[str, Orientation]:
        """Those of the configuration that are there, by interface."""
        found: dict[str, Orientation] = {}
        for endpoint in self.config.endpoints:
            for name in self.interfaces.links:
                if fnmatch.fnmatchcase(name, endpoint.interface) and name != self.device.name:
                    found.setdefault(name, endpoint.orientation)
        return found


# --- the kernel ------------------------------------------------------------------------------------------------------


def _kernel(_: _Host) -> Iterator[Condition]:
    refusal = datapath.what_is_missing_of_kernel()
    release = platform.release()
    tested = ".".join(map(str, datapath.KERNEL_TESTED))
    if refusal is not None:
        yield Condition("kernel", State.BAD, refusal.sentence, "boot a newer kernel")
    elif datapath.kernel_version() < datapath.KERNEL_TESTED:
        found = f"Linux {release} has what is needed, by its documentation; nobody has tested below {tested}"
        yield Condition("kernel", State.WORKED_AROUND, found, "boot a newer kernel")
    else:
        yield Condition("kernel", State.GOOD, f"Linux {release}, {tested} or later; its BTF is not needed")


def _rights(_: _Host) -> Iterator[Condition]:
    refusal = datapath.what_is_missing_of_rights()
    if refusal is not None:
        yield Condition("rights", State.BAD, refusal.sentence, "run it on the host, as root")
        return
    try:
        os.close(syscall.map_create(2, 4, 4, 1, 0, "doctor"))
    except OSError as problem:
        why = problem.strerror or "no reason given"
        yield Condition(
            "rights", State.BAD, f"the kernel makes no BPF map for root here: {why}", "see `dmesg`, SELinux, seccomp"
        )
        return
    yield Condition("rights", State.GOOD, "BPF and network administration are allowed")


def _lockdown(_: _Host) -> Iterator[Condition]:
    mode = _text(Path("/sys/kernel/security/lockdown"))
    if "[confidentiality]" in mode:
        found = "lockdown is confidentiality: programs may not read the kernel's memory, and ours do not"
        yield Condition("lockdown", State.GOOD, found)
    if _text(Path("/sys/fs/selinux/enforce")) == "1":
        found = "SELinux enforces: should a start say EACCES, `ausearch -m avc` shows what it forbids"
        yield Condition("selinux", State.GOOD, found)


def _jit(_: _Host) -> Iterator[Condition]:
    if _text(_PROC_NET / "core/bpf_jit_enable") == "0":
        found = "BPF programs are interpreted: right, but several times slower"
        yield Condition("jit", State.WORKED_AROUND, found, "sysctl -w net.core.bpf_jit_enable=1")
    else:
        yield Condition("jit", State.GOOD, "BPF programs are compiled to machine code")


def _bpffs(host: _Host) -> Iterator[Condition]:
    refusal = datapath.what_is_missing_of_bpffs(host.settings.pin_directory)
    if refusal is None:
        yield Condition("bpffs", State.GOOD, f"{host.settings.pin_directory} is on a bpf file system")
    else:
        found, _, remedy = refusal.sentence.partition(": ")
        yield Condition("bpffs", State.BAD, found, remedy)


def _tcx(_: _Host) -> Iterator[Condition]:
    try:
        syscall.tcx_programs(1, syscall.TCX_INGRESS)
    except OSError:
        found = "the kernel has no TCX (6.6): programs are filters of the clsact qdisc, replaced in place all the same"
        yield Condition("hooks", State.WORKED_AROUND, found)
    else:
        yield Condition("hooks", State.GOOD, "programs are attached by TCX links")


def _batch(_: _Host) -> Iterator[Condition]:
    no_prealloc, trie = 1, 11
    try:
        fd = syscall.map_create(trie, 8, 4, 1, no_prealloc, "doctor")
    except OSError:
        return  # said above
    try:
        syscall.map_lookup_batch(fd, None, 8, 8, 4, 1)
    except OSError as problem:
        if problem.errno != errno.ENOENT:
            found = "the kernel reads no rows in batches: tables are read row by row, which takes a start some seconds longer"
            yield Condition("batches", State.WORKED_AROUND, found)
            return
    finally:
        os.close(fd)
    yield Condition("batches", State.GOOD, "tables are read many rows at once")


def _memory(host: _Host) -> Iterator[Condition]:
    needed = datapath.preallocated_bytes(host.settings) >> 20
    lines = dict(line.split(":", 1) for line in _text(Path("/proc/meminfo")).splitlines() if ":" in line)
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) >> 10
    if not host.has_device and needed > available:
        found = f"the tables take {needed} MiB at start, and {available} MiB are available"
        yield Condition("memory", State.BAD, found, "make `datapath.flow-rows` and `datapath.last-seen-rows` smaller")
        return
    found = f"the tables take {needed} MiB, and {available} MiB are available; since Linux 5.11 none of it counts as locked"
    yield Condition("memory", State.GOOD, found)


# --- what compiles the program ---------------------------------------------------------------------------------------


def _compiler(host: _Host) -> Iterator[Condition]:
    if loader.is_cached(host.settings.defines(), host.settings.cache):
        yield Condition(
            "compiler", State.GOOD, "the program is compiled already, and cached: a start needs neither BCC nor headers"
        )
        return
    if loader.has_bcc():
        yield Condition("compiler", State.GOOD, "BCC is there")
    else:
        remedy = "apt install python3-bpfcc, and make the venv with --system-site-packages"
        yield Condition("compiler", State.BAD, "python has no bcc, and no compiled program is cached", remedy)
    try:
        headers = loader.kernel_headers(host.settings.cache or loader.cache_directory())
    except DatapathError as refusal:
        found, _, remedy = refusal.sentence.partition(": ")
        yield Condition("headers", State.BAD, found, remedy)
    else:
        yield Condition("headers", State.GOOD, f"kernel headers are {f'in {headers}' if headers else 'where BCC looks'}")


# --- the network -----------------------------------------------------------------------------------------------------


def _device(host: _Host) -> Iterator[Condition]:
    obstacles = device.in_the_way(host.device)
    for obstacle in obstacles:
        found, _, remedy = obstacle.rpartition(": ")  # a rule's text has colons too
        yield Condition("routing", State.BAD, found, remedy)
    if obstacles:
        return
    broken = device.problems(host.device) if host.has_device else []
    if broken:
        remedy = "restart the agent, which makes it again; or `namegate cleanup`"
        yield Condition("routing", State.BAD, "; ".join(broken), remedy)
    else:
        found = f"{host.device.name}, rule {host.device.priority} and table {host.device.table} are ours or free"
        yield Condition("routing", State.GOOD, found)


def _marks(host: _Host) -> Iterator[Condition]:
    if host.mark_refusal is not None:
        found, _, remedy = host.mark_refusal.sentence.rpartition(": ")
        yield Condition("mark", State.BAD, found, remedy)
        return
    mark = marks.Mark(host.settings.mark, host.settings.mark_mask)
    users = [user for user, bits in marks.users_everywhere().items() if bits & mark.mask]
    if users:
        found = f"bits of our mark {mark} are in use by {', '.join(users)}"
        remedy = "`datapath.mark` and `datapath.mark-mask` with bits of nobody, and a restart"
        yield Condition("mark", State.BAD, found, remedy)
    elif mark == marks.CANDIDATES[0] or host.config.datapath.mark:
        yield Condition("mark", State.GOOD, f"{mark} is nobody else's")
    else:
        yield Condition("mark", State.WORKED_AROUND, f"bits of {marks.CANDIDATES[0]} are in use: ours is {mark}")


def _source_validation(host: _Host) -> Iterator[Condition]:
    values = {name: _text(_PROC_NET / "ipv4/conf" / name / "src_valid_mark") for name in ("all", *host.endpoints())}
    if on := [name for name, value in values.items() if value == "1"]:
        found = f"src_valid_mark of {', '.join(on)} is 1 (wg-quick sets it): our rule goes by the device, not by a mark"
        yield Condition("src_valid_mark", State.WORKED_AROUND, found)
    else:
        yield Condition("src_valid_mark", State.GOOD, "off")
    names = ("all", "default", *host.endpoints())
    strict = [name for name in names if _text(_PROC_NET / "ipv4/conf" / name / "rp_filter") == "1"]
    if strict:
        found = f"rp_filter of {', '.join(strict)} is strict: {host.device.name} has its own, loose one"
        yield Condition("rp_filter", State.WORKED_AROUND, found)
    else:
        yield Condition("rp_filter", State.GOOD, "not strict")


def _firewall(host: _Host) -> Iterator[Condition]:
    try:
        firewall = Firewall.read()
    except Unreadable as problem:
        yield Condition("firewall", State.BAD, str(problem), "nft list ruleset")
        return
    is_open = True
    for title, name, consequence in (
        ("firewall", host.device.name, "no question would be answered"),
        ("runs", RUNS_DEVICE, "`namegate run` would not start, unless it uses this agent"),
    ):
        for chain, protocols, remedy in firewall.obstacles(name):
            found = f"{chain} drops what comes by {name} to port 53 ({', '.join(protocols)}): {consequence}"
            yield Condition(title, State.BAD, found, f"{remedy}  (and the same where this firewall is configured)")
            is_open = is_open and name != host.device.name
    if not is_open:
        return
    if firewall.is_whole:
        yield Condition("firewall", State.GOOD, f"nothing drops what comes by {host.device.name}")
    else:
        found = "nothing that can be read drops it; rules of a tool that is not installed here are not seen"
        yield Condition("firewall", State.GOOD, found, "apt install nftables iptables, and ask again")


def _bridges(host: _Host) -> Iterator[Condition]:
    on = [name for name in ("iptables", "ip6tables") if _text(_PROC_NET / f"bridge/bridge-nf-call-{name}") == "1"]
    if on:
        found = f"bridge-nf-call-{' and '.join(on)} is 1: DNS of a bridge's port goes to {host.device.name} before the bridge"
        yield Condition("bridges", State.WORKED_AROUND, found)
    else:
        yield Condition("bridges", State.GOOD, "no firewall of IP looks at bridged packets")


def _hooks(host: _Host) -> Iterator[Condition]:
    is_clean = True
    for name, orientation in host.endpoints().items():
        for hook in attach.hooks(name, host.interfaces.links[name].ifindex, orientation).values():
            before, behind = attach.neighbours(hook, host.settings.pin_directory)
            is_clean = is_clean and not before and not behind
            yield from _neighbours(hook, before, behind)
    if is_clean and host.config.endpoints:
        yield Condition("programs", State.GOOD, "nobody else has a program on an endpoint's hooks")


def _neighbours(hook: Hook, before: list[str], behind: list[str]) -> Iterator[Condition]:
    if before:
        found = f"{', '.join(before)} runs before ours at the {hook} and may hide it"
        remedy = f"bpftool net show dev {hook.interface}; take it off, or put it there after the agent"
        yield Condition("programs", State.BAD, found, remedy)
    if behind:
        found = f"{', '.join(behind)} at the {hook} sees what ours lets pass: ours goes first, and does not end the chain"
        yield Condition("programs", State.GOOD, found)


def _forwarding(host: _Host) -> Iterator[Condition]:
    links = host.interfaces.links
    behind = {name: links[name].ifindex for name, way in host.endpoints().items() if way is Orientation.BEHIND}
    routed = forwarding.routed(behind)
    if not routed:
        return
    has_ipv6 = any(len(address) == 16 for endpoint in host.config.endpoints for address in endpoint.addresses)
    off = forwarding.off(routed, has_ipv6=has_ipv6)
    if off is not None:
        yield Condition("forwarding", State.BAD, off.found, off.remedy)
    else:
        yield Condition("forwarding", State.GOOD, "the host forwards what its endpoints send")


def _oci_hook(_: _Host) -> Iterator[Condition]:
    """Only where it was installed."""
    try:
        read = hook_directories.directories_read()
    except hook_directories.Unknown:
        return
    where = " and ".join(map(str, read))
    for file in hook_directories.installed(hook_directories.known(read)):
        if file.parent in read:
            yield Condition("oci hook", State.GOOD, f"podman reads {file}")
        else:
            found = f"podman does not read {file}, but hooks from {where}: its containers start without being policed"
            yield Condition("oci hook", State.BAD, found, "namegate attach --hook, with the options of before")


# --- DNS -------------------------------------------------------------------------------------------------------------


def _upstreams(host: _Host) -> Iterator[Condition]:
    upstreams = host.config.dns.upstreams[:_UPSTREAMS_MAX]
    if not upstreams:
        return
    silent = [upstream for upstream in upstreams if not _answers(upstream, host.settings.mark)]
    texts = [f"{text_of(upstream.address)} port {upstream.port}" for upstream in silent]
    remedy = "dig @ADDRESS . NS, and `dns.upstreams` in the configuration"
    if len(silent) == len(upstreams):
        yield Condition("upstreams", State.BAD, f"no upstream answers: {', '.join(texts)}", remedy)
    elif silent:
        yield Condition("upstreams", State.WORKED_AROUND, f"{', '.join(texts)} does not answer; the others are asked", remedy)
    else:
        yield Condition("upstreams", State.GOOD, f"{len(upstreams)} of {len(upstreams)} answer")


def _answers(upstream: Upstream, mark: int) -> bool:
    """Whatever it says: even REFUSED comes from a server. With the agent's mark, or an uplink's own gate would take it."""
    identifier = os.urandom(2)
    question = identifier + struct.pack(">HHHHH", 0x0100, 1, 0, 0, 0) + b"\0" + struct.pack(">HH", 2, 1)
    family = socket.AF_INET if len(upstream.address) == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            asker.settimeout(_UPSTREAM_PATIENCE_S)
            asker.connect((text_of(upstream.address), upstream.port))
            asker.send(question)
            return asker.recv(4096)[:2] == identifier
    except OSError:
        return False


def _other_resolvers(_: _Host) -> Iterator[Condition]:
    listeners = [
        line.split()[1]
        for file in ("udp", "udp6")
        for line in _text(Path("/proc/net") / file).splitlines()[1:]
        if line.split()[1].endswith(":0035")
    ]
    if listeners:
        found = "a resolver of this host listens at port 53: it keeps its own clients, endpoints are answered by the agent"
        yield Condition("resolver", State.GOOD, found)
    if Path("/run/systemd/resolve/io.systemd.Resolve").exists():
        found = "systemd-resolved answers through a socket too: a workload that can open it learns addresses which open nothing"
        yield Condition("resolved", State.GOOD, found, "do not mount /run/systemd/resolve or the D-Bus socket into a workload")


def _clock(_: _Host) -> Iterator[Condition]:
    year = dt.datetime.now(dt.UTC).year
    if year < _NEVER_WRONG_BEFORE:
        found = f"the clock says {year}: only the times in logs are wrong, lifetimes run on CLOCK_BOOTTIME"
        yield Condition("clock", State.WORKED_AROUND, found, "timedatectl set-ntp true")
    else:
        yield Condition("clock", State.GOOD, "set; lifetimes do not depend on it")


def _agent(host: _Host) -> Iterator[Condition]:
    try:
        status = Control(host.config.control.socket).ask("status")
    except ControlError as error:
        hooks = sorted({hook.interface for hook in attach.attached(host.settings.pin_directory)} - {host.device.name})
        left = f"; the kernel goes on enforcing on {', '.join(hooks)}" if hooks else ""
        yield Condition("agent", State.GOOD, f"does not run ({error.sentence}){left}")
        return
    reasons = status.get("reasons", []) if isinstance(status, dict) else ["its answer is not understood"]
    if reasons:
        yield Condition("agent", State.BAD, f"runs, and is degraded: {'; '.join(map(str, reasons))}", "namegate status")
    else:
        yield Condition("agent", State.GOOD, "runs and enforces")


_LOOKS: Final[tuple[Callable[[_Host], Iterator[Condition]], ...]] = (
    _kernel,
    _rights,
    _lockdown,
    _jit,
    _bpffs,
    _tcx,
    _batch,
    _memory,
    _compiler,
    _device,
    _marks,
    _source_validation,
    _firewall,
    _bridges,
    _hooks,
    _forwarding,
    _oci_hook,
    _upstreams,
    _other_resolvers,
    _clock,
    _agent,
)


def _text(path: Path) -> str:
    """Empty where there is no such file: then the kernel has not what it would tell of."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
