"""What the commands need from outside, in one object, so that a test hands them another world and starts no process.

Errors of the command line are one sentence on standard error. Exit codes: 0 good; 1 the answer is no; 2 used wrongly, or the
environment lacks something.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from agent.config import Config
    from agent.control.client import Feed
    from agent.host.doctor import Condition
    from agent.host.peers import Behind

DEFAULT_CONTROL = Path("/run/namegate/control.sock")


class Asks(Protocol):
    def ask(self, command: str, /, **arguments: object) -> object: ...


def _connect(path: Path, patience: float) -> Asks:
    from agent.control.client import Control

    return Control(path, patience)


def _listen(path: Path, kinds: Sequence[str], endpoint: int | None) -> Feed:
    from agent.control.client import Control

    return Control(path).listen("facts", kinds=kinds, endpoint=endpoint)


def _is_root() -> bool:
    return os.geteuid() == 0


def _run(config: Config, is_for_runs: bool) -> int:
    from agent.start import run

    return run(config, is_for_runs=is_for_runs)


def _clean(config: Config) -> list[str]:
    from agent.datapath.datapath import Settings, cleanup
    from agent.datapath.errors import DatapathError
    from agent.holder.client import dismiss

    try:
        interfaces = cleanup(Settings(**asdict(config.datapath)))
        config.control.socket.with_name("attachments").unlink(missing_ok=True)
        dismiss(config.control.socket)
        return interfaces
    except DatapathError as error:
        raise Sentence(error.sentence) from None


def _release(config: Config, interface: str) -> bool:
    from agent.attachments import Attachments
    from agent.datapath.datapath import Settings, release
    from agent.datapath.errors import DatapathError

    # First: what is let go must not be attached again by the next start.
    attachments = Attachments(config.control.socket.with_name("attachments"), config.datapath.device)
    with contextlib.suppress(OSError):
        attachments.remove([socket.if_nametoindex(interface)])
    try:
        return release(Settings(**asdict(config.datapath)), interface)
    except DatapathError as error:
        raise Sentence(error.sentence) from None


def _examine(config: Config) -> list[Condition]:
    from agent.host.doctor import examine

    return examine(config)


def _behind(namespace: int | str) -> Behind:
    from agent.host.peers import behind_name, behind_process

    return behind_process(namespace) if isinstance(namespace, int) else behind_name(namespace)


def _hold(control: Path, is_detached: bool) -> int:
    from agent.holder.process import run

    return run(control, is_detached=is_detached)


@dataclass(frozen=True, slots=True)
class Environment:
    """connect: socket path and patience in seconds to something that can be asked. listen: there, to facts of these kinds
    (none: all) about this endpoint (None: all). run: the daemon with this configuration, until it ends, to its exit code; true:
    the one that only serves runs. clean: take everything out of the kernel that an agent with this configuration leaves there,
    end its holder, and name the interfaces that were policed. release: take its programs off one interface; were there any?
    hold: be the holder at this path until it is told to leave, or let a child be it. examine: what of this host stands in the
    way of an agent with this configuration. behind: what leads into the network namespace of a process, or of this name; raises
    NotPoliced.
    """

    connect: Callable[[Path, float], Asks] = _connect
    listen: Callable[[Path, Sequence[str], int | None], Feed] = _listen
    is_root: Callable[[], bool] = _is_root
    run: Callable[[Config, bool], int] = _run
    clean: Callable[[Config], list[str]] = _clean
    release: Callable[[Config, str], bool] = _release
    hold: Callable[[Path, bool], int] = _hold
    examine: Callable[[Config], list[Condition]] = _examine
    behind: Callable[[int | str], Behind] = _behind


@dataclass(slots=True)
class Session:
    """One call of the command line: its environment and the options that stand before the command."""

    environment: Environment
    control: Path = DEFAULT_CONTROL
    debug: bool = False

    def ask(self, command: str, /, *, patience: float = 10.0, **arguments: object) -> object:
        return self.environment.connect(self.control, patience).ask(command, **arguments)

    def listen(self, kinds: Sequence[str] = (), endpoint: int | None = None) -> Feed:
        return self.environment.listen(self.control, kinds, endpoint)

    def require_root(self, command: str, why: str) -> None:
        if not self.environment.is_root():
            raise Sentence(f"namegate {command} needs root: {why}; run it with sudo")


class Sentence(click.ClickException):
    """The end of a command that did not work: what is wrong and what to do, and no traceback."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=file is None)


class Refusal(Sentence):
    """The command was understood, and the answer is no."""

    exit_code = 1


def with_examples(*examples: str) -> str:
    """An epilog that click does not fill into a paragraph."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
