"""Names as people and clients write them: bug cases about case, dots, label borders, wide patterns and implied DNS.

Shown elsewhere, and not written twice:

    case 46, 52, 53              search lists and stub resolvers: tests/netns/test_bug_cases_dns.py
    case 48, 49, the warnings    also every form of them: tests/unit/test_policy_check.py
    case 58, other spellings     tests/unit/test_policy_cnp.py, tests/unit/test_policy_shorthand.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.core.types import text_of
from tests.bug_scene import Scene, is_denied, policies_of


def check(directory: Path, text: str) -> Result:
    """`namegate check` of a file with this text."""
    path = directory / "p.yaml"
    path.write_text(text)
    return CliRunner().invoke(main, ["check", str(path)])


def test_case_041_a_question_in_mixed_case() -> None:
    """Clients vary the case to make replies hard to forge: allowed, and the reply repeats their spelling bit for bit."""
    scene = Scene("a.test:443/tcp")
    answer = scene.resolve("A.TeSt", "A.TeSt 60 A 198.51.100.43")
    assert [str(question.name) for question in answer.message.question] == ["A.TeSt."]
    assert scene.learned == {"a.test.": {"198.51.100.43"}}
    assert scene.passes("198.51.100.43")


@pytest.mark.parametrize("spelling", ["a.test.", "a.test", "A.Test"])
def test_case_043_one_name_in_three_spellings(spelling: str) -> None:
    """A final dot or another case is the same selector and the same identity."""
    scene = Scene(f"{spelling}:443/tcp")
    scene.resolve("a.test", "198.51.100.44")
    assert scene.passes("198.51.100.44")
    assert [selector.label for selector in scene.world.engine.names.selectors.values()] == ["fqdn:a.test."]
    labels = scene.world.engine.ipcache.label_set(1, bytes([198, 51, 100, 44]))
    assert labels == {"fqdn:a.test.", "reserved:world"}


def test_case_044_a_suffix_ends_at_a_label_border() -> None:
    """Neither a longer label nor the pattern's name inside another one."""
    scene = Scene("*.a.test:443/tcp")
    assert is_denied(scene, scene.ask("xa.test"))
    assert is_denied(scene, scene.ask("a.test.evil.test"))
    assert scene.resolve("x.a.test", "198.51.100.45").addresses == ["198.51.100.45"]
    assert scene.learned == {"x.a.test.": {"198.51.100.45"}}


@pytest.mark.parametrize(
    ("entry", "opens"), [("*.test", "test."), ("*.com", "com."), ("**.com", "com."), ("*", "every name there is")]
)
def test_case_048_wide_patterns_are_taken_with_a_warning(entry: str, opens: str, tmp_path: Path) -> None:
    """The warning names the line and what the pattern opens; the exit code is good."""
    result = check(tmp_path, f"a.test:443\n{entry}:443\n")
    (warning,) = [line for line in result.output.splitlines() if line.startswith("warning:")]
    assert ":2:" in warning
    assert opens in warning
    assert result.exit_code == 0
    assert "warning" not in check(tmp_path, "a.test:443\n").output


def test_case_049_a_lone_star() -> None:
    """Every name may be asked and its addresses reached; an address nobody asked for is not reached."""
    scene = Scene("*:443/tcp")
    assert not scene.passes("198.51.100.49")
    scene.resolve("any.name.test", "198.51.100.49")
    assert scene.passes("198.51.100.49")
    assert not scene.passes("203.0.113.9")
    assert scene.world.engine.proxy.history.on(bytes([203, 0, 113, 9]), scene.world.now) == []


def test_case_050_an_underscore_belongs_to_the_name() -> None:
    """In the list and inside what a star takes."""
    scene = Scene("reddit_webonly.app.test:443/tcp\n*.u.test:443/tcp")
    scene.resolve("reddit_webonly.app.test", "198.51.100.50")
    scene.resolve("a_b.u.test", "198.51.100.51")
    assert scene.passes("198.51.100.50")
    assert scene.passes("198.51.100.51")
    assert scene.learned.keys() == {"reddit_webonly.app.test.", "a_b.u.test."}
    assert is_denied(scene, scene.ask("redditwebonly.app.test"))


def test_case_055_no_address_of_one_family_is_no_refusal() -> None:
    """A and AAAA at once: the empty one is NOERROR and empty, and the other works."""
    scene = Scene("a.test:443/tcp")
    six, four = scene.ask("a.test", "AAAA"), scene.ask("a.test")
    answer = scene.reply(six)
    assert (answer.rcode, answer.message.answer) == ("NOERROR", [])
    assert scene.reply(four, "a.test 60 A 198.51.100.55").addresses == ["198.51.100.55"]
    assert scene.passes("198.51.100.55")


BY_ADDRESS = """\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p}
spec:
  endpointSelector: {}
  egress:
    - toFQDNs: [{matchName: "192.0.2.7"}]
"""


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        (BY_ADDRESS, 7, "192.0.2.7/32"),
        ("a.test:443\nfqdn:192.0.2.7\n", 2, "cidr:192.0.2.7/32"),
        ("a.test:443\nfqdn:2001:db8::7\n", 2, "2001:db8::7/128"),
    ],
)
def test_case_058_an_address_in_the_list_of_names(text: str, line: int, remedy: str, tmp_path: Path) -> None:
    """An error that names the line and says what to write instead."""
    result = check(tmp_path, text)
    assert result.exit_code == 1
    assert f":{line}:" in result.output
    assert remedy in result.output
    assert "Traceback" not in result.output


def test_case_144_names_imply_their_questions(tmp_path: Path) -> None:
    """Asked of any server, exactly the names of the policy are answered; the server asked sees nothing; `check` says so."""
    scene = Scene("a.test:443/tcp")
    for server in ("203.0.113.1", "203.0.113.53"):
        asker = scene.ask("a.test", server=server)
        number = scene.world.transaction_of(asker)
        assert number is not None
        assert text_of(scene.world.asked[number].server) == "203.0.113.53", "the agent's upstream, whoever was asked"
        assert scene.reply(asker, "a.test 60 A 198.51.100.144").addresses == ["198.51.100.144"]
        assert is_denied(scene, scene.ask("other.test", server=server))
    assert scene.passes("198.51.100.144")
    implied = [line for line in check(tmp_path, "a.test:443/tcp\n").output.splitlines() if line.startswith("implied:")]
    assert len(implied) == 1
    assert "a.test." in implied[0]


def test_the_policies_of_a_scene_are_read_as_files() -> None:
    """What is refused as a file cannot be played."""
    with pytest.raises(AssertionError):
        policies_of("fqdn:192.0.2.7")
