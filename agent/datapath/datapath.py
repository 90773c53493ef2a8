"""The kernel edge as the agent sees it: rows in, programs on interfaces, events and counters out.

What is pinned outlives the process, and the kernel goes on enforcing with it:

    DIRECTORY/maps/LAYOUT/NAME             the tables, for whoever wants to look (bpftool map dump pinned …)
    DIRECTORY/links/IFINDEX-ingress        a program on a hook

A start takes over the tables of the process before where it is asked to and they fit: its programs judge by the same rows and
flows, and a write is in force at once, by the programs of before too. Else it makes its own, fills them, and they count from
the first hook on. In both cases the programs are swapped in hook by hook, and nothing old is touched before the first: a start
that fails leaves all as it was.

open() and cleanup() speak netlink synchronously: call them while no event loop runs. The rest may be called in one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.events import Attach, Detach
from agent.core.types import Address, Key, Orientation, Table, Value, Write
from agent.datapath import abi, attach, loader, pins, syscall
from agent.datapath import device as interception
from agent.datapath.abi import Loss
from agent.datapath.attach import Hook, HookState
from agent.datapath.canary import Canary
from agent.datapath.errors import DatapathError
from agent.datapath.events import EventRing, PacketEvent
from agent.datapath.maps import Counter, Fill, Flow, KernelTables
from agent.datapath.pins import UnfitError

_PROOF_HOLDS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent takes for itself in the kernel. Names and defaults are those of `datapath` in the configuration.

    answers_per_second: refusals sent to one endpoint; what is over them is dropped silently, 0 drops everything silently.
    questions_per_second, question_burst: what one endpoint may ask; what is over it is denied, 0 a second are any number.
    verify_every: seconds between two looks at all rows, which are the agent's to take; 0 for none.
    cache: where bytecode and merged headers are; None: NAMEGATE_CACHE, or /var/cache/namegate.
    """

    pin_directory: Path = Path("/sys/fs/bpf/namegate")
    device: str = "ng-gate"
    mark: int = 0xA00
    mark_mask: int = 0xF00
    routing_table: int = 2004
    rule_priority: int = 9
    ipcache_rows: int = 524_288
    policy_rows: int = 262_144
    flow_rows: int = 262_144
    fragment_rows: int = 8_192
    last_seen_rows: int = 524_288
    endpoint_rows: int = 4_096
    own_address_rows: int = 16_384
    counter_rows: int = 32_768
    rule_rows: int = 16_384
    answers_per_second: int = 100
    questions_per_second: int = 2_000
    question_burst: int = 500
    verify_every: float = 30
    cache: Path | None = None

    @property
    def mark_answer(self) -> int:
        """What the program marks its own refusals with: the agent's mark with the lowest of our bits turned over."""
        return self.mark ^ (self.mark_mask & -self.mark_mask)

    @property
    def note(self) -> str:
        """On the interception device, for the next start, and for whoever looks at `ip link`."""
        return f"namegate, mark {self.mark:#x}/{self.mark_mask:#x}"

    @property
    def interception_device(self) -> interception.Device:
        return interception.Device(self.device, self.routing_table, self.rule_priority)

    def defines(self) -> dict[str, int]:
        """The constants the program is compiled with."""
        return {
            "MARK_MASK": self.mark_mask,
            "MARK_AGENT": self.mark,
            "MARK_ANSWER": self.mark_answer,
            "ANSWERS_PER_SECOND": self.answers_per_second,
            "QUESTIONS_PER_SECOND": self.questions_per_second,
            "QUESTION_BURST": self.question_burst,
            "IPCACHE_MAX": self.ipcache_rows,
            "POLICY_MAX": self.policy_rows,
            "FLOWS_MAX": self.flow_rows,
            "FRAGMENTS_MAX": self.fragment_rows,
            "LAST_SEEN_MAX": self.last_seen_rows,
            "ENDPOINTS_MAX": self.endpoint_rows,
            "OWN_ADDRESSES_MAX": self.own_address_rows,
            "COUNTERS_MAX": self.counter_rows,
            "RULES_MAX": self.rule_rows,
        }


class Datapath:
    """Made by open(). After close() the kernel goes on with what it has."""

    def __init__(self, settings: Settings, loaded: loader.Loaded, gate: Hook, lock: int, why_not: str) -> None:
        self.settings = settings
        self.is_taken_over = not why_not
        self.why_not = why_not  # why the tables are new: a clause for the log, else empty
        self.tables = KernelTables(loaded.fds_by_map)
        self._loaded = loaded
        self._gate = gate
        self._events = EventRing(loaded.fds_by_map["events"])
        self._attached: set[int] = set()  # ifindex
        self._is_published = self.is_taken_over
        self._lock = lock
        self._canary = Canary(settings.mark_answer, self._canaries)
        self._proven: dict[int, float] = {}  # ifindex -> when a canary was last dropped there

    @classmethod
    def open(cls, settings: Settings, *, take_over: bool = False) -> Datapath:
        """Loads the program and provides the interception device; raises DatapathError, and then leaves nothing behind.

        take_over: with the tables of the process before, if they fit. Only for who knows what is in them: a row that nobody
        can explain stays open for ever. It may be asked beforehand (pinned_map_id), or found out and closed again.
        """
        code = _bytecode(settings)
        directory = settings.pin_directory
        with contextlib.ExitStack() as undo:
            lock = pins.lock(directory)
            undo.callback(os.close, lock)
            undo.callback(pins.remove_if_empty, directory)
            datapath = cls._open(settings, code, lock, take_over=take_over)
            undo.pop_all()
        return datapath

    @classmethod
    def _open(cls, settings: Settings, code: loader.Bytecode, lock: int, *, take_over: bool) -> Datapath:
        directory = settings.pin_directory
        found: dict[str, int] = {}
        why_not = "those of before are not wanted"
        if take_over:
            try:
                found, why_not = pins.take(directory, code), ""
            except UnfitError as reason:
                why_not = str(reason)
        with contextlib.ExitStack() as undo:
            loaded = loader.load(code, found)
            undo.callback(loaded.close)
            if found:
                pins.remove_new(directory)
            else:
                pins.pin_new(directory, code.layout, loaded.fds_by_map)
                undo.callback(pins.remove_new, directory)
            had_device = _has_interface(settings.device)
            if not had_device:
                undo.callback(interception.remove, settings.interception_device)
            ifindex = interception.provide(settings.interception_device, settings.note)
            datapath = cls(settings, loaded, Hook(settings.device, ifindex, is_ingress=True), lock, why_not)
            undo.pop_all()
        return datapath

    def close(self) -> None:
        """Lets go of everything and changes nothing: pinned programs go on judging by their tables."""
        if not self._is_published:
            pins.remove_new(self.settings.pin_directory)
            pins.remove_if_empty(self.settings.pin_directory)
        os.close(self._lock)
        self._canary.close()
        self._events.close()
        self._loaded.close()

    # --- rows --------------------------------------------------------------------------------------------------------

    @property
    def policy_map_id(self) -> int:
        """The kernel's number of the policy map, by which a journal knows the tables it explains.

        The kernel counts up, and begins again only after two thousand million maps.
        """
        return syscall.map_info(self._loaded.fds_by_map["policy"]).id

    def rows(self) -> dict[Table, dict[Key, Value]]:
        """Every row of the tables that the core fills, as it wrote them. Takes its time: 1.5 us a row."""
        return {table: dict(self.tables.dump(table)) for table in Table}

    def apply(self, writes: Sequence[Write]) -> list[int]:
        """Performs the writes in order; one errno for each, 0 when the kernel has it."""
        return self.tables.apply(writes)

    def dump(self, table: Table) -> Iterator[tuple[Key, Value]]:
        return self.tables.dump(table)

    def fill(self, table: Table) -> Fill:
        return self.tables.fill(table)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def attach(self, effect: Attach) -> None:
        """Puts the programs on an interface, or in place of those of the process before; raises DatapathError.

        Also where they are on it and nothing shows that they enforce: they stay, for they may.
        The hook that sees what the endpoint sends comes first: its packets open the flows by which the other hook knows
        their replies.
        """
        hooks = attach.hooks(effect.interface, effect.ifindex, effect.orientation)
        new: list[Hook] = []
        try:
            for program in ("from_endpoint", "to_endpoint"):
                is_new = attach.attach(hooks[program], self._loaded.fds_by_program[program], self.settings.pin_directory)
                new += [hooks[program]] if is_new else []
        except DatapathError:
            self._detach(new)  # not where a program was before: an interface that was judged goes on being judged
            raise
        self._attached.add(effect.ifindex)
        self._publish()
        self._proven.pop(effect.ifindex, None)
        found = self.hook_state(effect.ifindex, effect.orientation)
        if found is not HookState.FIRST:
            raise DatapathError(errno.EBUSY, found.sentence)

    def detach(self, effect: Detach) -> None:
        """Nothing of ours is on the interface any more: what it sends passes unjudged."""
        self._detach(Hook(effect.interface, effect.ifindex, side) for side in (True, False))
        self._attached.discard(effect.ifindex)
        self._proven.pop(effect.ifindex, None)

    def detach_others(self) -> list[str]:
        """Detaches, and names, what a process before had attached and this one has not. Call when all are attached."""
        others = [
            hook
            for hook in attach.attached(self.settings.pin_directory)
            if hook.ifindex not in self._attached and hook.ifindex != self._gate.ifindex
        ]
        self._detach(others)
        return sorted({hook.interface for hook in others if hook.interface})

    def _detach(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            attach.detach(hook, self.settings.pin_directory)

    def hook_state(self, ifindex: int, orientation: Orientation) -> HookState:
        """The worse of the interface's two hooks: asked of the kernel, and proved with a packet where packets come in.

        May wait for a quarter of a second: call it in a thread where a loop runs.
        """
        states = [self._state(hook, program, "endpoints") for program, hook in attach.hooks("", ifindex, orientation).items()]
        return max(states, key=list(HookState).index)

    def has_programs(self, ifindex: int, orientation: Orientation) -> bool:
        """Are our programs on both hooks of the interface? Asked of the kernel alone, which costs next to nothing.

        Of an interface that goes this very moment nothing is said to be missing.
        """
        from pyroute2.netlink.exceptions import NetlinkError

        map_id = syscall.map_info(self._loaded.fds_by_map["endpoints"]).id
        try:
            return all(
                attach.state(hook, self._loaded.fds_by_program[program], map_id) is not HookState.ABSENT
                for program, hook in attach.hooks(attach.interface_name(ifindex), ifindex, orientation).items()
            )
        except NetlinkError:
            return True

    def gate_state(self) -> HookState:
        """As hook_state(), of the interception device."""
        return self._state(self._gate, "gate", "dns_sockets")

    def _state(self, hook: Hook, program: str, map_name: str) -> HookState:
        map_id = syscall.map_info(self._loaded.fds_by_map[map_name]).id
        found = attach.state(hook, self._loaded.fds_by_program[program], map_id)
        if found is HookState.FIRST and hook.is_ingress and not self._is_proven(hook):
            return HookState.SILENT
        return found

    def _is_proven(self, hook: Hook) -> bool:
        """A proof holds for a second: who asks more often adds no more packets."""
        now = time.monotonic()
        if now - self._proven.get(hook.ifindex, -_PROOF_HOLDS_S) < _PROOF_HOLDS_S:
            return True
        try:
            is_dropped = self._canary.is_dropped(hook.ifindex)
        except OSError:  # the interface has gone this very moment, or a right is missing: nothing is shown
            return False
        if is_dropped:
            self._proven[hook.ifindex] = now
        return is_dropped

    def _canaries(self) -> int:
        return self.tables.packets_counted(None, abi.Reason.DROP_CANARY)

    def gate_problems(self) -> list[str]:
        """Why questions may not reach the proxy. Synchronous netlink: call it in a thread where a loop runs."""
        said = interception.problems(self.settings.interception_device)
        state = self.gate_state()
        if state is not HookState.FIRST:
            said.append(f"{self.settings.device}, which takes DNS over: {state.sentence}")
        return said

    def set_dns_sockets(self, fds_by_key: Mapping[int, int]) -> None:
        """Where redirected packets go: key (IPv6 ? 2 : 0) | (TCP ? 1 : 0) → a bound UDP or listening TCP socket, transparent.

        Then the gate is put on the interception device: it hands over to these sockets and no others. A key that is left out
        has no socket, and its packets are dropped and counted. Only then is the device named to the programs: without the gate
        on it, what is redirected there would be the host's own port 53.
        """
        if attach.is_foreign(self._gate, self.settings.pin_directory):
            raise DatapathError(
                errno.EBUSY, f"{self.settings.device} is in use by another agent: name another `datapath.device`"
            )
        for key in range(4):
            if key in fds_by_key:
                self.tables.set_dns_socket(key, fds_by_key[key])
            else:
                self.tables.drop_dns_socket(key)
        attach.attach(self._gate, self._loaded.fds_by_program["gate"], self.settings.pin_directory)
        self.tables.set_setting(abi.SETTING_GATE_IFINDEX, self._gate.ifindex)
        self.tell_openings(False)

    # --- what the kernel saw -----------------------------------------------------------------------------------------

    @property
    def events_fd(self) -> int:
        """Readable when there are events."""
        return self._events.fd

    def read_events(self, limit: int = 1_024) -> list[PacketEvent]:
        return self._events.read(limit)

    def counters(self) -> list[Counter]:
        return self.tables.counters()

    def rule_counters(self) -> dict[int, tuple[int, int]]:
        return self.tables.rule_counters()

    def tell_openings(self, is_told: bool) -> None:
        """Whether `read_events` gives flows that are judged and allowed as well, one for each."""
        self.tables.set_setting(abi.SETTING_TELL_OPENED, int(is_told))

    def losses(self) -> dict[Loss, int]:
        return self.tables.losses()

    def flows(self) -> Iterator[Flow]:
        return self.tables.flows()

    def flow_identities(self) -> frozenset[int]:
        return self.tables.flow_identities()

    def last_seen(self, scope: int, address: Address) -> float | None:
        return self.tables.last_seen(scope, address)

    # -----------------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if not self._is_published:
            pins.publish_new(self.settings.pin_directory)
            self._is_published = True


def pinned_map_id(settings: Settings) -> int | None:
    """The policy_map_id of the tables that open() would take over; None where it would make new ones. Raises DatapathError."""
    try:
        fds = pins.take(settings.pin_directory, _bytecode(settings))
    except UnfitError:
        return None
    try:
        return syscall.map_info(fds["policy"]).id
    finally:
        for fd in fds.values():
            os.close(fd)


def preallocated_bytes(settings: Settings) -> int:
    """About what the kernel sets aside when the tables are made: 64 bytes go with each row. Tries take memory row by row."""
    rows = {
        "own_addresses": settings.own_address_rows,
        "flows": settings.flow_rows,
        "ended": settings.flow_rows // 4,
        "last_seen": settings.last_seen_rows,
        "fragments": settings.fragment_rows,
    }
    sizes = {name: key.size + value.size + 64 for name, (key, value) in abi.MAPS.items() if name in rows}
    return sum(rows[name] * size for name, size in sizes.items())


def release(settings: Settings, interface: str) -> bool:
    """Takes the programs that a stopped agent left off one interface; were there any? In the caller's network namespace."""
    directory = settings.pin_directory
    if not directory.is_dir():
        return False
    os.close(pins.lock(directory))
    found = [hook for hook in attach.attached(directory) if hook.interface == interface != settings.device]
    for hook in found:
        attach.detach(hook, directory)
    return bool(found)


def cleanup(settings: Settings) -> list[str]:
    """Takes everything of ours out of the kernel, whoever put it there; gives the interfaces that were attached.

    In the network namespace of the caller; pins are removed wherever they lead.
    """
    directory = settings.pin_directory
    if directory.is_dir():
        os.close(pins.lock(directory))
    found = list(attach.attached(directory))
    for hook in found:
        attach.detach(hook, directory)
    pins.remove_all(directory)
    interception.remove(settings.interception_device)
    return sorted({hook.interface for hook in found} - {"", settings.device})


KERNEL_MIN: Final = (5, 15)  # what the programs use was all there, by its documentation
KERNEL_TESTED: Final = (6, 1)


def _bytecode(settings: Settings) -> loader.Bytecode:
    for what in (what_is_missing_of_rights(), what_is_missing_of_kernel(), what_is_missing_of_bpffs(settings.pin_directory)):
        if what is not None:
            raise what
    return loader.bytecode(settings.defines(), settings.cache)


def what_is_missing_of_kernel() -> DatapathError | None:
    if kernel_version() >= KERNEL_MIN:
        return None
    return DatapathError(
        errno.ENOSYS, f"Linux {platform.release()} is too old: namegate needs {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or later"
    )


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def what_is_missing_of_rights() -> DatapathError | None:
    """capabilities(7): root in a container has often not all of them."""
    if os.geteuid() != 0:
        return DatapathError(errno.EPERM, "the agent needs root: run it with sudo")
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    held = int(found[1], 16) if found else 0
    wanted = {"CAP_NET_ADMIN": {12}, "CAP_BPF": {39, _CAP_SYS_ADMIN}, "CAP_PERFMON": {38, _CAP_SYS_ADMIN}}
    missing = [name for name, numbers in wanted.items() if not any(held >> number & 1 for number in numbers)]
    if not missing:
        return None
    return DatapathError(
        errno.EPERM,
        f"root has no {', '.join(missing)} here: run the agent on the host, or give its container these capabilities",
    )


_CAP_SYS_ADMIN: Final = 21


def what_is_missing_of_bpffs(directory: Path) -> DatapathError | None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    kinds = {Path(mount[1]): mount[2] for mount in mounts}
    for parent in (directory, *directory.parents):
        if parent in kinds:
            if kinds[parent] == "bpf":
                return None
            break
    root = Path("/sys/fs/bpf")
    where = root if root in directory.parents else directory.parent
    return DatapathError(errno.ENOENT, f"{directory} is on no bpf file system: mount -t bpf bpf {where}")


def _has_interface(name: str) -> bool:
    import socket

    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True
