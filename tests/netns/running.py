"""A real agent in a lab's host namespace, started by its command and asked through its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from agent.control import ControlError
from agent.control.client import Control
from agent.core.types import Address, Prefix
from agent.holder import close_all, path_beside, receive, send
from tests.netns.lab import NAME_SERVERS, Lab

# The first start on a machine compiles the datapath; a busy one takes its time.
READY_S_MAX = 90.0
# Of the kinds of drops that a test made.
EXPLAINED_MAX = 6
BY_RULES = ("policy", "deny")


class AgentFailed(Exception):
    """The agent ended or did not become ready; the text is its log."""


class RunningAgent:
    """The agent with one policy file. Use as a context manager.

    policy: text of the policy file. sections: more of the configuration, merged over the defaults of a test (the name server of
    the lab is the upstream; every client of the lab is an endpoint with the label `app: e1`, `app: e2`, …). is_talkative: it
    logs every question.
    """

    def __init__(
        self,
        lab: Lab,
        policy: str,
        directory: Path,
        *,
        wait_for: str = "enforcing",
        is_talkative: bool = True,
        **sections: Mapping[str, Any] | Sequence[Any],
    ) -> None:
        self.lab = lab
        self._wait_for = wait_for
        self._options = ["--debug"] if is_talkative else []
        self.directory = directory
        self.policy_file = directory / "policy.yaml"
        self.configuration = directory / "namegate.yaml"
        self.trace = directory / "writes.jsonl"
        self.log = directory / "agent.log"
        self.pins = Path("/sys/fs/bpf") / lab.host
        self._control = Control(directory / "run" / "control.sock", patience=60)
        self._process: subprocess.Popen[str] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.policy_file.write_text(policy)
        config: dict[str, Any] = {
            "endpoints": [
                {"interface": client.endpoint, "labels": {"app": f"e{number}"}, "addresses": list(client.addresses)}
                for number, client in enumerate(lab.clients, 1)
            ],
            "policies": [str(self.policy_file)],
            "dns": {"upstreams": [NAME_SERVERS[0]], "history-file": str(directory / "history")},
            "control": {"socket": str(self._control.path)},
            "datapath": {"pin-directory": str(self.pins)},
            "testing": {"enabled": True, "trace": str(self.trace)},
        }
        for key, section in sections.items():
            config[key] = {**config[key], **section} if isinstance(section, Mapping) and key in config else section
        self.configuration.write_text(yaml.safe_dump(config))

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            try:
                if error is None:
                    self._explain_drops()
            finally:
                self.end(signal.SIGTERM)
            if error is not None and hasattr(error, "add_note"):
                error.add_note(f"the agent's log:\n{self.log.read_text()[-1500:]}")
        finally:
            self.cleanup()

    def _explain_drops(self) -> None:
        """What a test had dropped resolves to a rule, or to "no rule", never to nothing: a few of each kind are asked about."""
        try:
            drops: list[dict[str, Any]] = self.ask("drops")
        except ControlError:
            return  # the test has ended the agent, or left it as it cannot answer
        kinds = {(drop["reason"], drop["direction"], drop["protocol"]): drop for drop in drops}
        for drop in list(kinds.values())[-EXPLAINED_MAX:]:
            said = self.ask("explain", drop=drop)
            assert said["then"]["rule"], f"nothing is said of the drop {drop}"
            assert said["now"] is None or said["now"]["rule"] or said["now"]["reason"] not in BY_RULES, said

    def cleanup(self) -> None:
        """By the command, which also ends the holder."""
        self.lab.run(self.lab.host, sys.executable, "-m", "agent", "cleanup", "-c", self.configuration)

    def start(self) -> None:
        """Start it and wait until it enforces (or for another state, if that is what the test is about)."""
        self.begin()
        self.await_status(lambda status: status["state"] == self._wait_for)

    def begin(self) -> None:
        """Start it and wait for nothing."""
        with self.log.open("a") as log:
            self._process = self.lab.start(
                self.lab.host, sys.executable, "-m", "agent", "agent", "-c", self.configuration, *self._options, stdout=log
            )

    def end(self, how: signal.Signals, *, is_group: bool = False) -> int | None:
        """Send a signal, to its whole process group too, and wait for the end; gives back the exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            if is_group:
                os.killpg(process.pid, how)
            process.send_signal(how)
        try:
            return process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)
            raise AgentFailed(f"it did not end by {how.name}:\n{self.log.read_text()}") from None

    def resident_octets(self) -> int:
        """What it holds in memory."""
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def holder(self) -> int:
        """The process id of the holder; OSError when there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(5)
            connection.connect(str(path_beside(self._control.path)))
            send(connection, {"command": "take"})
            answer, kept = receive(connection)
        close_all(kept)
        return int(str(answer["pid"]))

    # --- asking ----------------------------------------------------------------------------------------------------------

    def ask(self, command: str, **arguments: object) -> Any:
        return self._control.ask(command, **arguments)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.ask("status")
        return status

    def await_status(self, wanted: Callable[[dict[str, Any]], bool], within_s: float = READY_S_MAX) -> dict[str, Any]:
        """Ask until the status is as wanted."""
        deadline = time.monotonic() + within_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(ControlError):
                status = self.status()
                if wanted(status):
                    return status
            if self._process is not None and self._process.poll() is not None:
                raise AgentFailed(f"it ended with {self._process.returncode}:\n{self.log.read_text()}")
            time.sleep(0.02)
        raise AgentFailed(f"the status never was as wanted, but {status}\n{self.log.read_text()}")

    def apply(self, policy: str, *, within_s: float = 30) -> dict[str, Any]:
        """Change the policy file and put it in force."""
        self.policy_file.write_text(policy)
        applied: dict[str, Any] = self.ask("apply", wait=True, timeout=within_s)
        return applied

    def inject(self, **faults: object) -> None:
        self.ask("inject", **faults)

    def acknowledged_at_ns(self) -> dict[Address, int]:
        """For each learned address, when the kernel had said yes to its row; CLOCK_REALTIME, as in the captures."""
        self.inject()  # flushes the record
        acknowledged: dict[Address, int] = {}
        for line in self.trace.read_text().splitlines():
            write = json.loads(line)
            if write["table"] == "ipcache" and write["put"] and write["errno"] == 0:
                prefix = Prefix.parse(write["key"])
                if prefix.is_address:
                    acknowledged.setdefault(prefix.address, write["at_ns"])
        return acknowledged
