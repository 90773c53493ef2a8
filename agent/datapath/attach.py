"""Programs on interfaces.

Where the kernel has TCX (6.6), a link: ours is put first in the chain, the link is pinned, and another program is swapped in by
one system call between two packets. Below, the clsact qdisc, whose filter is replaced in place. Neither is ever removed and
added: between the two every packet would pass.

Pins: DIRECTORY/links/IFINDEX-ingress holds the link, DIRECTORY/filters/IFINDEX-ingress the program of a clsact filter, so that
whoever cleans up knows where to look. The interface is looked up in the caller's network namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from agent.core.types import Orientation
from agent.datapath import syscall
from agent.datapath.errors import DatapathError, refused

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_T = TypeVar("_T")

_PARENT_INGRESS: Final = 0xFFFF_FFF2
_PARENT_EGRESS: Final = 0xFFFF_FFF3
_CLSACT_HANDLE: Final = 0xFFFF_0000
_PRIORITY: Final = 1
_ETH_P_ALL: Final = 3
_FILTER_NAME: Final = "namegate-"
_NO_TCX: Final = {errno.EINVAL, errno.EOPNOTSUPP}


class Hook(NamedTuple):
    interface: str
    ifindex: int
    is_ingress: bool

    @property
    def pin_name(self) -> str:
        """By index: an interface keeps it, and what is attached, when it gets another name."""
        return f"{self.ifindex}-{'ingress' if self.is_ingress else 'egress'}"

    @property
    def attach_type(self) -> int:
        return syscall.TCX_INGRESS if self.is_ingress else syscall.TCX_EGRESS

    def __str__(self) -> str:
        return f"{'ingress' if self.is_ingress else 'egress'} of {self.interface}"


class HookState(enum.StrEnum):
    """Ordered from good to bad."""

    FIRST = "first"
    NOT_FIRST = "not-first"  # a program before ours may end the chain, and hide ours
    SILENT = "silent"  # on the list, but a packet put through the hook was not counted
    ABSENT = "absent"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES: Final = {
    HookState.FIRST: "our program judges first",
    HookState.NOT_FIRST: "another program comes before ours and may hide it",
    HookState.SILENT: "a packet put through our program was not counted as dropped: nothing shows that it enforces",
    HookState.ABSENT: "our program is not there: nothing is enforced",
}


def hooks(interface: str, ifindex: int, orientation: Orientation) -> dict[str, Hook]:
    """Which program belongs where: what leaves a veth's peer arrives at the host side's ingress; an uplink is the host."""
    is_behind = orientation is Orientation.BEHIND
    return {
        "from_endpoint": Hook(interface, ifindex, is_ingress=is_behind),
        "to_endpoint": Hook(interface, ifindex, is_ingress=not is_behind),
    }


def attach(hook: Hook, program: int, directory: Path) -> bool:
    """Puts the program on the hook, or in place of the one before it; raises DatapathError. Was there none of ours before?"""
    pin = directory / "links" / hook.pin_name
    try:
        if _update_pinned(hook, program, pin):
            return False
        link = syscall.tcx_attach(program, hook.ifindex, hook.attach_type)
    except OSError as problem:
        if problem.errno in _NO_TCX:
            return _replace_filter(hook, program, directory)
        raise refused(f"put the program on the {hook}", problem) from None
    try:
        pin.parent.mkdir(parents=True, exist_ok=True)
        syscall.pin(link, str(pin))
    except OSError as problem:
        raise refused(f"pin the link of the {hook} at {pin}", problem) from None
    finally:
        os.close(link)  # pinned it lives on; not pinned it must not
    return True


def _update_pinned(hook: Hook, program: int, pin: Path) -> bool:
    """True where the pinned link is of this very interface; one whose interface is gone, or another by now, makes room."""
    try:
        link = syscall.get_pinned(str(pin))
    except FileNotFoundError:
        return False
    try:
        if syscall.link_info(link).ifindex == hook.ifindex:
            syscall.link_update(link, program)
            return True
    finally:
        os.close(link)
    pin.unlink()
    return False


def is_foreign(hook: Hook, directory: Path) -> bool:
    """Are there programs on the hook, and none that we pinned?"""
    if any((directory / kind / hook.pin_name).exists() for kind in ("links", "filters")):
        return False
    try:
        return bool(syscall.tcx_programs(hook.ifindex, hook.attach_type))
    except OSError as problem:
        if problem.errno in _NO_TCX:
            return bool(_netlink(lambda netlink: _filter_programs(netlink, hook)))
        raise refused(f"ask which programs are on the {hook}", problem) from None


def detach(hook: Hook, directory: Path) -> None:
    """The hook is as if we had never been there. What is gone already is no error. Raises DatapathError."""
    link_pin = directory / "links" / hook.pin_name
    try:
        link = syscall.get_pinned(str(link_pin))
        try:
            syscall.link_detach(link)
        finally:
            os.close(link)
        link_pin.unlink()
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise refused(f"take the program off the {hook}", problem) from None
    pin = directory / "filters" / hook.pin_name
    if pin.exists():
        _netlink(lambda netlink: _delete_filter(netlink, hook))
        pin.unlink()


def attached(directory: Path) -> Iterator[Hook]:
    """The hooks with a pin. The name is empty where the interface is gone."""
    for kind in ("links", "filters"):
        for pin in sorted((directory / kind).glob("*")):
            ifindex, _, side = pin.name.rpartition("-")
            if ifindex.isdecimal():
                yield Hook(interface_name(int(ifindex)), int(ifindex), is_ingress=side == "ingress")


def interface_name(ifindex: int) -> str:
    """Empty where it is gone."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return ""


def state(hook: Hook, program: int, map_id: int) -> HookState:
    """Asked of the kernel: is this program on the hook, or one of that name with this map of ours, and the first there?

    The latter is that of the process before, which judges by the same tables. Without a packet put through: see Canary.
    """
    own = syscall.program_info(program)
    programs = _tcx_programs(hook)
    place = _place_of(own, map_id, programs)
    if place is None:
        programs = (*programs, *_netlink(lambda netlink: _filter_programs(netlink, hook)))  # TCX runs before clsact
        place = _place_of(own, map_id, programs)
    if place is None:
        return HookState.ABSENT
    return HookState.NOT_FIRST if place else HookState.FIRST


def neighbours(hook: Hook, directory: Path) -> tuple[list[str], list[str]]:
    """Who else is on the hook, before and behind ours; all are behind where ours is not there. For people."""
    mine = set()
    with contextlib.suppress(OSError):
        link = syscall.get_pinned(str(directory / "links" / hook.pin_name))
        try:
            mine.add(syscall.link_info(link).program_id)
        finally:
            os.close(link)
    filters = _netlink(lambda netlink: _filter_programs(netlink, hook))
    if (directory / "filters" / hook.pin_name).exists():
        mine |= set(filters) - {0}
    programs = [*_tcx_programs(hook), *filters]
    place = next((place for place, number in enumerate(programs) if number in mine), -1)
    names = [f"program {number}" if number else "a filter of tc" for number in programs]
    return names[: max(place, 0)], names[place + 1 :]


def _tcx_programs(hook: Hook) -> tuple[int, ...]:
    try:
        return syscall.tcx_programs(hook.ifindex, hook.attach_type)
    except OSError as problem:
        if problem.errno == errno.ENODEV or problem.errno in _NO_TCX:
            return ()
        raise refused(f"ask which programs are on the {hook}", problem) from None


def _place_of(own: syscall.ProgramInfo, map_id: int, programs: Sequence[int]) -> int | None:
    for place, number in enumerate(programs):
        if number == own.id:
            return place
        with contextlib.suppress(OSError):
            fd = syscall.program_of(number)
            try:
                info = syscall.program_info(fd)
            finally:
                os.close(fd)
            if info.name == own.name and map_id in info.maps:
                return place
    return None


# --- clsact ----------------------------------------------------------------------------------------------------------


def _netlink(work: Callable[[IPRoute], _T]) -> _T:
    """pyroute2's synchronous face runs an event loop of its own; where one runs already that needs another thread."""
    from pyroute2 import IPRoute

    def run() -> _T:
        with IPRoute() as netlink:
            return work(netlink)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


def _parent(hook: Hook) -> int:
    return _PARENT_INGRESS if hook.is_ingress else _PARENT_EGRESS


def _replace_filter(hook: Hook, program: int, directory: Path) -> bool:
    from pyroute2.netlink.exceptions import NetlinkError

    pin = directory / "filters" / hook.pin_name

    def replace(netlink: IPRoute) -> None:
        try:
            netlink.tc("add", "clsact", hook.ifindex)
        except NetlinkError as problem:
            if problem.code != errno.EEXIST:
                raise
        netlink.tc(
            "replace-filter",
            "bpf",
            hook.ifindex,
            1,
            fd=program,
            name=f"{_FILTER_NAME}{syscall.program_info(program).id}",
            parent=_parent(hook),
            prio=_PRIORITY,
            protocol=_ETH_P_ALL,
            direct_action=True,
        )

    try:
        _netlink(replace)
        pin.parent.mkdir(parents=True, exist_ok=True)
        is_new = not pin.exists()
        if is_new:
            syscall.pin(program, str(pin))
    except NetlinkError as problem:
        raise DatapathError(problem.code, f"cannot put the program on the {hook}: {problem}") from None
    except OSError as problem:
        raise refused(f"pin the program of the {hook} at {pin}", problem) from None
    return is_new


def _delete_filter(netlink: IPRoute, hook: Hook) -> None:
    """And the qdisc with it when no filter of anybody is left."""
    from pyroute2.netlink.exceptions import NetlinkError

    if not hook.interface:
        return
    with contextlib.suppress(NetlinkError):
        netlink.tc("del-filter", "bpf", hook.ifindex, 1, parent=_parent(hook), prio=_PRIORITY, protocol=_ETH_P_ALL)
    if not any(list(netlink.get_filters(hook.ifindex, parent=parent)) for parent in (_PARENT_INGRESS, _PARENT_EGRESS)):
        with contextlib.suppress(NetlinkError):
            netlink.tc("del", "clsact", hook.ifindex, handle=_CLSACT_HANDLE)


def _filter_programs(netlink: IPRoute, hook: Hook) -> tuple[int, ...]:
    """Ids of our programs in the order in which the filters run, 0 for each of somebody else.

    Read from the filter's name, which is replaced together with its program: pyroute2 does not decode the id beside it.
    """
    found: list[tuple[int, int]] = []
    for message in netlink.get_filters(hook.ifindex, parent=_parent(hook)):
        options: Any = message.get_attr("TCA_OPTIONS")
        if options is None:
            continue  # the head of a chain
        is_bpf = message.get_attr("TCA_KIND") == "bpf"
        name = str(options.get_attr("TCA_BPF_NAME") or "") if is_bpf else ""
        number = name.removeprefix(_FILTER_NAME)
        found.append((message["info"] >> 16, int(number) if name.startswith(_FILTER_NAME) and number.isdecimal() else 0))
    return tuple(number for _, number in sorted(found, key=lambda each: each[0]))
