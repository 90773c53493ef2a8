"""`attach` and `detach` as functions of their environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import oci_hook
from agent.cli.environment import DEFAULT_CONTROL
from agent.control import ControlError
from agent.core.types import packed
from agent.host.hook_directories import said_by, to_write
from agent.host.peers import Behind, NotPoliced, Peer
from tests.unit.test_cli import FakeAgent, call

POLICED: dict[str, object] = {"endpoint": 7, "interface": "veth0"}
TWO = Behind((Peer(7, "veth0", "eth0", (packed("10.0.0.2"),)), Peer(9, "veth1", "eth1", (packed("2001:db8::2"),))), ())


def behind(found: Behind | NotPoliced) -> Callable[[int | str], Behind]:
    def look(_namespace: int | str) -> Behind:
        if isinstance(found, NotPoliced):
            raise found
        return found

    return look


def test_what_is_said_is_what_is_asked() -> None:
    """Only what was said: the agent has the defaults. Its warnings go to standard error."""
    agent = FakeAgent(attach={**POLICED, "warnings": ["no policy closes it"]})
    options = ("--label", "app=web", "--label", "tier=", "--address", "10.0.0.2", "--audit", "--learn", "per-endpoint")
    result = call("attach", "veth0", *options, "--denied", "drop", "--dhcp", agent=agent)
    assert (result.exit_code, result.stdout) == (0, "veth0 is policed\n")
    assert result.stderr == "warning: no policy closes it\n"
    said = {"labels": {"app": "web", "tier": ""}, "audit": True, "learn": "per-endpoint", "denied": "drop", "dhcp": True}
    assert agent.asked == [("attach", {"interface": "veth0", "addresses": ["10.0.0.2"], **said})]


def test_what_no_policy_closes_is_not_said_to_be_policed() -> None:
    agent = FakeAgent(attach={**POLICED, "open": ["veth0"]})
    result = call("attach", "veth0", agent=agent)
    assert (result.exit_code, result.stdout) == (0, "veth0 is attached, and open\n")
    assert result.stderr == "warning: no policy closes veth0: what it sends is not enforced\n"


@pytest.mark.parametrize(
    "arguments", [("--control", "/run/x.sock", "attach", "veth0"), ("attach", "veth0", "--control", "/run/x.sock")]
)
def test_the_control_socket_is_said_before_or_behind(arguments: tuple[str, ...]) -> None:
    agent = FakeAgent(attach=POLICED)
    assert call(*arguments, agent=agent).exit_code == 0
    assert [path for path, _ in agent.reached] == [Path("/run/x.sock")]


@pytest.mark.parametrize(
    ("engine", "path"),
    [(None, None), ("podman", "/run/podman/podman.sock"), ("docker", "/run/docker.sock"), ("/run/x.sock", "/run/x.sock")],
)
def test_a_container_is_the_agents_to_find(engine: str | None, path: str | None) -> None:
    """Each of its interfaces is named in the answer."""
    agent = FakeAgent(attach={"container": "web", "interfaces": ["veth0", "veth1"], "warnings": []})
    options = ("--engine", engine) if engine else ()
    result = call("attach", "--container", "web", *options, agent=agent)
    assert (result.exit_code, result.stdout) == (0, "veth0 is policed\nveth1 is policed\n")
    ((_, arguments),) = agent.asked
    assert (arguments["container"], arguments.get("engine")) == ("web", path)


def test_all_interfaces_of_a_namespace_or_none() -> None:
    """With the addresses seen inside; one that is refused lets the others go."""
    agent = FakeAgent(attach=POLICED)
    assert call("attach", "--pid", "1", agent=agent, behind=behind(TWO)).exit_code == 0
    asked = [(arguments["interface"], arguments["addresses"]) for _, arguments in agent.asked]
    assert asked == [("veth0", ["10.0.0.2"]), ("veth1", ["2001:db8::2"])]

    class Second(FakeAgent):
        first = POLICED

        def ask(self, command: str, /, **arguments: object) -> object:
            super().ask(command, **arguments)
            if arguments["interface"] == "veth1":
                raise ControlError("veth1 is not enforced", 1)
            return self.first

    agent = Second(attach=POLICED, detach={})
    result = call("attach", "--netns", "blue", agent=agent, behind=behind(TWO))
    assert (result.exit_code, result.stderr) == (1, "veth1 is not enforced\n")
    assert [(command, arguments["interface"]) for command, arguments in agent.asked] == [
        ("attach", "veth0"),
        ("attach", "veth1"),
        ("detach", "veth0"),
    ]
    agent = Second(attach=POLICED, detach={})
    agent.first = {**POLICED, "was_endpoint": True}
    assert call("attach", "--netns", "blue", agent=agent, behind=behind(TWO)).exit_code == 1
    assert [command for command, _ in agent.asked] == ["attach", "attach"], "what was an endpoint before stays one"
    assert call("attach", "--pid", "1", "--address", "10.0.0.3", behind=behind(TWO)).exit_code == 2


def test_what_is_policed_nowhere_is_said() -> None:
    """All of it: exit code 1. A part of it: a warning."""
    result = call("attach", "--netns", "blue", behind=behind(NotPoliced("it has no interface but lo")))
    assert (result.exit_code, result.stderr) == (
        1,
        "network namespace blue cannot be policed: it has no interface but lo\n",
    )
    result = call("attach", "--pid", "7", agent=FakeAgent(attach=POLICED), behind=behind(Behind(TWO.peers[:1], ("mac0!",))))
    assert (result.exit_code, result.stderr) == (0, "warning: mac0!\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "attach",
        "attach veth0 --pid 1",
        "attach --netns a --container b",
        "attach veth0 --engine podman",
        "attach veth0 --all",
        "attach --hook --address 10.0.0.2",
        "attach veth0 --label app",
        "attach veth0 --label app=a:b",
        "attach --pid 0",
        "detach",
        "detach veth0 --hook",
    ],
)
def test_a_wrong_use_is_exit_code_2(arguments: str) -> None:
    """And nothing is asked of the agent."""
    agent = FakeAgent(attach=POLICED, detach={})
    assert (call(*arguments.split(), agent=agent).exit_code, agent.asked) == (2, [])


def test_a_container_is_detached_by_its_name() -> None:
    agent = FakeAgent(detach={"container": "web"})
    result = call("detach", "--container", "web", agent=agent)
    assert (result.exit_code, result.stdout) == (0, "container web is no longer policed\n")
    assert (agent.asked, agent.reached[0][0]) == ([("detach", {"container": "web"})], DEFAULT_CONTROL)


def test_a_namespace_is_detached_by_its_interfaces(tmp_path: Path) -> None:
    """Of an agent that does not run, too."""
    released: list[str] = []

    def release(_config: object, interface: str) -> bool:
        released.append(interface)
        return True

    control = ("--control", str(tmp_path / "control.sock"))
    result = call(*control, "detach", "--netns", "blue", behind=behind(TWO), release=release)
    assert (result.exit_code, released) == (0, ["veth0", "veth1"]), result.stderr


@pytest.mark.parametrize(
    ("shown", "read"),
    [
        ("(default [/usr/share/containers/oci/hooks.d])", ["/usr/share/containers/oci/hooks.d"]),
        ("(default [/a,/etc/b])", ["/a", "/etc/b"]),
        ("", ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]),
    ],
)
def test_podmans_help_says_where_it_reads_hooks(shown: str, read: list[str]) -> None:
    """Lines of podman 4.3.1, without `hooks_dir` in a containers.conf, with one, and with an empty one."""
    option = f"      --hooks-dir strings           Set the OCI hooks directory path (may be set multiple times) {shown}"
    text = f'      --help   Help for podman\n{option}\n      --log-level string   Log messages (default "warn")\n'
    assert said_by(text) == tuple(map(Path, read))
    assert said_by("Error: unknown") is None


def test_the_hook_is_written_outside_usr_where_podman_reads_there() -> None:
    default, ours, other = Path("/usr/share/containers/oci/hooks.d"), Path("/etc/a"), Path("/opt/b")
    assert to_write((default,)) == default
    assert to_write((default, ours, other)) == ours


def test_the_hook_is_a_file_that_podman_reads(tmp_path: Path) -> None:
    """What it runs is this Python with this code; it is there whole or not at all, and goes again."""
    hooks = ("--hooks-dir", str(tmp_path / "oci" / "hooks.d"))
    result = call("--control", "/run/x.sock", "attach", "--hook", *hooks, "--label", "by=hook", "--denied", "drop")
    assert result.exit_code == 0, result.stderr
    (file,) = (tmp_path / "oci" / "hooks.d").iterdir()
    written = json.loads(file.read_text())
    assert written["stages"] == ["createRuntime"]
    assert written["when"] == {"annotations": {"^namegate[.]": ".*"}}
    assert written["hook"]["path"] == sys.executable
    assert written["hook"]["args"][:3] == [sys.executable, "-I", oci_hook.__file__]
    settings = json.loads(written["hook"]["args"][3])
    assert settings == {"control": "/run/x.sock", "labels": {"by": "hook"}, "denied": "drop"}
    call("attach", "--hook", "--all", *hooks)
    assert json.loads(file.read_text())["when"] == {"always": True}
    assert call("detach", "--hook", *hooks).exit_code == 0
    assert not file.exists()
    assert call("detach", "--hook", *hooks).exit_code == 1
    docker = call("attach", "--hook", "--engine", "docker", *hooks)
    assert (docker.exit_code, "Docker reads no hooks.d" in docker.stderr, file.exists()) == (1, True, False)
