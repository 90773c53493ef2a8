"""The OCI hook: a container's interfaces are policed before its first instruction, or it does not start.

Run by the container's runtime at `createRuntime` (OCI runtime specification, config.md, "POSIX-platform Hooks"), in the
runtime's namespaces: the container's are made, its network is set up, and its process waits. The state comes on standard input,
the settings that `namegate attach --hook` wrote on the command line; both are JSON.

Rule 1: it ends with 0 only when the agent says that its programs are on every interface of the container, or when the container
has no network at all. Else with 1, and the container does not start.
Rule 2: it asks no engine. The engine waits for us, with the container's lock held.

Rule 3: why it does not start is said where a person finds it. runc shows what we write, crun only that a hook failed: the
sentence is also in the agent's log, or where no agent listens, in the system's (syslog(3)).

Labels: those of the annotations `namegate.label.KEY` (`podman run --annotation namegate.label.app=web`), because the runtime is
not told the container's labels; then those said when the hook was installed, which win. An agent that also follows the engine
adds the labels it sees there; these here hold.

It is started for each container with `python -I`, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import sys
import syslog
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from agent.control import ControlError
from agent.control.client import Control
from agent.core.types import text_of
from agent.host.peers import CAP_NET_ADMIN, NotPoliced, behind_process

ANNOTATIONS: Final = "namegate."
LABEL_ANNOTATION: Final = "namegate.label."

# The agent answers in some milliseconds; one that starts just now, in a second or two. The runtime waits as long as we do.
_PATIENCE_S: Final = 10.0
# One that has just not answered in that time is not waited for again.
_TELL_S_MAX: Final = 1.0


class Unprotected(Exception):
    """The container must not start; the text says why."""


def run(settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """settings: `control`, the agent's socket, and what `attach` takes besides interface and addresses. state: the container's,
    as the OCI runtime specification has it. Raises Unprotected.
    """
    try:
        pid = int(state["pid"])
        capabilities = 1 << CAP_NET_ADMIN if _administers(state) else 0
        behind = behind_process(pid, capabilities)
    except NotPoliced as error:
        if error.is_harmless:
            return
        raise Unprotected(str(error)) from None
    if behind.unpoliced:
        raise Unprotected("; ".join(behind.unpoliced))
    said = {key: value for key, value in settings.items() if key != "control"}
    said["labels"] = {**_labels(state), **settings.get("labels", {})}
    control = Control(Path(settings["control"]), _PATIENCE_S)
    try:
        for peer in behind.peers:
            addresses = [text_of(address) for address in peer.addresses]
            control.ask(
                "attach", interface=peer.interface, addresses=addresses, hook=True, warnings=list(behind.warnings), **said
            )
    except ControlError as error:
        raise Unprotected(error.sentence) from None
    for warning in behind.warnings:
        print(f"namegate: warning: {warning}", file=sys.stderr)


def _administers(state: Mapping[str, Any]) -> bool:
    """Will its root have CAP_NET_ADMIN? At this moment the process is still the runtime's, and has all."""
    process = json.loads(Path(state["bundle"], "config.json").read_bytes()).get("process") or {}
    return "CAP_NET_ADMIN" in ((process.get("capabilities") or {}).get("bounding") or ())


def _labels(state: Mapping[str, Any]) -> dict[str, str]:
    """Of the annotations, which a runtime repeats in the state; the bundle has them in any case."""
    annotations = state.get("annotations")
    if annotations is None:
        annotations = json.loads(Path(state["bundle"], "config.json").read_bytes()).get("annotations") or {}
    return {key.removeprefix(LABEL_ANNOTATION): value for key, value in annotations.items() if key.startswith(LABEL_ANNOTATION)}


def main(arguments: list[str], given: IO[str]) -> int:
    settings: Any = None
    state: Any = None
    try:
        settings = json.loads(arguments[0])
        state = json.load(given)
        run(settings, state)
    except Unprotected as error:
        _say(str(error), settings, state)
        return 1
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        _say(f"the hook was called in a way it does not know ({error!r})", settings, state)
        return 1
    return 0


def _say(why: str, settings: Any, state: Any) -> None:
    """To whoever listens: the runtime, and the agent or the system's log."""
    print(f"namegate: the container is not started: {why}", file=sys.stderr)
    name = str(state["id"]) if isinstance(state, dict) and "id" in state else "without an id"
    with contextlib.suppress(ControlError, KeyError, TypeError):
        Control(Path(settings["control"]), _TELL_S_MAX).ask("not-started", container=name, why=why)
        return
    syslog.openlog("namegate", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, f"container {name} is not started: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin))
