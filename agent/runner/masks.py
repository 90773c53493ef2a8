"""What of the host's files is another one for COMMAND: name resolution's configuration, and sockets of those who would talk to
the network, or start a program outside, for whoever asks.

The network namespace has closed abstract sockets and everything that is no file. A socket that is a file is closed here, for
the kinds that are known: it, or its directory, is covered by an empty one in COMMAND's mount namespace. A directory also covers
what is made in it later; a file that is made anew (a daemon restarts) is not covered any more. docs/run.md says so.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent.runner import kernel

# Path, {uid} being the user's number, and what it would do.
_MASKED: Final = (
    ("/run/systemd/resolve", "systemd-resolved resolves any name"),
    ("/run/nscd", "nscd resolves any name"),
    ("/run/avahi-daemon", "avahi resolves names on the link"),
    ("/run/dbus", "the system's bus: resolved, NetworkManager, and services that are started on request"),
    ("/run/systemd/private", "systemd starts units"),
    ("/run/user/{uid}/bus", "the user's bus: services that are started on request"),
    ("/run/user/{uid}/systemd", "the user's systemd starts units"),
    ("/run/user/{uid}/gnupg/S.dirmngr", "GnuPG's dirmngr fetches keys and certificates"),
    ("/run/docker.sock", "Docker starts containers"),
    ("/run/user/{uid}/docker.sock", "rootless Docker starts containers"),
    ("/run/podman", "podman starts containers"),
    ("/run/user/{uid}/podman", "podman starts containers"),
    ("/tmp/podman-run-{uid}", "podman starts containers"),  # noqa: S108 - podman's own choice, without a session of systemd's
    ("/run/containerd", "containerd starts containers"),
    ("/run/buildkit", "BuildKit starts containers"),
    ("/run/user/{uid}/buildkit", "BuildKit starts containers"),
    ("/run/crio", "CRI-O starts containers"),
    ("/run/libvirt", "libvirt starts machines"),
    ("/run/user/{uid}/libvirt", "libvirt starts machines"),
    ("/run/snapd.socket", "snapd fetches packages"),
    ("/run/snapd-snap.socket", "snapd fetches packages"),
    ("/var/snap/lxd/common/lxd/unix.socket", "LXD starts containers"),
    ("/var/snap/lxd/common/lxd-user/unix.socket", "LXD starts containers"),
    ("/var/lib/lxd/unix.socket", "LXD starts containers"),
    ("/var/lib/incus/unix.socket", "Incus starts containers"),
    ("/var/lib/incus/unix.socket.user", "Incus starts containers"),
    ("/nix/var/nix/daemon-socket", "Nix fetches what a derivation names"),
    ("/var/guix/daemon-socket", "Guix fetches what a derivation names"),
    ("/run/tailscale", "tailscaled connects to whatever it is told"),
    ("/run/WSL", "Windows starts programs"),
    ("/tmp/tmux-{uid}", "tmux types into the user's other terminals"),  # noqa: S108 - tmux's own choice
    ("/run/screen/S-{user}", "screen types into the user's other terminals"),
    ("/run/user/{uid}/emacs", "an Emacs server evaluates what it is sent"),
    ("/run/namegate", "the agent changes policies"),
    ("/run/namegate-runs", "the agent changes policies"),
)
_OURS: Final = frozenset({Path("/"), Path("/proc")})
_RESOLVED: Final = "/run/systemd/resolve"
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_KEPT_OF_RESOLV_CONF: Final = ("search", "domain", "options")


def resolver_configuration(host: str, server: str) -> str:
    """Of the host's file its search list and options. Whatever server is asked, the gate answers; this one is always there."""
    kept = [line for line in host.splitlines() if line.split()[:1] and line.split()[0] in _KEPT_OF_RESOLV_CONF]
    return "\n".join([f"nameserver {server}", *kept]) + "\n"


def masked(uid: int, user: str, more: Sequence[Path], kept: Sequence[Path]) -> list[Path]:
    """The files and directories that are there and to be covered. more: besides; kept: the caller wants them reachable, so that
    what covers one of them stays away."""
    wanted = {path.resolve() for path in kept}
    found: list[Path] = []
    for path in (*(Path(pattern.format(uid=uid, user=user)) for pattern, _ in _MASKED), *more):
        try:
            real = path.resolve(strict=True)
        except OSError:
            continue
        # Links of the user's, or of a run of his before this one, lead anywhere. Over the root nothing can be laid.
        is_covered = any(each in real.parents for each in found) or real in _OURS
        if not is_covered and not any(keep == real or real in keep.parents for keep in wanted):
            found.append(real)
    return found


def cover(server: str, hidden: Sequence[Path]) -> None:
    """In a mount namespace of one's own, whose /proc gets a new proc by the way. Raises OSError.

    What covers lies in a tmpfs that has lost its name when this returns.
    """
    text = resolver_configuration(_RESOLV_CONF.read_text(encoding="utf-8", errors="replace"), server)
    real_resolv_conf = _RESOLV_CONF.resolve(strict=True)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("namegate", "/proc", "tmpfs", flags, "mode=0755,size=1m")
    store = Path("/proc")
    resolv_conf, nothing, empty, resolved = store / "resolv.conf", store / "nothing", store / "empty", store / "resolve"
    resolv_conf.write_text(text, encoding="utf-8")
    resolv_conf.chmod(0o644)
    nothing.touch(mode=0)
    empty.mkdir(mode=0o755)
    # systemd-resolved replaces its file when the network changes, and what lies over a replaced file is gone: the directory.
    resolved.mkdir(mode=0o755)
    for name in ("resolv.conf", "stub-resolv.conf"):
        (resolved / name).write_text(text, encoding="utf-8")
        (resolved / name).chmod(0o644)
    for path in hidden:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:  # it went since it was found
            continue
        kernel.bind(str((resolved if str(path) == _RESOLVED else empty) if is_directory else nothing), str(path))
    if not any(path in real_resolv_conf.parents for path in hidden):
        kernel.bind(str(resolv_conf), str(real_resolv_conf))
    kernel.detach_mount("/proc")
    kernel.mount("proc", "/proc", "proc", flags)
    _stand_on_what_covers([Path("/proc"), *hidden])


def _stand_on_what_covers(covered: Sequence[Path]) -> None:
    """A working directory is what it was before something was laid over it; through the outer /proc everything outside is seen.
    Raises OSError where nothing has its name any more."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return
    if any(here.is_relative_to(path) for path in covered):
        os.chdir(here)
