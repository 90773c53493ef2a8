"""`namegate run` at a terminal: job control, signals and full-screen programs are as without it.

Most tests do the same with and without it, and compare what the terminal shows.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.netns.lab import Lab
from tests.netns.runs import Host, Typed
from tests.netns.runs import command as namegate_run
from tests.netns.test_run import left, until

pytestmark = [pytest.mark.root]

# Its output is told from the echo of what was typed.
SLEEPER = "sh -c 'echo star''ted; exec sleep 300'"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """With a run that lasts, so that all share an agent."""
    with Lab(records={"evil.test.": ["A 198.51.100.66"]}) as lab:
        host = Host(lab)
        try:
            with host.lasting():
                yield host
        finally:
            until(lambda: not left(host))


@pytest.fixture
def terminal(host: Host) -> Iterator[Typed]:
    with Typed(host) as terminal:
        yield terminal


def as_without(do: Callable[[str], str]) -> None:
    """What is shown with `namegate run` is what is shown without, but for `namegate run` itself."""
    assert do("$N -- ").replace("$N -- ", "") == do("")


def test_ctrl_c(terminal: Typed) -> None:
    """COMMAND ends by it, and the shell sees that it did."""

    def do(run: str) -> str:
        terminal.line(run + SLEEPER)
        terminal.expect("started\n")
        terminal.type("\x03")
        return terminal.expect(terminal.PROMPT) + terminal.say("echo $?")

    as_without(do)


def test_ctrl_z_and_back_and_in_the_background(terminal: Typed) -> None:
    """Stopped, a job of the shell; continued in the background, fetched from there, stopped again, ended."""

    def do(run: str) -> str:
        terminal.line(run + SLEEPER)
        terminal.expect("started\n")
        terminal.type("\x1a")
        shown = terminal.expect(terminal.PROMPT) + terminal.say("jobs") + terminal.say("bg") + terminal.say("jobs")
        terminal.hand_over("fg")
        terminal.type("\x1a")
        shown += terminal.expect(terminal.PROMPT)
        terminal.hand_over("fg")
        terminal.type("\x03")
        return shown + terminal.expect(terminal.PROMPT) + terminal.say("echo $?; jobs")

    as_without(do)


def test_a_background_job_that_reads(terminal: Typed) -> None:
    """It is stopped for it, and reads when it is the foreground."""

    def do(run: str) -> str:
        terminal.line(run + "sh -c 'read line; echo got $line' & sleep 0")
        terminal.expect(terminal.PROMPT)
        shown = ""
        while "Stopped" not in shown:
            shown = terminal.say("jobs").splitlines()[-1]
        terminal.hand_over("fg")
        terminal.line("words")
        return shown + terminal.expect(terminal.PROMPT)

    as_without(do)


def test_a_job_that_was_in_the_background_reads(terminal: Typed, tmp_path: Path) -> None:
    """Fetched while it runs, of which nobody is told: it has the terminal all the same when it wants it."""

    def do(run: str) -> str:
        fifo = tmp_path / f"go{bool(run)}"
        os.mkfifo(fifo)
        terminal.line(f"{run}sh -c 'echo star''ted; read go < $0; read line; echo got $line' {fifo}")
        terminal.expect("started\n")
        terminal.type("\x1a")
        terminal.expect(terminal.PROMPT)
        terminal.say("bg")
        terminal.hand_over("fg")
        fifo.write_text("go\n")
        terminal.line("words")
        terminal.expect("words\n")
        return terminal.expect(terminal.PROMPT)

    as_without(do)


def test_pipelines(terminal: Typed) -> None:
    """SIGPIPE is COMMAND's, the exit codes are each one's own, and one Ctrl-C ends all."""
    assert terminal.say("$N -- yes | head -n 1; echo ${PIPESTATUS[*]}") == "y\n141 0\n"
    assert terminal.say("echo x | $N -- sh -c 'cat; exit 4' | cat; echo ${PIPESTATUS[*]}") == "x\n0 4 0\n"
    terminal.line("sleep 300 | $N -- " + SLEEPER + " | sh -c 'cat; sleep 300'")
    terminal.expect("started\n")
    terminal.type("\x03")
    terminal.expect(terminal.PROMPT)
    assert terminal.say("echo ${PIPESTATUS[*]}; jobs") == "130 130 130\n"


@pytest.mark.parametrize("shell", ["bash --norc --noprofile --noediting -i", "dash -i"])
def test_an_interactive_shell_has_job_control(terminal: Typed, shell: str) -> None:
    """Without a warning; its own Ctrl-C and Ctrl-Z are not the outer shell's."""

    def do(run: str) -> str:
        terminal.line(f"PS1='inn''er> ' {run}{shell}")
        shown = terminal.expect("inner> ")
        terminal.line(SLEEPER)
        terminal.expect("started\n")
        terminal.type("\x1a")
        shown += terminal.expect("inner> ")
        terminal.hand_over("jobs; fg")
        terminal.type("\x03")
        terminal.expect("inner> ")
        terminal.line("exit 6")
        return shown + terminal.expect(terminal.PROMPT) + terminal.say("echo $?")

    as_without(do)


def test_a_shell_that_a_script_starts_gets_the_terminal(terminal: Typed, tmp_path: Path) -> None:
    """There COMMAND is in the script's process group, and asks for the terminal by itself."""
    script = tmp_path / "script"
    script.write_text("PS1='inner> ' $N -- bash --norc --noprofile --noediting -i\necho outer $?\n")
    terminal.line(f"bash {script}")
    terminal.expect("inner> ")
    terminal.line(SLEEPER)
    terminal.expect("started\n")
    terminal.type("\x1a")
    assert "Stopped" in terminal.expect("inner> ")
    terminal.line("exit 6; exit 6")
    assert terminal.expect(terminal.PROMPT).endswith("outer 6\n")


def test_ctrl_c_ends_a_script_that_starts_it_again_and_again(terminal: Typed, tmp_path: Path) -> None:
    """The script sees it as well, as always."""
    script = tmp_path / "script"
    script.write_text(f"for i in 1 2 3; do $N -- {SLEEPER}; done; echo still there\n")
    terminal.line(f"bash {script}")
    terminal.expect("started\n")
    terminal.type("\x03")
    assert "still there" not in terminal.expect(terminal.PROMPT)


def test_a_full_screen_program(terminal: Typed) -> None:
    """less fills the screen, stops, comes back, and leaves; what was denied is said when it has left."""
    terminal.line("$N -- sh -c 'getent hosts evil.test; exec less /etc/passwd'")
    terminal.expect("root:x:0")
    terminal.type("\x1a")
    assert "Stopped" in terminal.expect(terminal.PROMPT)
    terminal.line("fg")
    assert "namegate: denied" not in terminal.expect("root:x:0")
    terminal.type("q")
    shown = terminal.expect(terminal.PROMPT)
    assert re.search(r"\x1b\[\?1049l.*namegate: denied: evil.test \(", shown, re.DOTALL)
    assert shown.count("denied: evil.test (") == 1
    assert "namegate: to allow it: --allow evil.test" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_runner_is_the_commands(host: Host, number: signal.Signals) -> None:
    """Sent by kill(1), once; its handler decides."""
    name = number.name.removeprefix("SIG")
    run = host.start("--", "sh", "-c", f"trap 'echo {name}; exit 7' {name}; echo started; while :; do sleep 0.02; done")
    assert run.stdout is not None
    assert run.stdout.readline() == "started\n"
    run.send_signal(number)
    assert run.communicate(timeout=10)[0] == f"{name}\n"
    assert run.returncode == 7


@pytest.mark.parametrize(("then", "code"), [("CONT", 7), ("KILL", -signal.SIGKILL)])
def test_stopped_and_continued_from_inside(host: Host, tmp_path: Path, then: str, code: int) -> None:
    """What was stopped with COMMAND goes on with it, also where no shell watches jobs."""
    go = tmp_path / "go"
    child = f"kill -STOP $PPID; while ! [ -e {go} ]; do sleep 0.01; done; kill -{then} $PPID"
    run = host.start("--", "sh", "-c", f"sh -c {shlex.quote(child)}; exit 7")
    try:
        until(lambda: Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        go.touch()
        assert run.wait(timeout=10) == code
    finally:
        run.kill()
        run.communicate()


def test_a_reader_that_stands_still_holds_up_no_signal(host: Host) -> None:
    """Denials fill the pipe behind standard error; the run ends like any other all the same."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    script = """
import socket
for i in range(100):
    try:
        socket.getaddrinfo(f"no-{i}", 1)
    except OSError:
        pass
print(flush=True)
input()
"""
    command = host.inside(*namegate_run("--", sys.executable, "-c", script))
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing, env=host.environment
        ) as run:
            assert run.stdout is not None
            assert run.stdout.readline() == b"\n"
            run.terminate()
            try:
                assert run.wait(timeout=10) == -signal.SIGTERM
            finally:
                run.kill()
    finally:
        os.close(reading)
        os.close(writing)


def test_ctrl_c_while_it_begins(host: Host, tmp_path: Path) -> None:
    """It ends by the signal, as a program that knows nothing of signals, and says nothing."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "control.sock"))
        agent.listen()
        command = host.inside(*namegate_run("--", "true"))
        control = {"NAMEGATE_CONTROL": str(tmp_path / "control.sock")}
        with subprocess.Popen(command, stderr=subprocess.PIPE, env={**host.environment, **control}) as run:
            connection, _ = agent.accept()
            with connection:
                run.send_signal(signal.SIGINT)
                assert run.communicate(timeout=10)[1] == b""
                assert run.returncode == -signal.SIGINT


def test_a_closed_terminal(host: Host, tmp_path: Path) -> None:
    """COMMAND hears of it, and nothing of the run stays."""
    heard = tmp_path / "heard"
    with Typed(host) as terminal:
        terminal.line(f"$N -- sh -c 'trap \"echo hup > {heard}; exit\" HUP; echo star''ted; while :; do sleep 0.02; done'")
        terminal.expect("started\n")
        children = subprocess.run(["pgrep", "-P", str(terminal.pid)], capture_output=True, text=True, check=True).stdout.split()
        terminal.hang_up()
        until(lambda: heard.exists() and heard.read_text() == "hup\n")
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
