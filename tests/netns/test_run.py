"""`namegate run` against real servers: what it lets through, as whom COMMAND runs, how it ends, and that nothing of it stays.

RUN_CONCURRENT and RUN_KILLS make two of them longer than in CI.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.netns.lab import Lab
from tests.netns.running import RunningAgent
from tests.netns.runs import Host
from tests.netns.runs import command as namegate_run

pytestmark = [pytest.mark.root]

ALLOWED, DENIED, PRIVATE = "198.51.100.7", "198.51.100.66", "10.9.9.9"
CONCURRENT = int(os.environ.get("RUN_CONCURRENT", "4"))
KILLS = int(os.environ.get("RUN_KILLS", "4"))
GONE_S_MAX = 5.0

# Connects to each name or address and says what came of it and when, as JSON.
CONNECT = """
import json, socket, sys, time
said = {}
for target in sys.argv[1:]:
    began = time.monotonic()
    try:
        socket.create_connection((target, 443), timeout=5).close()
        what = "connected"
    except OSError as error:
        what = type(error).__name__
    said[target] = [what, time.monotonic() - began]
print(json.dumps(said))
"""
# Who and where COMMAND is, as JSON.
WHO = """
import json, os, signal, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "ids": [os.getresuid(), os.getresgid(), sorted(os.getgroups())], "cwd": os.getcwd(), "environment": dict(os.environ),
    "capabilities": [status["CapInh"], status["CapPrm"], status["CapBnd"], status["CapAmb"]], "bound": status["NoNewPrivs"],
    "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """With a run that lasts, so that all share an agent; forwarding is off before it."""
    records = {
        "a.test.": [f"A {ALLOWED}", "AAAA 2001:db8:53::7"],
        "evil.test.": [f"A {DENIED}"],
        "corp.test.": [f"A {PRIVATE}"],
    }
    with Lab(records=records, ports=(443,)) as lab:
        lab.settle(lab.host, {"ipv4/ip_forward": 0})
        host = Host(lab)
        try:
            with host.lasting():
                yield host
        finally:
            # The last run takes the agent with it, and all that was made or changed for both.
            inode = Path(f"/run/netns/{lab.host}").stat().st_ino
            made = [Path(f"/run/namegate-runs/{inode}"), Path(f"/sys/fs/bpf/namegate-runs-{inode}")]
            until(lambda: not left(host) and not any(path.exists() for path in made), GONE_S_MAX)
            assert host.look("cat", "/proc/sys/net/ipv4/conf/up0/forwarding", "/proc/sys/net/ipv4/ip_forward") == "0\n0\n"
            assert "lookup 2005" not in host.look("ip", "rule")


def until(is_so: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)


def left(host: Host) -> set[str]:
    """Whatever is of runs in the host's network namespace."""
    links = {link["ifname"] for link in json.loads(host.look("ip", "-j", "link"))}
    tables = {line.split()[2] for line in host.look("nft", "list", "tables").splitlines()}
    routes = {line for line in host.look("ip", "route", "show", "table", "all").splitlines() if "ngrun" in line}
    return {name for name in links | tables if "run" in name} | routes


def test_what_is_allowed_works_at_once_and_the_rest_fails_within_a_second(host: Host) -> None:
    """By IPv4 and IPv6, by name; an address that nobody resolved; each denial has its line, with what would allow it."""
    targets = ["a.test", "2001:db8:53::7", "evil.test", DENIED]
    done = host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, *targets)
    said = json.loads(done.stdout)
    assert [said[target][0] for target in targets] == ["connected", "connected", "gaierror", "ConnectionRefusedError"], done
    assert max(took_s for _, took_s in said.values()) < 1
    assert "namegate: denied: evil.test (A): " in done.stderr
    assert "to allow it: --allow evil.test\n" in done.stderr
    assert f"namegate: denied: {DENIED} port 443/tcp" in done.stderr


def test_the_source_is_the_hosts(host: Host) -> None:
    """NAT, for both families: nobody beyond the host sees a run's own addresses."""
    with host.lab.capture(host.lab.internet, "eth0", "tcp[tcpflags] & tcp-syn != 0 or ip6") as capture:
        host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, ALLOWED, "a.test", "2001:db8:53::7")
    seen = subprocess.run(["tcpdump", "-nr", str(capture.path)], capture_output=True, text=True, check=True).stdout
    assert "IP 203.0.113.1." in seen
    assert "IP6 2001:db8:2::1." in seen
    assert "10.213." not in seen
    assert "fd6e:" not in seen


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (("--", "sh", "-c", "exit 3"), 3, ""),
    (("--", "sh", "-c", "kill -TERM $$"), -signal.SIGTERM, ""),
    (("--", "sh", "-c", "kill -KILL $$"), -signal.SIGKILL, ""),
    (("--", "/etc/passwd"), 126, "namegate: /etc/passwd cannot be run: Permission denied\n"),
    (("--", ""), 127, "namegate:  cannot be run: No such file or directory\n"),
    (("--allow-file", "/dev/zero", "--", "true"), 125, "namegate: /dev/zero is longer than 16777216 bytes\n"),
    (("--", "no-such-command"), 127, "namegate: no-such-command cannot be run: No such file or directory\n"),
    (("--allow", "a b c", "--", "true"), 125, "namegate: "),
    (("--allow-file", "/no/such", "--", "true"), 125, "namegate: /no/such cannot be read: No such file or directory\n"),
    (("--user", "nobody-here", "--", "true"), 125, "namegate: there is no user `nobody-here`: `getent passwd` lists them\n"),
    (("--no-such-option", "--", "true"), 125, "Usage: "),
    ((), 125, "Usage: "),
], ids=lambda value: " ".join(map(str, value))[:24] if isinstance(value, tuple) else None)  # fmt: skip
def test_the_exit_code_is_the_commands(host: Host, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    """Its own, or the signal's; 125 to 127 for what is not COMMAND's, with a sentence."""
    done = host.run(*arguments)
    assert (done.returncode, done.stderr[: len(sentence)]) == (code, sentence), done
    assert bool(done.stderr) == bool(sentence)


def test_the_exit_code_where_nothing_can_be_said(host: Host) -> None:
    with Path("/dev/full").open("w") as full:
        command = host.inside(*namegate_run("--", "no-such-command"))
        assert subprocess.run(command, stderr=full, env=host.environment, timeout=30, check=False).returncode == 127


def test_the_command_is_the_callers(host: Host, tmp_path: Path) -> None:
    """User, groups, directory and environment as before sudo; nothing of ours is inherited, and there is no way to more."""
    tmp_path.chmod(0o755)
    nobody = {"SUDO_UID": "65534", "SUDO_GID": "65534", "SUDO_USER": "nobody", "SUDO_COMMAND": "x"}
    before = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/zsh", "COLOR": "blue", "NAMEGATE_X": "1"}
    done = host.run("--", sys.executable, "-c", WHO, environment={**nobody, **before}, directory=tmp_path)
    said = json.loads(done.stdout)
    assert said["ids"] == [[65534] * 3, [65534] * 3, [65534]]
    assert said["cwd"] == str(tmp_path)
    environment = said["environment"]
    assert not [name for name in environment if name.startswith(("SUDO_", "NAMEGATE_"))]
    assert [environment[name] for name in ("USER", "LOGNAME", "HOME", "COLOR")] == ["nobody", "nobody", "/nonexistent", "blue"]
    assert said["bound"] == "1"
    assert [int(each, 16) for each in said["capabilities"]] == [0, 0, 0xA00425FB, 0]
    assert said["fds"] == [0, 1, 2]
    assert host.run("--", "grep", "Sig[BI]", "/proc/self/status").stdout.split()[1::2] == ["0" * 16] * 2


def test_the_environment_has_nothing_of_pythons(host: Host) -> None:
    """It adds LC_CTYPE where there is no locale."""
    bare = host.inside("env", "-u", "LC_CTYPE", "-u", "LC_ALL", "-u", "LANG", *namegate_run("--", "env"))
    said = subprocess.run(bare, capture_output=True, text=True, env=host.environment, timeout=30, check=True).stdout
    assert "LC_" not in said


def test_what_no_namespace_closes(host: Host) -> None:
    """VM sockets, io_uring, the kernel's way to a program outside; 32-bit programs run, and have neither."""
    script = """if True:
        import ctypes, errno, mmap, platform
        libc = ctypes.CDLL(None, use_errno=True)
        def call(*arguments):
            return errno.errorcode[ctypes.get_errno()] if libc.syscall(*arguments) < 0 else "done"
        numbers = {"x86_64": (41, 249), "aarch64": (198, 218)}[platform.machine()]
        print(call(numbers[0], 40, 1, 0), call(numbers[0], 2, 1, 0), call(425, 4, None))
        print(call(numbers[1], b"user", b"namegate-test:SERIAL", b"x", 0))
        if platform.machine() == "x86_64":
            memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            def call_32(number, first):  # in ebx; 1 in ecx, 0 in edx
                code = "53 b8" + number.to_bytes(4, "little").hex() + "bb" + first.to_bytes(4, "little").hex()
                memory[:] = bytes.fromhex(code + "b901000000 31d2 cd80 5b c3").ljust(4096, b"x")
                return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
            print(call_32(20, 0) > 0, call_32(359, 40), call_32(359, 2) > 0)
    """.replace("SERIAL", secrets.token_hex(8))
    lines = host.run("--", sys.executable, "-c", script).stdout.splitlines()
    assert lines[:2] == ["EAFNOSUPPORT done ENOSYS", "ENOKEY"]
    assert lines[2:] in ([], [f"True {-errno.EAFNOSUPPORT} True"])


def test_root_keeps_its_name_and_few_capabilities(host: Host) -> None:
    """Without sudo it is root's own command, in root's own environment; it can neither type into the terminal nor mount."""
    typing = "import fcntl; fcntl.ioctl(0, {request:#x}, b'x')"
    script = f"""
        id -u; echo $HOME; umask
        {sys.executable} -c "{typing.format(request=0x5412)}" 2>&1 | tail -n 1
        {sys.executable} -c "{typing.format(request=0x1_0000_5412)}" 2>&1 | tail -n 1
        mount -t tmpfs none /mnt 2>&1 | grep -c denied
        ip link add x type dummy 2>&1
    """
    done = host.run("--", "sh", "-c", script, environment={"HOME": "/here"})
    lines = done.stdout.splitlines()
    assert lines[:2] == ["0", "/here"]
    assert lines[3] == "PermissionError: [Errno 1] Operation not permitted"
    assert "Error" in lines[4]
    assert lines[5] == "1"
    assert "Operation not permitted" in lines[6]


def test_root_makes_no_device_on_the_hosts_uplink(host: Host) -> None:
    """Its link tells the number of the host's namespace, by which CAP_NET_ADMIN would get out; a user namespace gives that over
    nothing of ours. (With it the same command makes one: tests/netns/test_own_root.py.)"""
    (uplink,) = json.loads(host.look("ip", "-j", "link", "show", host.lab.uplink))
    making = f"ip link add own0 link if{uplink['ifindex']} link-netnsid 0 type macvlan mode bridge"
    script = f"ip -j link | grep -c 'link_netnsid.:0'; {making}; unshare --user --map-root-user {making}"
    done = host.run("--", "sh", "-c", script)
    assert (done.stdout, done.stderr.count("Operation not permitted")) == ("1\n", 2), done


def test_name_resolution_is_the_gates(host: Host) -> None:
    """The server is the host's side of the link; the search list and the options are the host's."""
    done = host.run("--allow", "a.test", "--", "sh", "-c", "cat /etc/resolv.conf; getent ahostsv4 a")
    server, *kept = done.stdout.splitlines()
    assert server.startswith("nameserver 10.213.")
    assert kept[:2] == ["search test", "options ndots:1"]
    assert kept[2].startswith(ALLOWED)


def test_who_would_talk_for_the_command_is_out_of_reach(host: Host) -> None:
    """A socket of a kind that is known is not there for COMMAND, unless the caller keeps it."""
    directory = Path(f"/tmp/tmux-{400_000 + os.getpid()}")  # a user of no other test
    directory.mkdir()
    path = directory / "default"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            path.chmod(0o777)
            server.listen()
            user = {"SUDO_UID": directory.name.removeprefix("tmux-"), "SUDO_GID": "65534"}
            reach = ["--", sys.executable, "-c", f"import socket; socket.socket(1).connect({str(path)!r})"]
            assert "FileNotFoundError" in host.run(*reach, environment=user).stderr
            assert host.run("--keep-socket", path, *reach, environment=user).returncode == 0
            near = [*reach[:-1], "import socket; socket.socket(1).connect('default')"]
            assert "FileNotFoundError" in host.run(*near, environment=user, directory=directory).stderr
            outside = f"{os.getpid()}/root{path}"
            assert host.run("--", "test", "!", "-e", outside, directory=Path("/proc")).returncode == 0
    finally:
        path.unlink(missing_ok=True)
        directory.rmdir()


def test_a_firewall_that_lets_nothing_through(host: Host) -> None:
    """Neither what a run sends nor what it asks: refused, with the commands of its owner, a line each; after them it works, for
    runs of every number."""
    chains = [
        "chain ip shut forward { type filter hook forward priority 0; policy drop; }",
        "chain ip shut input { type filter hook input priority 0; policy drop; }",
    ]
    established = "rule ip shut input ct state established,related accept"
    host.look("nft", "; ".join(f"add {each}" for each in ("table ip shut", *chains, established)))
    try:
        reach = ["--allow", "a.test", "--", sys.executable, "-c", CONNECT, "a.test"]
        refused = host.run(*reach)
        assert refused.returncode == 125
        said, *remedies = refused.stderr.splitlines()
        assert "drops what a run sends and the names it asks for (nftables ip shut forward, nftables ip shut input)" in said
        assert any("ng-runs" in remedy for remedy in remedies)
        for remedy in remedies:
            host.look("sh", "-c", remedy.replace('"', "'\"'"))
        assert json.loads(host.run(*reach).stdout)["a.test"][0] == "connected"
    finally:
        host.look("nft", "delete table ip shut")


def test_a_network_that_the_host_uses_is_left_to_it(host: Host) -> None:
    """Another one is taken then."""
    host.look("ip", "route", "add", "10.213.77.0/24", "via", "203.0.113.2")
    try:
        said = host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, "a.test")
        assert json.loads(said.stdout)["a.test"][0] == "connected"
        assert "10.213." not in host.run("--", "ip", "route").stdout
    finally:
        host.look("ip", "route", "del", "10.213.77.0/24")


def test_a_host_without_ipv6_on_new_interfaces(host: Host) -> None:
    """It has a route to the outside all the same; a run has IPv4 then."""
    host.lab.settle(host.lab.host, {"ipv6/conf/default/disable_ipv6": 1})
    try:
        done = host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, ALLOWED, "a.test", "2001:db8:53::7")
        assert [what for what, _ in json.loads(done.stdout).values()][1:] == ["connected", "OSError"], done
    finally:
        host.lab.settle(host.lab.host, {"ipv6/conf/default/disable_ipv6": 0})


def test_who_daemonises_stays_inside_and_ends_with_the_command(host: Host, tmp_path: Path) -> None:
    """A session of its own, a parent that is gone: it has COMMAND's network, and no life after it."""
    script = f"""setsid sh -c 'echo $$ $(readlink /proc/self/ns/net) > {tmp_path}/daemon; exec sleep 300' >&- 2>&- <&- &
        while ! [ -s {tmp_path}/daemon ]; do :; done; cat {tmp_path}/daemon
        readlink /proc/self/ns/net; readlink /proc/self/ns/pid"""
    done = host.run("--", "sh", "-c", script)
    daemon, network, pids = done.stdout.splitlines()
    assert daemon.split()[1] == network
    alive = subprocess.run(["ps", "-e", "-o", "pidns="], capture_output=True, text=True, check=True).stdout.split()
    assert pids.strip("pid:[]") not in alive


def test_an_audit_lets_pass_and_the_summary_says_what_it_was(host: Host) -> None:
    """Names with their verdicts, and the lines that would allow them."""
    done = host.run("--audit", "--summary", "--allow", "a.test", "--", sys.executable, "-c", CONNECT, "a.test", "evil.test")
    assert [what for what, _ in json.loads(done.stdout).values()] == ["connected", "connected"]
    assert "namegate: would be denied: evil.test (A): " in done.stderr
    _, _, summary = done.stderr.partition("namegate: names asked:\n")
    verdicts = [line.split(maxsplit=3)[3].split("  ") for line in summary.splitlines()[:2]]
    assert [(words[0], words[-1].strip()) for words in verdicts] == [("allowed", "a.test"), ("would be denied", "evil.test")]
    assert f"would be denied  {DENIED} port 443/tcp (evil.test)\n" in summary
    _, _, remedies = summary.partition("namegate: to allow what would be denied:\n")
    assert remedies == "namegate:   --allow evil.test:443/tcp\n"


def test_a_name_of_a_private_address(host: Host) -> None:
    """Taken out of the answer, which is said with what lets it through; that works, and an audit says all that is needed."""
    resolve = [sys.executable, "-c", "import socket; print(socket.gethostbyname('corp.test'))"]
    refused = host.run("--allow", "corp.test", "--", *resolve)
    assert "corp.test is 10.9.9.9, a private address; to allow it: --allow-addresses 10.9.9.9/32\n" in refused.stderr
    assert refused.returncode == 1
    audit = host.run("--audit", "--summary", "--", *resolve)
    assert (audit.returncode, audit.stdout) == (0, f"{PRIVATE}\n")
    options = re.findall(r"^namegate:   (--allow.*)", audit.stderr, re.MULTILINE)
    allowed = host.run(*(word for option in options for word in option.split()), "--", *resolve)
    assert (allowed.returncode, allowed.stdout, allowed.stderr) == (0, f"{PRIVATE}\n", "")


def test_what_one_run_resolved_is_not_another_ones(host: Host) -> None:
    """They share an agent: nothing is opened by that, and nobody is told of the other's names."""
    with_name = host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, "a.test")
    assert json.loads(with_name.stdout)["a.test"][0] == "connected"
    done = host.run("--allow", "*", "--", sys.executable, "-c", CONNECT, ALLOWED)
    assert json.loads(done.stdout)[ALLOWED][0] == "ConnectionRefusedError"
    assert f"denied: {ALLOWED} port 443/tcp: not resolved through the proxy; " in done.stderr


def test_output_ends_when_the_command_ends_it(host: Host) -> None:
    """No process of ours keeps a pipe open that COMMAND has closed."""
    inherited, given = os.pipe()
    with os.fdopen(inherited, "rb") as out:
        command = host.inside(
            *namegate_run("--", "bash", "-c", f"echo out; echo more >&{given}; exec >&- {given}>&-; exec sleep 300")
        )
        run = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[given], env=host.environment)
        os.close(given)
        try:
            assert run.stdout is not None
            assert (run.stdout.read(), out.read()) == (b"out\n", b"more\n")
        finally:
            run.kill()
            run.communicate(timeout=10)


def test_runs_side_by_side(host: Host) -> None:
    """Each has its own number, network and policy."""
    runs = [
        host.start("--allow", "a.test" if i % 2 else "evil.test", "--", sys.executable, "-c", CONNECT, "a.test", "evil.test")
        for i in range(CONCURRENT)
    ]
    for i, run in enumerate(runs):
        said, _ = run.communicate(timeout=60)
        outcome = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert run.returncode == 0, said
        assert [what == "connected" for what, _ in outcome.values()] == ([True, False] if i % 2 else [False, True]), said
    until(lambda: len(left(host)) <= len(left_of_one(host)), GONE_S_MAX)


def left_of_one(host: Host) -> set[str]:
    """Of the run that lasts."""
    return {each for each in left(host) if "ngrun0" in each or each.endswith("run0")} | {"ng-runs", "ng-runs-peer"}


def processes(marker: str) -> list[str]:
    said = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if marker in line]


def test_nothing_stays_of_a_killed_run(host: Host) -> None:
    """kill -9 at any moment: within five seconds no interface, table, route or process of it."""
    before = left(host)
    seed = int(os.environ.get("RUN_SEED", secrets.randbelow(1 << 31)))
    print(f"RUN_SEED={seed}")
    moments = random.Random(seed)
    for i in range(KILLS):
        marker = f"sleep 3{i:05}.{os.getpid()}"
        run = host.start("--allow", "a.test", "--", "sh", "-c", f"setsid {marker} & exec {marker}")
        time.sleep(moments.uniform(0.02, 0.7))
        run.kill()
        run.communicate(timeout=10)
        until(lambda: left(host) <= before and not processes(marker), GONE_S_MAX)  # noqa: B023 - called at once
    assert host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, "a.test").returncode == 0


def test_the_agent_ends_and_the_kernel_goes_on(host: Host, tmp_path: Path) -> None:
    """Its end is said once; what was denied stays so; another agent takes the run again, and tells what is denied again."""
    inode = Path(f"/run/netns/{host.lab.host}").stat().st_ino
    control = Path(f"/run/namegate-runs/{inode}/control.sock")
    script = """import socket, sys
def connect(target):
    try:
        socket.create_connection((target, 443), timeout=8).close()
        return "connected"
    except OSError as error:
        return type(error).__name__
print("started", flush=True)
for line in sys.stdin:
    print(connect(line.strip()), flush=True)
"""
    command = host.inside(sys.executable, "-m", "agent", "run", "--allow", "a.test", "--", sys.executable, "-c", script)
    errors = tmp_path / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=host.environment
        ) as run,
    ):
        given, said = run.stdin, run.stdout
        assert given is not None
        assert said is not None

        def connect(target: str) -> str:
            print(target, file=given, flush=True)
            return said.readline().strip()

        assert said.readline() == "started\n"
        agent = pid_behind(control)
        os.kill(agent, signal.SIGKILL)
        assert connect(DENIED) != "connected"
        until(lambda: connect("a.test") == "connected", 20)
        until(lambda: connect("evil.test") == "gaierror" and "namegate: denied: evil.test (A)" in errors.read_text(), 20)
        assert pid_behind(control) not in {0, agent}
        assert f"SigBlk:\t{0:016}\n" in Path(f"/proc/{pid_behind(control)}/status").read_text()  # it can be ended
        given.close()
        assert run.wait(timeout=10) == 0
    assert errors.read_text().count("the agent ended") == 1


def pid_behind(control: Path) -> int:
    """0: nobody listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(control))
        except OSError:
            return 0
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def test_a_named_agents_own_policies_widen_nothing(tmp_path: Path) -> None:
    """An administrator's agent serves the run; that its policies allow everything is no matter for it."""
    open_policy = (
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: open}\n"
        "spec:\n  endpointSelector: {}\n  egress:\n  - toEntities: [all]\n"
    )
    with Lab(records={"a.test.": [f"A {ALLOWED}"], "evil.test.": [f"A {DENIED}"]}, ports=(443,)) as lab:
        host = Host(lab)
        with RunningAgent(lab, open_policy, tmp_path) as agent:
            named = {"NAMEGATE_CONTROL": str(agent.configuration.parent / "run" / "control.sock")}
            targets = ["a.test", "evil.test", DENIED]
            done = host.run("--allow", "a.test", "--", sys.executable, "-c", CONNECT, *targets, environment=named)
            said = json.loads(done.stdout)
            assert [said[target][0] for target in targets] == ["connected", "gaierror", "ConnectionRefusedError"], done
            assert not pid_behind(Path(f"/run/namegate-runs/{Path(f'/run/netns/{lab.host}').stat().st_ino}/control.sock"))
        refused = host.run("--", "true", environment=named)
        assert refused.returncode == 125
        assert "no agent answers at" in refused.stderr
