"""The kernel edge as the agent sees it: rows in, programs on interfaces, events and counters out.

What is pinned outlives the process, and the kernel goes on enforcing with it:

    DIRECTORY/maps/NAME                    the tables, for whoever wants to look (bpftool map dump pinned …)
    DIRECTORY/links/INTERFACE-ingress      a program on a hook

A start makes its own maps, fills them and then swaps its programs in, hook by hook; until then the programs of the process
before go on judging by theirs. Nothing old is touched before the first hook is taken over: a start that fails leaves all as
it was.

open() and cleanup() speak netlink synchronously: call them while no event loop runs. The rest may be called in one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.events import Attach, Detach
from agent.core.types import Address, Key, Orientation, Table, Value, Write
from agent.datapath import abi, attach, loader, syscall
from agent.datapath import device as interception
from agent.datapath.abi import Loss
from agent.datapath.attach import Hook, HookState
from agent.datapath.errors import DatapathError, refused
from agent.datapath.events import DropEvent, EventRing
from agent.datapath.maps import Counter, Fill, Flow, KernelTables

_MAPS: Final = "maps"
_MAPS_NEW: Final = "maps-new"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent takes for itself in the kernel. Names and defaults are those of `datapath` in the configuration.

    answers_per_second: refusals sent to one endpoint; what is over them is dropped silently, 0 drops everything silently.
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
    cache: Path | None = None

    @property
    def mark_answer(self) -> int:
        """What the program marks its own refusals with: the agent's mark with the lowest of our bits turned over."""
        return self.mark ^ (self.mark_mask & -self.mark_mask)

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

    def __init__(self, settings: Settings, loaded: loader.Loaded, gate: Hook) -> None:
        self.settings = settings
        self.tables = KernelTables(loaded.fds_by_map)
        self._loaded = loaded
        self._gate = gate
        self._events = EventRing(loaded.fds_by_map["events"])
        self._attached: set[str] = set()
        self._is_published = False

    @classmethod
    def open(cls, settings: Settings) -> Datapath:
        """Loads the program and provides the interception device; raises DatapathError, and then leaves nothing behind."""
        if os.geteuid() != 0:
            raise DatapathError(errno.EPERM, "the agent needs root: run it with sudo")
        _require_bpffs(settings.pin_directory)
        code = loader.bytecode(settings.defines(), settings.cache)
        with contextlib.ExitStack() as undo:
            loaded = loader.load(code)
            undo.callback(loaded.close)
            _pin_maps(loaded.fds_by_map, settings.pin_directory / _MAPS_NEW, undo)
            had_device = _has_interface(settings.device)
            if not had_device:
                undo.callback(interception.remove, settings.interception_device)
            ifindex = interception.provide(settings.interception_device)
            datapath = cls(settings, loaded, Hook(settings.device, ifindex, is_ingress=True))
            datapath.tables.set_setting(abi.SETTING_GATE_IFINDEX, ifindex)
            undo.pop_all()
        return datapath

    def close(self) -> None:
        """Lets go of everything and changes nothing: pinned programs go on judging by their tables."""
        if not self._is_published:
            _remove_pins(self.settings.pin_directory / _MAPS_NEW)
        self._events.close()
        self._loaded.close()

    # --- rows --------------------------------------------------------------------------------------------------------

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

        The hook that sees what the endpoint sends comes first: its packets open the flows by which the other hook knows
        their replies.
        """
        hooks = attach.hooks(effect.interface, effect.ifindex, effect.orientation)
        try:
            for program in ("from_endpoint", "to_endpoint"):
                attach.attach(hooks[program], self._loaded.fds_by_program[program], self.settings.pin_directory)
        except DatapathError:
            if effect.interface not in self._attached:
                self._detach(hooks.values())
            raise
        self._attached.add(effect.interface)
        self._publish()

    def detach(self, effect: Detach) -> None:
        """Nothing of ours is on the interface any more: what it sends passes unjudged."""
        self._detach(Hook(effect.interface, effect.ifindex, side) for side in (True, False))
        self._attached.discard(effect.interface)

    def detach_others(self) -> list[str]:
        """Detaches, and names, what a process before had attached and this one has not. Call when all are attached."""
        others = [
            hook
            for hook in attach.attached(self.settings.pin_directory)
            if hook.interface not in self._attached and hook.interface != self.settings.device
        ]
        self._detach(others)
        return sorted({hook.interface for hook in others})

    def _detach(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            attach.detach(hook, self.settings.pin_directory)

    def hook_state(self, ifindex: int, orientation: Orientation) -> HookState:
        """The worse of the interface's two hooks, asked of the kernel."""
        states = [
            attach.state(hook, self._loaded.fds_by_program[program])
            for program, hook in attach.hooks("", ifindex, orientation).items()
        ]
        return max(states, key=list(HookState).index)

    def gate_state(self) -> HookState:
        return attach.state(self._gate, self._loaded.fds_by_program["gate"])

    def set_dns_sockets(self, fds_by_key: Mapping[int, int]) -> None:
        """Where redirected packets go: key (IPv6 ? 2 : 0) | (TCP ? 1 : 0) → a bound UDP or listening TCP socket, transparent.

        Then the gate is put on the interception device: it hands over to these sockets and no others. A key that is left out
        has no socket, and its packets are dropped and counted.
        """
        for key in range(4):
            if key in fds_by_key:
                self.tables.set_dns_socket(key, fds_by_key[key])
            else:
                self.tables.drop_dns_socket(key)
        attach.attach(self._gate, self._loaded.fds_by_program["gate"], self.settings.pin_directory)

    # --- what the kernel saw -----------------------------------------------------------------------------------------

    @property
    def events_fd(self) -> int:
        """Readable when there are events."""
        return self._events.fd

    def read_events(self, limit: int = 1_024) -> list[DropEvent]:
        return self._events.read(limit)

    def counters(self) -> list[Counter]:
        return self.tables.counters()

    def rule_counters(self) -> dict[int, tuple[int, int]]:
        return self.tables.rule_counters()

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
        """The maps that count from now on are found under the known name."""
        if self._is_published:
            return
        directory = self.settings.pin_directory
        _remove_pins(directory / _MAPS)
        (directory / _MAPS_NEW).rename(directory / _MAPS)
        self._is_published = True


def cleanup(settings: Settings) -> list[str]:
    """Takes everything of ours out of the kernel, whoever put it there; gives the interfaces that were attached.

    In the network namespace of the caller; pins are removed wherever they lead.
    """
    directory = settings.pin_directory
    found = list(attach.attached(directory))
    for hook in found:
        attach.detach(hook, directory)
    for name in (_MAPS, _MAPS_NEW, "links", "filters"):
        _remove_pins(directory / name)
    _remove_if_empty(directory)
    interception.remove(settings.interception_device)
    return sorted({hook.interface for hook in found if hook.interface != settings.device})


def _require_bpffs(directory: Path) -> None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    kinds = {Path(mount[1]): mount[2] for mount in mounts}
    for parent in (directory, *directory.parents):
        if parent in kinds:
            if kinds[parent] == "bpf":
                return
            break
    root = Path("/sys/fs/bpf")
    where = root if root in directory.parents else directory.parent
    raise DatapathError(errno.ENOENT, f"{directory} is on no bpf file system: mount -t bpf bpf {where}")


def _pin_maps(fds_by_map: Mapping[str, int], directory: Path, undo: contextlib.ExitStack) -> None:
    """Under a name of their own, until they count. What a start before left there is of no use to anybody."""
    _remove_pins(directory)
    undo.callback(_remove_if_empty, directory.parent)
    undo.callback(_remove_pins, directory)
    try:
        directory.mkdir(parents=True, mode=0o700)
        for name, fd in fds_by_map.items():
            syscall.pin(fd, str(directory / name))
    except OSError as problem:
        raise refused(f"pin the maps in {directory}", problem) from None


def _remove_pins(directory: Path) -> None:
    if not directory.is_dir():
        return
    for pin in directory.iterdir():
        pin.unlink()
    directory.rmdir()


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _has_interface(name: str) -> bool:
    import socket

    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True
