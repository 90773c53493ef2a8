"""`attach` and `detach`: what is policed besides the configuration's endpoints."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from agent.cli.change import configuration
from agent.cli.environment import Refusal, Sentence, Session, with_examples
from agent.control import ControlError

if TYPE_CHECKING:
    from agent.host.peers import Behind

# Longer than the hook's own patience with the agent: its sentence is the better one.
_HOOK_TIMEOUT_S: Final = 20
# An agent that starts, or compiles, answers when it is done.
_PATIENCE_S: Final = 60.0

_ENGINES: Final = {"podman": "/run/podman/podman.sock", "docker": "/run/docker.sock"}


class _Target(NamedTuple):
    """What a command is about: exactly one is said."""

    interface: str | None
    container: str | None
    netns: str | None
    pid: int | None
    hook: bool


def _ask_there(context: click.Context, _parameter: click.Parameter, control: Path | None) -> None:
    if control is not None:
        context.obj.control = control


def _targets(command: Any) -> Any:
    for option in (
        click.option(
            "--control",
            type=click.Path(path_type=Path),
            metavar="PATH",
            expose_value=False,
            callback=_ask_there,
            help="The agent's control socket, here or before the command.",
        ),
        click.option("--hook", is_flag=True, help="Each container that podman starts, before its first instruction."),
        click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="The network namespace of a process."),
        click.option("--netns", metavar="NAME", help="A network namespace of `ip netns`."),
        click.option("--container", metavar="NAME", help="A container, and whichever has its name later."),
        click.argument("interface", required=False),
    ):
        command = option(command)
    return command


_hooks_directory = click.option(
    "--hooks-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --hook: else where podman reads by its configuration.",
)


@click.command(
    short_help="Police an interface, a container, a namespace.",
    epilog=with_examples(
        "sudo namegate attach ve-build --label app=build",
        "sudo namegate attach --container web --label app=web",
        "sudo namegate attach --netns blue --label app=blue --audit",
        "sudo namegate attach --pid $(machinectl show -p Leader --value build)",
        "sudo namegate attach --hook",
    ),
)
@_targets
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="By which policies select it.")
@click.option("--address", "addresses", multiple=True, metavar="ADDRESS", help="What it may send from; else it is found out.")
@click.option("--audit", is_flag=True, help="Let everything pass, and report what would have been dropped.")
@click.option("--learn", type=click.Choice(("shared", "per-endpoint")), help="For whom its answers open addresses.")
@click.option("--denied", type=click.Choice(("answer", "drop")), help="How a denied packet is refused.")
@click.option("--dhcp", is_flag=True, help="Let it ask for an address.")
@click.option("--engine", metavar="SOCKET", help="Of the container: podman, docker or a path; else the first that is there.")
@click.option("--all", "is_for_all", is_flag=True, help="With --hook: also containers without a `namegate.` annotation.")
@_hooks_directory
@click.pass_obj
def attach(
    session: Session,
    interface: str | None,
    container: str | None,
    netns: str | None,
    pid: int | None,
    hook: bool,
    labels: tuple[str, ...],
    addresses: tuple[str, ...],
    audit: bool,
    learn: str | None,
    denied: str | None,
    dhcp: bool,
    engine: str | None,
    is_for_all: bool,
    hooks_dir: Path | None,
) -> None:
    """Police an interface, a container, or what leads into a network namespace, besides the configuration's endpoints.

    It is policed when this command ends, until `namegate detach`, or until the interface goes; a container whenever it runs.
    What cannot be policed is refused with a sentence that says why, exit code 1.
    """
    session.require_root("attach", "it asks the agent through a socket for root")
    target = _one_of(interface, container, netns, pid, hook)
    if engine is not None and not (container or hook):
        raise click.UsageError("--engine says where a --container is")
    if is_for_all and not hook:
        raise click.UsageError("--all goes with --hook")
    said: dict[str, object] = {
        "labels": _labels(labels),
        "audit": audit or None,
        "learn": learn,
        "denied": denied,
        "dhcp": dhcp or None,
    }
    said = {key: value for key, value in said.items() if value is not None}
    if target.hook:
        if addresses:
            raise click.UsageError("--address is one interface's: each container has its own")
        _install(hooks_dir, session.control, said, engine, is_for_all=is_for_all)
    elif target.container:
        if engine is not None:
            said["engine"] = _ENGINES.get(engine, str(Path(engine).absolute()))
        answer = session.ask("attach", patience=_PATIENCE_S, container=target.container, addresses=list(addresses), **said)
        _tell(answer)
    elif target.interface:
        _tell(session.ask("attach", patience=_PATIENCE_S, interface=target.interface, addresses=list(addresses), **said))
    else:
        _attach_behind(session, _behind(session, target), addresses, said)


def _attach_behind(session: Session, behind: Behind, addresses: tuple[str, ...], said: Mapping[str, object]) -> None:
    """All of its interfaces, or none."""
    from agent.core.types import text_of

    if addresses and len(behind.peers) > 1:
        interfaces = ", ".join(peer.interface for peer in behind.peers)
        raise Sentence(f"--address is one interface's, and there are several: attach {interfaces} one by one")
    done: list[str] = []
    try:
        for peer in behind.peers:
            its = list(addresses) or [text_of(address) for address in peer.addresses]
            answer = session.ask("attach", patience=_PATIENCE_S, interface=peer.interface, addresses=its, **said)
            _tell(answer)
            if isinstance(answer, dict) and not answer.get("was_endpoint"):
                done.append(peer.interface)
    except ControlError:
        for name in done:
            session.ask("detach", interface=name)
        raise
    for sentence in behind.unpoliced + behind.warnings:
        click.echo(f"warning: {sentence}", err=True)


def _tell(answer: object) -> None:
    if not isinstance(answer, dict):
        raise Sentence("the agent's answer to `attach` is not understood: is it of another release?")
    for warning in answer.get("warnings") or ():
        click.echo(f"warning: {warning}", err=True)
    unclosed = answer.get("open") or ()
    for interface in unclosed:
        click.echo(f"warning: no policy closes {interface}: what it sends is not enforced", err=True)
    for interface in answer.get("interfaces") or filter(None, [answer.get("interface")]):
        click.echo(f"{interface} is {'attached, and open' if interface in unclosed else 'policed'}")


@click.command(
    short_help="Let an interface, a container go: nothing enforces it any more.",
    epilog=with_examples(
        "sudo namegate detach veth-build",
        "sudo namegate detach veth-build -c /etc/namegate.yaml",
        "sudo namegate detach --container web",
        "sudo namegate detach --hook",
    ),
)
@_targets
@click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The agent's configuration; else its defaults.",
)
@_hooks_directory
@click.pass_obj
def detach(
    session: Session,
    interface: str | None,
    container: str | None,
    netns: str | None,
    pid: int | None,
    hook: bool,
    path: Path | None,
    hooks_dir: Path | None,
) -> None:
    """Take the programs off: what goes through the interface passes from then on.

    A running agent goes on with the others, says in `status` what was detached, and enforces it again when it is started anew.
    Of a stopped one the programs are taken off themselves. Exit code 1: it was not policed.
    """
    session.require_root("detach", "it removes BPF programs")
    target = _one_of(interface, container, netns, pid, hook)
    from agent.config import Config

    config = Config() if path is None else configuration(path)
    control = session.control if path is None else config.control.socket
    if target.hook:
        _uninstall(hooks_dir)
    elif target.container:
        session.environment.connect(control, _PATIENCE_S).ask("detach", container=target.container)
        click.echo(f"container {target.container} is no longer policed")
    elif target.interface:
        _release(session, config, control, target.interface)
    else:
        for peer in _behind(session, target).peers:
            _release(session, config, control, peer.interface)


def _release(session: Session, config: Any, control: Path, interface: str) -> None:
    from agent.control.lock import AgentLock

    lock = AgentLock(control)
    try:
        lock.acquire()
    except ControlError:
        session.environment.connect(control, 10.0).ask("detach", interface=interface)
    else:
        try:
            if not session.environment.release(config, interface):
                raise Refusal(f"{interface} was not policed")
        finally:
            lock.release()
    click.echo(f"{interface} is no longer policed")


def _one_of(interface: str | None, container: str | None, netns: str | None, pid: int | None, hook: bool) -> _Target:
    target = _Target(interface, container, netns, pid, hook)
    if sum(map(bool, target)) != 1:
        raise click.UsageError("say one of INTERFACE, --container, --netns, --pid and --hook")
    return target


def _behind(session: Session, target: _Target) -> Behind:
    from agent.host.peers import NotPoliced

    where = f"process {target.pid}" if target.pid else f"network namespace {target.netns}"
    try:
        return session.environment.behind(target.pid or str(target.netns))
    except NotPoliced as error:
        raise Refusal(f"{where} cannot be policed: {error}") from None


def _labels(texts: tuple[str, ...]) -> dict[str, str]:
    from agent.config import is_label

    labels = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not is_label(key, value):
            raise Sentence(
                f"--label: `{text}` is no label: write KEY=VALUE, of letters, digits, `-`, `_`, `.`, at most 63 each"
            )
        labels[key] = value
    return labels


# --- the OCI hook ----------------------------------------------------------------------------------------------------------


def _install(
    directory: Path | None, control: Path, said: Mapping[str, object], engine: str | None, *, is_for_all: bool
) -> None:
    from agent import oci_hook
    from agent.host.hook_directories import HOOK_FILE

    if engine not in (None, "podman"):
        raise Refusal(
            "hooks are podman's: Docker reads no hooks.d; name its containers in the configuration (`containers:`) "
            "or with --container, and they are policed a moment after their start"
        )
    directory, others, warning = _place(directory)
    settings = json.dumps({"control": str(control.absolute()), **said})
    content = {
        "version": "1.0.0",
        "hook": {
            "path": sys.executable,
            # By the first one Python finds the environment that it belongs to.
            "args": [sys.executable, "-I", oci_hook.__file__, settings],
            "timeout": _HOOK_TIMEOUT_S,
        },
        "when": {"always": True} if is_for_all else {"annotations": {f"^{oci_hook.ANNOTATIONS.replace('.', '[.]')}": ".*"}},
        "stages": ["createRuntime"],
    }
    path = directory / HOOK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(path)
    except OSError as error:
        raise Sentence(f"{path} cannot be written: {error.strerror}") from None
    for other in others:
        if other != path:
            _remove(other)
    which = "every container" if is_for_all else f"a container with an annotation `{oci_hook.ANNOTATIONS}…`"
    if warning:
        click.echo(f"warning: {warning}", err=True)
        click.echo(f"{path} is written: where it is read, {which} is policed before its first instruction, or does not start")
    else:
        click.echo(
            f"{path}, which podman reads: {which} that is started from now on is policed before its first instruction, "
            "or does not start"
        )


def _place(said: Path | None) -> tuple[Path, list[Path], str]:
    """The directory to write in, files of ours that would say something else there, and a warning. Without a directory that is
    known to be read nothing is written: everybody would think that containers are policed.
    """
    from agent.host.hook_directories import Unknown, directories_read, installed, known, to_write

    try:
        read = directories_read()
    except Unknown as error:
        if said is None:
            raise Refusal(f"{error}: name the directory from which hooks are read with --hooks-dir") from None
        return said, [], f"{error}: whether anybody reads {said} is not known"
    if said is None:
        return to_write(read), installed(known(read)), ""
    if said.absolute() in read:
        return said, [], ""
    return said, [], f"podman reads no hooks from {said} unless it is told to (`podman --hooks-dir`), but from {_listed(read)}"


def _listed(directories: Iterable[Path]) -> str:
    return " and ".join(map(str, directories))


def _uninstall(directory: Path | None) -> None:
    """Wherever it is, unless it is said where."""
    from agent.host.hook_directories import HOOK_FILE, Unknown, directories_read, installed, known

    looked = known() if directory is None else (directory,)
    if directory is None:
        with contextlib.suppress(Unknown):
            looked = known(directories_read())
    found = installed(looked)
    if not found:
        raise Refusal(f"there is no hook: {HOOK_FILE} is not in {_listed(looked)}")
    for path in found:
        _remove(path)
        click.echo(f"{path} is removed: containers that run stay policed, new ones are not")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise Sentence(f"{path} cannot be removed: {error.strerror}") from None
