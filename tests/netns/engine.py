"""A container engine in a lab: podman, with containers from a directory that holds busybox alone.

Rule 1: it shares nothing with an engine of the machine: storage, state, networks and hooks are the lab's own directory. What
podman keeps elsewhere (the addresses it gave, in /run/containers) it takes back when networks and containers go.
Rule 2: it works in the host's namespace of the lab, entered by nsenter: `ip netns exec` hides the cgroups. Its bridges and
rules end with that namespace.

runc, because crun refuses a hybrid cgroup hierarchy; the limits, because raising those of containers takes CAP_SYS_RESOURCE.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.netns.lab import NETNS_DIRECTORY, READY_S_MAX, Lab, LabError

BUSYBOX = Path("/usr/bin/busybox")
COMMANDS = ("cat", "ip", "nc", "nslookup", "sh", "sleep", "timeout", "true")
RUNC = Path("/usr/sbin/runc")

_CONFIGURATION = f"""
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "{RUNC}"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""


class Engine:
    """Use as a context manager; containers and networks go with it. hooks: its directory of OCI hooks; socket: of its API."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        directory = lab.directory / "engine"
        self.hooks = directory / "hooks"
        self.socket = directory / "podman.sock"
        self.root = directory / "busybox"
        self._log = directory / "service.log"
        self._configuration = directory / "containers.conf"
        self._service: subprocess.Popen[str] | None = None
        self._command = (
            *("podman", "--root", directory / "storage", "--runroot", directory / "run", "--tmpdir", directory / "tmp"),
            *("--network-config-dir", directory / "networks", "--storage-driver", "vfs"),
        )
        self._hooked = (*self._command, "--hooks-dir", self.hooks)

    def __enter__(self) -> Self:
        self._namespaces_before = set(NETNS_DIRECTORY.glob("netns-*"))
        self.hooks.mkdir(parents=True)
        self.lab.directory.chmod(0o711)  # root of a user namespace is somebody else here
        self._configuration.write_text(_CONFIGURATION)
        for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp"):
            (self.root / name).mkdir(parents=True)
        shutil.copy(BUSYBOX, self.root / "bin" / "busybox")
        for name in COMMANDS:
            (self.root / "bin" / name).symlink_to("busybox")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop_service()
        self.podman("rm", "--all", "--force", "--time", "0", check=False)
        for network in self.podman("network", "ls", "--quiet", check=False).split():
            self.podman("network", "rm", "--force", network, check=False)
        # A podman in a mount namespace of its own (on_host) unmounts its namespaces and cannot take their files away.
        for left in set(NETNS_DIRECTORY.glob("netns-*")) - self._namespaces_before:
            with contextlib.suppress(OSError):  # somebody else's, which is mounted
                left.unlink()

    def podman(self, *arguments: str | Path, check: bool = True) -> str:
        """What it printed; LabError with its words when it fails."""
        done = self.attempt(*arguments)
        if check and done.returncode != 0:
            raise LabError(f"podman {' '.join(map(str, arguments))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def attempt(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ("env", f"CONTAINERS_CONF={self._configuration}", *self._hooked, *arguments)
        return self.lab.run(self.lab.host, *command, check=False, timeout_s=60)

    def on_host(self, host: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A command that sees below `host` what podman's package installs, and what an administrator may change of it: `usr` is
        its /usr/share/containers, `etc` its /etc/containers. Our own configuration is a drop-in there, and names no hooks.
        """
        if not host.exists():
            shutil.copytree("/usr/share/containers", host / "usr")
            shutil.copytree("/etc/containers", host / "etc")
            (host / "etc" / "containers.conf.d").mkdir(exist_ok=True)
            (host / "etc" / "containers.conf.d" / "lab.conf").write_text(_CONFIGURATION)
        script = 'mount --bind "$0/usr" /usr/share/containers && mount --bind "$0/etc" /etc/containers && exec "$@"'
        alone = ("unshare", "--mount", "sh", "-c", script, host)
        return self.lab.run(self.lab.host, *alone, *command, check=False, timeout_s=60)

    def run_on_host(self, host: Path, *options: str) -> int:
        """The exit code of a container that does nothing."""
        return self.on_host(host, *self._command, "run", "--rm", *options, "--rootfs", self.root, "true").returncode

    def run(self, name: str, *options: str, network: str = "podman", command: tuple[str, ...] = ("sleep", "300")) -> None:
        """A container that runs when this returns."""
        made = ("--name", name, "--pidfile", self.pid_file(name), "--network", network)
        self.podman("run", "--detach", *made, *options, "--rootfs", self.root, *command)

    def pid(self, name: str) -> str:
        return self.pid_file(name).read_text()

    def pid_file(self, name: str) -> Path:
        return self.root.parent / f"{name}.pid"

    def inside(self, name: str, *command: str) -> str:
        """A command in a running container; its output and errors. By nsenter, a tenth of what `podman exec` takes."""
        target = ("nsenter", "--target", self.pid(name), "--mount", "--net", "--pid")
        done = self.lab.run(self.lab.host, *target, *command, check=False, timeout_s=60)
        return done.stdout + done.stderr

    def connect(self, name: str, address: str, port: int = 443) -> str:
        """`connected`, or what nc says; at once when it is refused."""
        script = f"timeout 9 nc -w 8 {address} {port} </dev/null && echo connected"
        return self.inside(name, "sh", "-c", script).strip() or "timed out"

    def lookup(self, name: str, question: str, server: str) -> str:
        return self.inside(name, "nslookup", "-type=a", question, server)

    def shown(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.podman("inspect", name))[0]
        return shown

    def address(self, name: str) -> str:
        """As it is inside, which is what podman gave."""
        inside = ("nsenter", "--target", self.pid(name), "--net", "ip", "-j", "-4", "addr", "show", "scope", "global")
        return str(json.loads(self.lab.run(self.lab.host, *inside).stdout)[0]["addr_info"][0]["local"])

    # --- its API ---------------------------------------------------------------------------------------------------------

    def start_service(self) -> None:
        """It listens when this returns; one that runs is left alone."""
        if self._service is not None:
            return
        with self._log.open("a") as log:
            self._service = self.lab.start(
                self.lab.host,
                *self._hooked,
                *("system", "service", "--time", "0", f"unix://{self.socket}"),
                stdout=log,
                environment={"CONTAINERS_CONF": str(self._configuration)},
            )
        deadline = time.monotonic() + READY_S_MAX
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.socket))
                return
            if time.monotonic() > deadline or self._service.poll() is not None:
                raise LabError(f"podman's service never listened:\n{self._log.read_text()}")
            time.sleep(0.02)

    def stop_service(self) -> None:
        """As by a crash: containers go on."""
        service, self._service = self._service, None
        if service is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(service.pid, signal.SIGKILL)
            service.wait(timeout=10)
            self.socket.unlink(missing_ok=True)
