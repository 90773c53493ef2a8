"""The command line as a function of its environment: no agent, no root, no process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from agent.cli import main
from agent.cli.environment import DEFAULT_CONTROL, Environment
from agent.config import Config
from agent.control import ControlError
from agent.control.lock import AgentLock
from agent.control.server import ControlServer

NOUNS = ("endpoints", "names", "patterns", "selectors", "identities", "ipcache", "policy-map", "drops")

ROWS: dict[str, dict[str, object]] = {
    "endpoints": {
        "endpoint": 4095, "interface": "veth-build-long", "state": "attaching", "group": 12, "set": 1234, "scope": 4097,
        "labels": {"app": "build", "example.org/tier": "front"}, "addresses": ["192.0.2.1", "2001:db8::1"],
        "default_deny": ["egress", "ingress"],
    },
    "names": {
        "name": "a-rather-long-name.of-some-service.example.com.", "address": "2001:db8:1234:5678:9abc:def0:1234:5678",
        "scope": "shared", "expires_in": 59.6, "selectors": ["*.of-some-service.example.com.", "**.example.com."],
    },
    "patterns": {
        "endpoint": 4095, "interface": "veth-build-long", "pattern": "**.of-some-service.example.com.", "names": 1234567,
        "in_this_minute": 8192, "most_in_a_minute": 8192, "refused": 123,
    },
    "selectors": {
        "selector": "fqdn:**.of-some-service.example.com.", "scope": "shared", "addresses": ["192.0.2.1", "192.0.2.2"],
        "identities": [16777216], "users": 3,
    },
    "identities": {
        "identity": 16777216, "labels": ["cidr:192.0.2.0/24", "fqdn:*.example.com.", "reserved:world"], "rows": 1000,
    },
    "ipcache": {
        "scope": "shared", "prefix": "2001:db8:1234:5678:9abc:def0:1234:5678/128", "identity": 16777216, "revision": 123,
        "realized": True, "labels": ["fqdn:a.example.com.", "reserved:world"],
    },
    "policy-map": {
        "set": 12, "direction": "egress", "identity": 16777216, "protocol": "icmpv6", "port": "60000-65535",
        "verdict": "redirect", "rule": "/etc/namegate/policies/production/build.yaml:1234",
    },
    "drops": {
        "time": "2026-02-03T04:05:06.789012Z", "endpoint": 4095, "reason": "no policy row", "direction": "egress",
        "protocol": "icmpv6", "source": "192.0.2.1", "destination": "2001:db8:1:2::3", "port": 65535, "identity": 2,
        "rule": None, "names": ["a-rather-long-name.example.com."],
    },
}  # fmt: skip

STATUS: dict[str, object] = {
    "state": "enforcing",
    "reasons": [],
    "endpoints": 3,
    "rows_pending": 0,
    "rows_failed": [],
    "held": 0,
}


class FakeAgent:
    """Answers what it is told to, and remembers how it was asked."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.reached: list[tuple[Path, float]] = []

    def connect(self, path: Path, patience: float) -> FakeAgent:
        self.reached.append((path, patience))
        return self

    def ask(self, command: str, /, **arguments: object) -> object:
        self.asked.append((command, arguments))
        answer = self.answers[command.replace("-", "_")]
        if isinstance(answer, Exception):
            raise answer
        return answer


def call(*arguments: str, agent: FakeAgent | None = None, root: bool = True, **parts: Callable[..., object]) -> Result:
    """One call of the command line in a world of its own."""
    environment = Environment(connect=(agent or FakeAgent()).connect, is_root=lambda: root, **parts)  # type: ignore[arg-type]
    return CliRunner(env={"COLUMNS": None, "NAMEGATE_CONTROL": None}).invoke(main, arguments, obj=environment)


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A good one, whose control socket is in a directory of the test."""
    path = tmp_path / "namegate.yaml"
    path.write_text(
        "endpoints: [{interface: veth0}]\npolicies: []\ndns: {upstreams: [192.0.2.53]}\ncontrol: {socket: run/c.sock}\n",
        encoding="utf-8",
    )
    return path


# --- nouns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noun", NOUNS)
def test_tables_fit_eighty_columns(noun: str) -> None:
    """With the longest values there are; a heading and a line for each row."""
    environment = Environment(FakeAgent(**{noun.replace("-", "_"): [ROWS[noun], ROWS[noun]]}).connect, is_root=lambda: True)
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, [noun], obj=environment)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert lines[0].isupper()


@pytest.mark.parametrize("noun", NOUNS)
def test_json_and_yaml_are_the_same_data_uncut(noun: str) -> None:
    """Every key and element, whatever the table shows of it."""
    agent = FakeAgent(**{noun.replace("-", "_"): [ROWS[noun]]})
    assert json.loads(call(noun, "-o", "json", agent=agent).stdout) == [ROWS[noun]]
    assert yaml.safe_load(call(noun, "-o", "yaml", agent=agent).stdout) == [ROWS[noun]]
    assert agent.asked == [(noun, {})] * 2


@pytest.mark.parametrize(("output", "text"), [("json", "[]\n"), ("yaml", "[]\n")])
def test_nothing_is_an_empty_list(output: str, text: str) -> None:
    """Scripts need no special case."""
    assert call("names", "-o", output, agent=FakeAgent(names=[])).stdout == text


def test_an_empty_table_has_its_heading() -> None:
    """So that one sees what there is none of."""
    assert call("identities", agent=FakeAgent(identities=[])).stdout == "IDENTITY  ROWS  LABELS\n"


def test_the_names_table() -> None:
    """Numbers to the right, seconds in whole, lists joined."""
    rows = [{"name": "a.test.", "address": "192.0.2.1", "scope": 1, "expires_in": 59.6, "selectors": ["a.test.", "*.test."]}]
    assert call("names", agent=FakeAgent(names=rows)).stdout == (
        "NAME     ADDRESS    SCOPE  EXPIRES  SELECTORS\n"
        "a.test.  192.0.2.1      1  60s      a.test.,*.test.\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "peer"),
    [
        ({"direction": "egress", "source": "192.0.2.1", "destination": "198.51.100.1", "port": 443}, "198.51.100.1:443"),
        ({"direction": "egress", "source": "2001:db8::1", "destination": "2001:db8::2", "port": 443}, "[2001:db8::2]:443"),
        ({"direction": "ingress", "source": "198.51.100.1", "destination": "192.0.2.1", "port": 22}, "198.51.100.1 to :22"),
        ({"direction": "egress", "source": "192.0.2.1", "destination": "198.51.100.1", "port": None}, "198.51.100.1"),
    ],
)
def test_a_drop_shows_the_far_side(row: dict[str, object], peer: str) -> None:
    """With the port that was judged, whose-ever it is."""
    stdout = call("drops", agent=FakeAgent(drops=[{**ROWS["drops"], **row}])).stdout
    assert peer in stdout
    assert "04:05:06" in stdout


def test_the_last_drops() -> None:
    """So many as were asked for, or all that there are; the last one is the last line still."""
    agent = FakeAgent(drops=[{**ROWS["drops"], "port": port} for port in (1, 2, 3)])

    def ports(*options: str) -> list[int]:
        return [row["port"] for row in json.loads(call("drops", "-o", "json", *options, agent=agent).stdout)]

    assert ports() == [1, 2, 3]
    assert ports("--last", "2") == [2, 3]
    assert ports("--last", "9") == [1, 2, 3]
    assert call("drops", "--last", "0", agent=agent).exit_code == 2
    assert call("names", "--last", "2", agent=agent).exit_code == 2


def test_a_table_in_a_pipe_is_not_cut() -> None:
    """What reads it wants whole values; $COLUMNS says otherwise."""
    environment = Environment(connect=FakeAgent(names=[ROWS["names"]]).connect, is_root=lambda: True)
    for columns, is_cut in ((None, False), ("300", False), ("80", True)):
        stdout = CliRunner(env={"COLUMNS": columns}).invoke(main, ["names"], obj=environment).stdout
        assert ("…" in stdout) is is_cut
        assert max(map(len, stdout.splitlines())) > 80 or is_cut


def test_a_drop_is_of_an_interface() -> None:
    """By its name; of an endpoint that has gone by its number."""
    for interface, shown in (("veth-build", "veth-build"), (None, "7")):
        row = {**ROWS["drops"], "endpoint": 7, "interface": interface}
        assert call("drops", agent=FakeAgent(drops=[row])).stdout.splitlines()[1].split()[1] == shown


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_is_good_only_when_enforcing() -> None:
    """Exit code 0, so that a script can wait for it."""
    result = call("status", agent=FakeAgent(status=STATUS))
    assert result.exit_code == 0
    assert result.stdout == (
        "state         enforcing\nreasons       none\nendpoints     3\nrows pending  0\nrows failed   none\nheld          0\n"
    )


@pytest.mark.parametrize("state", ["degraded", "starting"])
@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_status_says_no_by_its_exit_code(state: str, output: str) -> None:
    """In every format."""
    result = call("status", "-o", output, agent=FakeAgent(status={**STATUS, "state": state}))
    assert result.exit_code == 1
    assert state in result.stdout


def test_status_says_which_row_failed_and_why() -> None:
    """Reasons one a line; rows as a table below."""
    failed = [{"table": "ipcache", "row": "1 192.0.2.1/32", "error": "No space left on device", "since": "04:05:06"}]
    degraded = {"state": "degraded", "reasons": ["the ipcache is full", "tc0 is not first"], "rows_failed": failed}
    assert call("status", agent=FakeAgent(status=degraded)).stdout == (
        "state        degraded\n"
        "reasons      the ipcache is full\n"
        "             tc0 is not first\n"
        "rows failed  1\n"
        "\n"
        "rows failed:\n"
        "TABLE    ROW             ERROR                    SINCE\n"
        "ipcache  1 192.0.2.1/32  No space left on device  04:05:06\n"
    )


# --- verbs -----------------------------------------------------------------------------------------------------------


def test_apply_names_files_from_the_agents_point_of_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has another working directory. The client is more patient than the agent, whose sentence is better."""
    monkeypatch.chdir(tmp_path)
    agent = FakeAgent(apply={"policies": 2, "changed": True})
    result = call("apply", "a.yaml", "/b.yaml", "--wait", "--timeout", "2m", agent=agent)
    assert result.stdout == "2 policies in force\n"
    assert agent.asked == [("apply", {"files": [f"{tmp_path}/a.yaml", "/b.yaml"], "wait": True, "timeout": 120.0})]
    assert agent.reached == [(DEFAULT_CONTROL, 130.0)]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"policies": 1, "changed": True}, "1 policy taken; `--wait` says when they are in force\n"),
        ({"policies": 2, "changed": False}, "2 policies, nothing changed\n"),
    ],
)
def test_apply_says_what_was_done(answer: object, sentence: str) -> None:
    """Without files the agent reads those of its configuration again."""
    agent = FakeAgent(apply=answer)
    assert call("apply", agent=agent).stdout == sentence
    assert agent.asked == [("apply", {"files": None, "wait": False, "timeout": 30.0})]


def test_a_policy_the_agent_refuses_is_a_no() -> None:
    """The agent's sentence, exit code 1."""
    result = call("apply", agent=FakeAgent(apply=ControlError("a.yaml:3: spec: unknown key", 1)))
    assert (result.exit_code, result.stderr) == (1, "a.yaml:3: spec: unknown key\n")


def test_a_wrong_duration_is_a_wrong_use() -> None:
    """Before anybody is asked."""
    agent = FakeAgent()
    result = call("apply", "--timeout", "soon", agent=agent)
    assert (result.exit_code, agent.asked) == (2, [])
    assert result.stderr == "--timeout: `soon` is not a duration: write 500ms, 10s or 2m\n"


def test_agent_runs_with_its_configuration(configuration: Path) -> None:
    """And ends with the daemon's exit code."""
    ran: list[Config] = []

    def run(config: Config, is_for_runs: bool) -> int:
        assert not is_for_runs
        ran.append(config)
        return 7

    assert call("agent", "-c", str(configuration), run=run).exit_code == 7
    assert [config.endpoints[0].interface for config in ran] == ["veth0"]


def test_agent_tells_every_mistake_of_its_configuration(configuration: Path) -> None:
    """And does not start."""
    configuration.write_text("endpoints: [{}]\npolices: []\n", encoding="utf-8")
    result = call("agent", "-c", str(configuration), run=lambda _config, _is_for_runs: pytest.fail("started"))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) >= 3
    assert all(line.startswith(f"{configuration}:") for line in result.stderr.splitlines())


def test_agent_warns_of_what_should_not_pass_unseen(configuration: Path) -> None:
    """`asked` is taken, with a warning."""
    configuration.write_text("endpoints: [{interface: veth0}]\npolicies: []\ndns: {upstreams: asked}\n", encoding="utf-8")
    result = call("agent", "-c", str(configuration), run=lambda _config, _is_for_runs: 0)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {configuration}:3: dns.upstreams: `asked`")


@pytest.fixture
def sigterm_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_restored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_is_an_orderly_stop(configuration: Path, number: signal.Signals) -> None:
    """Exit code 0, before the daemon's loop has taken the signals over."""

    def run(_config: Config, _is_for_runs: bool) -> int:
        signal.raise_signal(number)
        return 1

    # As in a foreground: a shell without job control has its background ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert call("agent", "-c", str(configuration), run=run).exit_code == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_cleanup_cleans_what_the_configuration_names(configuration: Path) -> None:
    """And removes a dead agent's socket."""
    cleaned: list[Config] = []
    socket = configuration.parent / "run" / "c.sock"
    socket.parent.mkdir()
    socket.touch()

    def clean(config: Config) -> list[str]:
        cleaned.append(config)
        return ["veth0"]

    assert call("cleanup", "-c", str(configuration), clean=clean).stdout == "veth0 is no longer policed\n"
    assert [config.control.socket for config in cleaned] == [socket]
    assert list(socket.parent.iterdir()) == []


def test_detach_asks_the_agent_that_runs_and_does_it_itself_when_there_is_none(configuration: Path) -> None:
    """Of an interface that was not policed it says so, exit code 1."""
    released = call("detach", "veth0", "-c", str(configuration), release=lambda _config, interface: interface == "veth0")
    assert (released.exit_code, released.stdout) == (0, "veth0 is no longer policed\n")
    refused = call("detach", "veth1", "-c", str(configuration), release=lambda _config, interface: interface == "veth0")
    assert (refused.exit_code, refused.stderr) == (1, "veth1 was not policed\n")
    lock = AgentLock(configuration.parent / "run" / "c.sock")
    lock.acquire()
    try:
        agent = FakeAgent(detach={"interface": "veth0"})
        asked = call("detach", "veth0", "-c", str(configuration), agent=agent, release=lambda *_: pytest.fail("released"))
    finally:
        lock.release()
    assert (asked.exit_code, asked.stdout) == (0, "veth0 is no longer policed\n")


def test_cleanup_leaves_a_running_agent_alone(configuration: Path) -> None:
    """It would take the programs from under it."""
    lock = AgentLock(configuration.parent / "run" / "c.sock")
    lock.acquire()
    try:
        result = call("cleanup", "-c", str(configuration), clean=lambda _config: pytest.fail("cleaned"))
    finally:
        lock.release()
    assert result.exit_code == 2
    assert "an agent is already running" in result.stderr


# --- check -----------------------------------------------------------------------------------------------------------

POLICY = """apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: build}
spec:
  endpointSelector: {matchLabels: {app: build}}
  egress:
    - toFQDNs: [{matchName: api.example.com}]
"""


def test_check_needs_no_root(tmp_path: Path) -> None:
    """A good policy: exit code 0, and the DNS it implies is said."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    result = call("check", str(path), root=False)
    assert result.exit_code == 0, result.output
    assert "1 policy, no mistake" in result.stdout
    assert "api.example.com" in result.stdout


def test_check_of_a_bad_policy_is_a_no(tmp_path: Path) -> None:
    """Exit code 1; file, line and field."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.replace("toFQDNs", "toFQDN"), encoding="utf-8")
    result = call("check", str(tmp_path), root=False)
    assert result.exit_code == 1
    assert f"{path}:7: spec.egress[0].toFQDN: " in result.stdout


def test_check_wants_a_policy(tmp_path: Path) -> None:
    """No argument, or a directory without one: used wrongly, and not "no mistake"."""
    assert call("check").exit_code == 2
    result = call("check", str(tmp_path))
    assert (result.exit_code, result.stderr.startswith(f"no policy in {tmp_path}: ")) == (2, True)


def test_check_takes_a_list_of_names(tmp_path: Path) -> None:
    """The shorthand, under whatever name the file has."""
    path = tmp_path / "names"
    path.write_text("api.example.com:443\n", encoding="utf-8")
    assert "1 policy, no mistake" in call("check", str(path), root=False).stdout


# --- every command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*NOUNS, "status", "apply", "detach veth0", "cleanup", "agent -c absent.yaml"])
def test_without_root_one_sentence_says_so(command: str) -> None:
    """With the reason and the remedy, exit code 2."""
    result = call(*command.split(), root=False)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"namegate {command.split(maxsplit=1)[0]} needs root: ")
    assert result.stderr.endswith("; run it with sudo\n")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [*NOUNS, "status", "apply"])
def test_no_agent_is_one_sentence(command: str) -> None:
    """The client's, exit code 2, nothing on standard output."""
    result = call(command, agent=FakeAgent(**{command.replace("-", "_"): ControlError("no agent is running")}))
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "no agent is running\n")


@pytest.mark.parametrize("command", [*NOUNS, "status", "apply"])
def test_an_answer_of_another_release_is_one_sentence(command: str) -> None:
    """Not a traceback."""
    result = call(command, agent=FakeAgent(**{command.replace("-", "_"): 5}))
    assert result.exit_code == 2
    assert "is it of another release?" in result.stderr


def test_an_unknown_error_is_a_sentence_unless_debugged() -> None:
    """`--debug` shows the traceback."""
    agent = FakeAgent(names=ZeroDivisionError("oh"))
    result = call("names", agent=agent)
    assert result.exit_code == 2
    assert result.stderr == "namegate met an error it does not know (ZeroDivisionError: oh): --debug shows where\n"
    assert isinstance(call("--debug", "names", agent=agent).exception, ZeroDivisionError)


def test_the_control_socket_is_where_one_says() -> None:
    """Option before environment before default."""
    agent = FakeAgent(names=[])
    call("names", agent=agent)
    call("--control", "/a.sock", "names", agent=agent)
    environment = Environment(connect=agent.connect, is_root=lambda: True)
    CliRunner(env={"NAMEGATE_CONTROL": "/b.sock"}).invoke(main, ["names"], obj=environment)
    assert [str(path) for path, _ in agent.reached] == [str(DEFAULT_CONTROL), "/a.sock", "/b.sock"]


def test_the_command_line_over_a_real_socket(tmp_path: Path) -> None:
    """Nothing faked but the shell: the client, the socket, the server; then the agent is gone."""
    path = tmp_path / "control.sock"

    async def answer(command: str, _arguments: Mapping[str, object]) -> object:
        if command == "status":
            return {**STATUS, "state": "degraded"}
        raise ControlError("no", 1)

    def call_there(command: str) -> Result:
        environment = Environment(is_root=lambda: True)
        return CliRunner().invoke(main, ["--control", str(path), command], obj=environment)

    async def both() -> tuple[Result, Result]:
        server = ControlServer(path, answer)
        await server.start()
        try:
            return await asyncio.to_thread(call_there, "status"), await asyncio.to_thread(call_there, "names")
        finally:
            await server.close()

    status, names = asyncio.run(both())
    assert (status.exit_code, status.stdout.splitlines()[0]) == (1, "state         degraded")
    assert (names.exit_code, names.stderr) == (1, "no\n")
    gone = call_there("status")
    assert (gone.exit_code, gone.stderr.startswith(f"no agent is running (nobody listens at {path})")) == (2, True)


def test_the_default_socket_is_the_configurations() -> None:
    """The command line does not import the configuration for it, so it is written twice."""
    assert Config().control.socket == DEFAULT_CONTROL


@pytest.mark.parametrize("command", ["", *main.commands])
def test_help_ends_with_examples_and_fits_eighty_columns(command: str) -> None:
    """Every example begins with the command it explains."""
    result = call(*filter(None, (command, "--help")))
    assert result.exit_code == 0
    _, _, examples = result.stdout.partition("Examples:\n")
    assert examples
    assert all("namegate" in line for line in examples.splitlines() if line.strip())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_version_is_that_of_the_distribution() -> None:
    """Or one sentence, in a checkout that was never installed."""
    result = call("--version")
    try:
        assert result.stdout == f"namegate {metadata.version('namegate')}\n"
    except metadata.PackageNotFoundError:
        assert result.stderr.startswith("namegate is not installed here")


def test_help_is_quick() -> None:
    """What is heavy is imported by the command that needs it: a process that printed help has none of it."""
    code = (
        "import sys\n"
        "from agent.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'pyroute2', 'dns', 'bcc', 'yaml', 'asyncio', 'idna', 'logging'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "[]\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`namegate names | head -1` ends quietly, as by SIGPIPE."""
    code = (
        "from agent.cli import main\n"
        "from agent.cli.environment import Environment\n"
        "class Agent:\n"
        "    def ask(self, command, /, **arguments):\n"
        "        return [{'name': 'a.test.'}] * 20000\n"
        "main(['names'], obj=Environment(connect=lambda path, patience: Agent(), is_root=lambda: True))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
