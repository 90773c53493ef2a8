"""Policy files: bug cases about what is refused, taken and meant, and what `check` says about it.

Shown elsewhere, and not written twice:

    case 137, 140   every other key, type and YAML trap: tests/unit/test_policy_cnp.py, tests/unit/test_policy_files.py
    case 144        implied DNS: tests/unit/test_bug_cases_names.py
    case 165        `explain`, which names both rules: tests/unit/test_explain.py; here the denial's rule is in the verdict
    case 171        the count of distinct names for each pattern is not built yet; here: bounded, and nobody else is slowed
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.core.settings import Settings
from agent.datapath.abi import Reason
from agent.policy.files import read_policy_text
from tests.bug_scene import Scene, policies_of
from tests.sim.world import UPSTREAM

HEADER = """\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p}
spec:
  endpointSelector: {}
  egress:
"""


def check(directory: Path, text: str) -> Result:
    """`namegate check` of a file with this text."""
    path = directory / "p.yaml"
    path.write_text(text)
    result = CliRunner().invoke(main, ["check", str(path)])
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize("key", ["ports: [{port: '443'}]", "toPort: [{ports: [{port: '443'}]}]"])
def test_case_137_ports_at_the_wrong_level(key: str, tmp_path: Path) -> None:
    """Dropped in silence they would make it a rule for all ports: an error with the key and its line."""
    text = f"{HEADER}    - toFQDNs: [{{matchName: a.test}}]\n      {key}\n"
    result = check(tmp_path, text)
    assert result.exit_code == 1
    assert ":8:" in result.output
    assert key.partition(":")[0] in result.output
    assert read_policy_text("p.yaml", text.encode()).policies == ()
    assert check(tmp_path, text.replace(key, "toPorts: [{ports: [{port: '443'}]}]")).exit_code == 0


def test_case_139_one_rule_that_cannot_be_read(tmp_path: Path) -> None:
    """The whole file is refused with that rule's line; no part of it comes into force."""
    networks = [f"198.51.{number}.0/24" for number in range(10)]
    rules = "".join(f"    - toCIDR: ['{network}']\n" for network in networks)
    wrong = rules.replace(networks[6], "300.1.2.0/24")
    result = check(tmp_path, HEADER + wrong)
    assert result.exit_code == 1
    assert f":{HEADER.count(chr(10)) + 7}:" in result.output
    assert "300.1.2.0/24" in result.output
    assert read_policy_text("p.yaml", (HEADER + wrong).encode()).policies == ()
    assert check(tmp_path, HEADER + rules).exit_code == 0


BY_NAME = HEADER + "    - toFQDNs: [{matchName: a.test}]\n      toPorts: [{ports: [{port: '443'}]}]\n"


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        (BY_NAME.replace("matchName: a.test", "matchName: no"), 7, "quote"),
        (BY_NAME.replace("matchName: a.test", "matchName: on"), 7, "quote"),
        (BY_NAME.replace("port: '443'", "port: 0443"), 8, "quote"),
        (BY_NAME.replace("port: '443'", "port: 443"), 8, "quote"),
        (BY_NAME.replace("ports: [{port: '443'}]", 'ports: "443"'), 8, "list"),
        (BY_NAME.replace("      toPorts", "\t  toPorts"), 8, "tab"),
        (BY_NAME + "      toPorts: [{ports: [{port: '80'}]}]\n", 9, "twice"),
        (BY_NAME.replace("{matchName: a.test}", "{matchPattern: *.a.test}"), 7, "quote"),
        ("", 1, "no policy"),
        ("---\n", 1, "no policy"),
    ],
)
def test_case_140_traps_of_yaml(text: str, line: int, hint: str, tmp_path: Path) -> None:
    """Nothing is guessed: refused with the line and what to do."""
    result = check(tmp_path, text)
    assert result.exit_code == 1
    assert f":{line}:" in result.output
    assert hint in result.output


def test_case_140_what_is_quoted_is_taken(tmp_path: Path) -> None:
    """`port: "443"` is the one right form."""
    assert check(tmp_path, BY_NAME).exit_code == 0


def test_case_142_networks_with_host_bits(tmp_path: Path) -> None:
    """Taken and masked, with a warning that shows both forms; a length that is there is kept."""
    text = "203.0.113.9/25\n2001:db8:42::9/64\n192.0.2.0/24\n"
    result = check(tmp_path, text)
    warnings = [line for line in result.output.splitlines() if line.startswith("warning:")]
    assert result.exit_code == 0
    assert len(warnings) == 2
    for written, masked in (("203.0.113.9/25", "203.0.113.0/25"), ("2001:db8:42::9/64", "2001:db8:42::/64")):
        assert any(written in warning and masked in warning for warning in warnings)
    scene = Scene(text)
    assert scene.passes("203.0.113.100")
    assert not scene.passes("203.0.113.200")
    assert scene.passes("2001:db8:42::1")


def test_case_121_a_policy_larger_than_the_map(tmp_path: Path) -> None:
    """`check` says so with both numbers; a reload with it is refused before anything changes."""
    networks = [f"198.{18 + (number >> 16)}.{number >> 8 & 255}.{number & 255}/32" for number in range(16_400)]
    result = check(tmp_path, "\n".join(networks))
    assert result.exit_code == 1
    assert "16400" in result.output
    assert "16384" in result.output
    assert check(tmp_path, "\n".join(networks[:1_000])).exit_code == 0
    scene = Scene("203.0.113.0/24", Settings(upstreams=(UPSTREAM,), policy_rows_per_set_max=100))
    rows = {table: dict(of_table) for table, of_table in scene.world.kernel.rows.items()}
    scene.world.apply(*policies_of("\n".join(networks[:200])), ticket=1)
    scene.world.advance(0.0)
    error = scene.world.settled[1]
    assert error is not None
    assert "100" in error
    assert scene.world.kernel.rows == rows
    assert scene.passes("203.0.113.9")
    assert not scene.passes("198.18.0.1")


def test_case_165_an_address_under_a_denial_and_an_allow() -> None:
    """The reply is released whole; the denied network beats the name, and the verdict has the denial's rule."""
    scene = Scene("!203.0.113.0/24\na.test:443/tcp")
    answer = scene.resolve("a.test", "203.0.113.7", "198.51.100.165")
    assert answer.addresses == ["203.0.113.7", "198.51.100.165"]
    denied = scene.packet("203.0.113.7", 443)
    assert (denied.passes, denied.reason) == (False, Reason.DROP_DENY)
    assert str(scene.world.engine.cookies.rule_by_cookie[denied.cookie].origin) == "p:1"
    assert scene.passes("198.51.100.165")


def test_case_171_a_pattern_as_a_data_channel() -> None:
    """A thousand labels a minute are answered, teach nothing, pile nothing up, and no one else waits for them."""
    scene = Scene({1: "*.a.test:443/tcp", 2: "b.test:443/tcp"})
    for number in range(1_000):
        assert scene.reply(scene.ask(f"{number:x}-payload.a.test"), rcode="NXDOMAIN").rcode == "NXDOMAIN"
        if number % 16 == 0:
            answer = scene.resolve("b.test", "198.51.100.173", endpoint=2)
            assert (answer.addresses, answer.at) == (["198.51.100.173"], scene.world.now)
        scene.at(number * 0.06)
    engine = scene.world.engine
    assert scene.learned == {"b.test.": {"198.51.100.173"}}
    assert not engine.proxy.transactions
    assert len(engine.proxy.history) == 1
    assert scene.passes("198.51.100.173", endpoint=2)
