"""`namegate run` where it needs no kernel: who COMMAND is, what is said, whom it asks."""

from __future__ import annotations

import json
import os
import pty
import pwd
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent.cli import main
from agent.cli.environment import Environment
from agent.control.runs import own_network_namespace, runs_socket
from agent.runner import CannotRun, masks
from agent.runner.identity import identity
from agent.runner.lease import Agents, Lease
from agent.runner.report import Report, line_of, summary_lines

NOBODY = pwd.getpwnam("nobody")


@pytest.mark.parametrize(("user", "environment", "expected"), [
    (None, {}, (os.getuid(), os.getgid(), False)),
    (None, {"SUDO_UID": str(NOBODY.pw_uid), "SUDO_GID": "7"}, (NOBODY.pw_uid, 7, True)),
    (None, {"SUDO_UID": "123456789", "SUDO_GID": "9"}, (123456789, 9, True)),
    (None, {"DOAS_USER": "nobody"}, (NOBODY.pw_uid, NOBODY.pw_gid, True)),
    (None, {"PKEXEC_UID": str(NOBODY.pw_uid)}, (NOBODY.pw_uid, NOBODY.pw_gid, True)),
    ("root", {"SUDO_UID": "123456789"}, (0, 0, True)),
    (str(NOBODY.pw_uid), {}, (NOBODY.pw_uid, NOBODY.pw_gid, True)),
])  # fmt: skip
def test_the_command_is_who_called(user: str | None, environment: Mapping[str, str], expected: tuple[int, int, bool]) -> None:
    """By --user, or as sudo, doas and pkexec say it; a user without an entry has a number and a group."""
    found = identity(user, environment)
    assert (found.uid, found.gid, found.is_changed) == expected
    assert found.gid in found.groups or not found.is_changed


def test_a_user_that_is_not_there_is_named() -> None:
    with pytest.raises(CannotRun, match="no user `nobody-here`"):
        identity("nobody-here", {})


def test_the_environment_is_as_before_sudo() -> None:
    """What sudo set for root is the user's again, what it says of the call is gone, MAIL stays away where it was not."""
    before = {"HOME": "/root", "MAIL": "/var/mail/root", "SUDO_COMMAND": "x", "NAMEGATE_CONTROL": "/x", "LANG": "C"}
    after = identity("nobody", {}).environment(before)
    names = {"USER": "nobody", "LOGNAME": "nobody", "SHELL": NOBODY.pw_shell, "HOME": NOBODY.pw_dir}
    assert after == {**names, "MAIL": "/var/mail/nobody", "LANG": "C"}
    assert identity(None, {}).environment({"HOME": "/x", "SHELL": "/y"}) == {"HOME": "/x", "SHELL": "/y"}


def test_the_resolver_configuration() -> None:
    """One server; search list and options are the host's, its servers and everything else are not."""
    host = "# comment\nnameserver 127.0.0.53\nsearch a.test b.test\n\noptions edns0 trust-ad\nsortlist 10.0.0.0\n"
    assert masks.resolver_configuration(host, "10.213.0.1") == (
        "nameserver 10.213.0.1\nsearch a.test b.test\noptions edns0 trust-ad\n"
    )


def test_what_is_covered(tmp_path: Path) -> None:
    """What is there, each place once, and nothing that would hide what the caller keeps."""
    directory = tmp_path / "daemon"
    directory.mkdir()
    inner, other = directory / "socket", tmp_path / "other"
    inner.touch()
    other.touch()
    named = [directory, inner, tmp_path / "missing", other]
    assert {directory, other} <= set(masks.masked(os.getuid(), "x", named, [])) - {inner}
    assert set(masks.masked(os.getuid(), "x", named, [inner])) & {*named} == {other}
    everywhere = tmp_path / "everywhere"
    everywhere.symlink_to("/")
    assert other in masks.masked(os.getuid(), "x", [everywhere, other], [])


def test_a_terminal_is_told_at_the_end_and_not_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names COMMAND invents."""
    master, terminal = pty.openpty()
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    report = Report(wants_summary=False)
    report.start()
    for i in range(3_000):
        report.take({**QUESTION, "name": f"n{i}."})
    kept = os.dup(2)
    os.dup2(terminal, 2)
    try:
        report.finish(None)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(terminal)
    said = os.read(master, 1 << 16).decode().splitlines()
    os.close(master)
    assert said[-1] == "namegate: and at least 985 more: --summary says them all"


QUESTION = {"kind": "question", "name": "evil.test.", "type": "A", "verdict": "denied", "why": "no rule", "allow": "evil.test"}
DROP = {
    "kind": "drop", "protocol": "tcp", "destination": "198.51.100.7", "port": 443, "names": ["a.test."], "audited": False,
    "why": "no rule", "allow": "a.test:443/tcp",
}  # fmt: skip


GUARDED = {"kind": "guard", "name": "corp.test.", "address": "10.9.9.9", "sort": "private", "audited": False}


@pytest.mark.parametrize(("fact", "line"), [
    (QUESTION, "denied: evil.test (A): no rule; to allow it: --allow evil.test"),
    ({**QUESTION, "verdict": "audited"}, "would be denied: evil.test (A): no rule; to allow it: --allow evil.test"),
    ({**QUESTION, "verdict": "failed", "why": "timeout", "allow": None}, "not answered: evil.test (A): timeout"),
    ({**QUESTION, "name": "a\x1b[2J.", "why": None, "allow": "*.b"}, r"denied: a\x1b[2J (A); to allow it: --allow '*.b'"),
    (DROP, "denied: 198.51.100.7 port 443/tcp (a.test): no rule; to allow it: --allow a.test:443/tcp"),
    ({**DROP, "audited": True, "names": [], "port": 0, "protocol": "icmp", "allow": None},
     "would be denied: 198.51.100.7 (icmp): no rule"),
    ({**GUARDED, "allow_addresses": "10.9.9.9/32"},
     "denied: corp.test is 10.9.9.9, a private address; to allow it: --allow-addresses 10.9.9.9/32"),
    ({**GUARDED, "sort": "metadata", "audited": True, "allow_addresses": None},
     "would be denied: corp.test is 10.9.9.9, a metadata address"),
    ({"kind": "lost", "count": 12}, "12 more could not be told"),
])  # fmt: skip
def test_a_fact_is_a_line(fact: Mapping[str, Any], line: str) -> None:
    """What, why, and what would allow it, as it is typed; no terminal obeys a name."""
    assert line_of(fact) == line


def test_a_summary_counts() -> None:
    summary = {
        "names": [{"name": "a.test.", "verdict": "allowed", "count": 3}, {"name": "b.test.", "verdict": "denied", "count": 1}],
        "guarded": [{**GUARDED, "count": 1}],
        "drops": [{**DROP, "count": 2}],
        "allow": ["b.test"],
        "allow_addresses": ["10.9.9.9/32"],
        "unlisted": 4,
    }
    assert summary_lines(summary) == [
        "names asked:",
        "      3 x  allowed  a.test",
        "      1 x  denied   b.test",
        "addresses that no name may stand for:",
        "      1 x  denied   corp.test is 10.9.9.9, a private address",
        "packets:",
        "      2 x  denied   198.51.100.7 port 443/tcp (a.test)",
        "and 4 that are not listed",
        "to allow what was denied:",
        "  --allow b.test",
        "  --allow-addresses 10.9.9.9/32",
    ]
    audited = {**summary, "names": [{"name": "a.test.", "verdict": "audited", "count": 3}], "guarded": [], "drops": []}
    assert summary_lines(audited)[1] == "      3 x  would be denied  a.test"
    assert "to allow what would be denied:" in summary_lines(audited)


@contextmanager
def an_agent(path: Path, answer: object) -> Iterator[None]:
    """Answers whatever it is asked."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(json.dumps({"data": answer}).encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(timeout=10)


@pytest.mark.parametrize(("namespace", "is_asked"), [(own_network_namespace(), True), (1, False)])
def test_the_administrators_agent_is_asked_where_it_is_of_this_network(tmp_path: Path, namespace: int, is_asked: bool) -> None:
    """One of another network namespace, as in a container that shares /run, is not: it could not see the interface."""
    control = tmp_path / "control.sock"
    with an_agent(control, {"network_namespace": namespace, "version": "0.1.0"}):
        agents = Agents(None, control)
    assert agents.socket == (control if is_asked else runs_socket(own_network_namespace()))
    assert agents.is_ours is not is_asked


def test_a_named_agent_is_the_only_one(tmp_path: Path) -> None:
    agents = Agents(tmp_path / "named", tmp_path / "other")
    assert agents.socket == tmp_path / "named"
    assert not agents.is_ours


@pytest.mark.parametrize("answer", [{"interface": "ngrun0"}, "attached"])
def test_an_agent_of_another_release_is_said(tmp_path: Path, answer: object) -> None:
    control = tmp_path / "control.sock"
    with an_agent(control, answer):
        lease = Lease(Agents(control, control), {})
        with pytest.raises(CannotRun, match="is not understood: is it of another release"):
            lease.attach()


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--", "true"], "namegate: run needs root"),
    (["--no-such-option"], "No such option"),
    ([], "Missing argument"),
])  # fmt: skip
def test_its_own_failures_are_125(arguments: list[str], sentence: str) -> None:
    """So that nobody takes them for COMMAND's."""
    result = CliRunner().invoke(main, ["run", *arguments], obj=Environment(is_root=lambda: False))
    assert result.exit_code == 125
    assert sentence in result.output


def test_a_socket_to_keep_that_is_not_there(tmp_path: Path) -> None:
    """Somebody has mistyped it: COMMAND would miss it, and nobody would know why."""
    arguments = ["run", "--keep-socket", str(tmp_path / "none.sock"), "--", "true"]
    result = CliRunner().invoke(main, arguments, obj=Environment(is_root=lambda: True))
    assert (result.exit_code, result.output) == (125, f"namegate: --keep-socket: {tmp_path / 'none.sock'} is not there\n")


@pytest.mark.parametrize("before", [True, False])
def test_an_order_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """--control on either side of `run`; a list without an entry allows nothing, which is said."""
    from agent.runner import run as runner

    orders: list[runner.Order] = []

    def run(order: runner.Order) -> int:
        orders.append(order)
        return 0

    monkeypatch.setattr(runner, "run", run)
    empty, control = tmp_path / "empty.list", ["--control", "/x.sock"]
    empty.write_text("# nothing yet\n\n")
    more = ["--allow", "a.test", "--allow-file", str(empty), "--allow-addresses", "10.0.0.0/8", "--", "true"]
    arguments = [*control, "run", *more] if before else ["run", *control, *more]
    result = CliRunner().invoke(main, arguments, obj=Environment(is_root=lambda: True))
    assert (result.exit_code, result.output) == (0, f"namegate: warning: {empty} has no entry, and allows nothing\n")
    (order,) = orders
    assert (order.control, order.allow_addresses) == (Path("/x.sock"), ("10.0.0.0/8",))
    assert order.policies == [{"name": "--allow", "text": "a.test\n"}]
