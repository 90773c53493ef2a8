"""What is attached, kept in a file: the next process reads what this one wrote, or refuses to start."""

from __future__ import annotations

import contextlib
import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attachments import COMMAND, LEASE, Attachment, Attachments, Followed, PolicyText, own_policies
from agent.config import ENDPOINT_KEYS, ConfigError, Denied, EndpointSettings, Learn, endpoint_of, said_of
from agent.control import ControlError
from agent.core.types import Direction, Orientation
from agent.documents.remarks import PolicyError

DEVICE = "ng-gate"
# Plain words that YAML would take for something else, and what is legal and rarely seen.
NAMES = st.sampled_from(("eth0", "no", "1", "0x1", "~", "1:30", "é", "\U0001f600", "#x", "- a", "{", "'", '"', "a\\b", "&a"))
LABELS = st.text(string.ascii_letters + string.digits, min_size=1, max_size=63)
ADDRESSES = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
ENDPOINTS = st.builds(
    EndpointSettings,
    interface=st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/:*?["), min_size=1, max_size=3) | NAMES,
    labels=st.dictionaries(LABELS | st.just("a.example/b"), LABELS | st.sampled_from(("", "no", "010", "1e3")), max_size=3),
    addresses=st.lists(ADDRESSES, max_size=3, unique=True).map(tuple),
    audit=st.booleans(),
    learn=st.sampled_from(Learn),
    dhcp=st.sampled_from((None, True, False)),
    denied=st.sampled_from(Denied),
    line=st.just(1),
)


def is_taken(endpoint: EndpointSettings) -> bool:
    """By the rules for interfaces and addresses, which are tested elsewhere."""
    try:
        endpoint_of({"interface": endpoint.interface, "addresses": said_of(endpoint)["addresses"]}, DEVICE)
    except ConfigError:
        return False
    return True


@given(ENDPOINTS.filter(is_taken))
def test_an_endpoint_said_is_the_endpoint_read(endpoint: EndpointSettings) -> None:
    """Also by way of JSON, as in the file."""
    assert endpoint_of(json.loads(json.dumps(said_of(endpoint))), DEVICE) == endpoint


def test_an_uplink_said_is_an_uplink_read() -> None:
    """It has no addresses of its own to say."""
    endpoint = EndpointSettings("eth0", orientation=Orientation.UPLINK, dhcp=True, line=1)
    assert endpoint_of(said_of(endpoint), DEVICE) == endpoint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(("\ud800", "\x85", "\u2028", "lo")),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ENDPOINT_KEYS), JSON))
def test_whatever_is_said_is_an_endpoint_or_refused(said: dict[str, object]) -> None:
    """Anything else would end the agent: it comes through the control socket."""
    with contextlib.suppress(ConfigError):
        assert endpoint_of(said, DEVICE).interface not in ("", "lo", DEVICE)


@pytest.mark.parametrize(
    "said",
    [
        {"interface": "a", "labels": {"k" * 2_000: "v"}},
        {"interface": "a", "labels": {"k": "\ud800"}},
        {"interface": "\ud83d", "labels": {}},
        {"interface": "a", "labels": json.loads("[" * 200 + "]" * 200)},
        {"interface": "veth*"},
        {},
    ],
)
def test_what_no_file_could_say_is_refused(said: dict[str, object]) -> None:
    """Keys and nestings that the parser refuses, characters that cannot be written, a pattern, nothing."""
    with pytest.raises(ConfigError):
        endpoint_of(said, DEVICE)


# --- the file --------------------------------------------------------------------------------------------------------------

TEXTS = (PolicyText("--allow", "a.test\n"), PolicyText("b.yaml", "b.test:443/tcp # \u00fc\n"))
ATTACHED = Attachment(7, EndpointSettings("veth7", {"app": "x"}, audit=True, line=1), COMMAND)
NETWORKS = ("10.9.0.0/16", "2001:db8::7")
LEASED = Attachment(8, EndpointSettings("veth8", line=1), LEASE, TEXTS, own_policies(TEXTS, NETWORKS), allow_addresses=NETWORKS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attachments"


def written(path: Path) -> Attachments:
    attachments = Attachments(path, DEVICE)
    attachments.followed["web"] = Followed("web", "", EndpointSettings("container", line=1))
    attachments.sysctls["ipv4/conf/veth8/forwarding"] = "0"
    attachments.put(ATTACHED)
    attachments.put(LEASED)
    return attachments


def test_the_next_process_knows_all_of_it(path: Path) -> None:
    """Settings, owners, policies, containers and switches; what was removed is not there."""
    before = written(path)
    before.report("engine", {9: EndpointSettings("veth9", line=1)})
    after = Attachments(path, DEVICE)
    assert (after.by_ifindex, after.followed, after.sysctls) == (before.by_ifindex, before.followed, before.sysctls)
    assert set(after.by_ifindex) == {7, 8, 9}
    after.remove([7, 9])
    assert set(Attachments(path, DEVICE).by_ifindex) == {8}


def test_policies_of_attachments_are_for_root(path: Path) -> None:
    """The directory may be somebody else's; and a file of before keeps no wider mode."""
    written(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


NOT_OURS = ["", "{", "null", "[]", "{}", "\xff", "[" * 100_000]
WRONG: list[dict[str, object]] = [
    {"version": 2},
    {"sysctls": []},
    {"sysctls": 7},
    {"attachments": [7]},
    {"containers": [["web"]]},
    {"ifindex": "seven"},
    {"texts": [["p", "a b"]]},
    {"endpoint": 7},
    {"endpoint": {"interface": "lo"}},
    {"endpoint": {"interface": "veth7", "colour": "red"}},
]


def refuses(path: Path, content: bytes) -> None:
    """In a sentence that names it, and it stays as it is."""
    path.write_bytes(content)
    with pytest.raises(ControlError, match=r"attachments, which says what was attached, cannot be read .*: remove it to start"):
        Attachments(path, DEVICE)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", NOT_OURS, ids=range(len(NOT_OURS)))
def test_a_file_that_is_not_ours_refuses_the_start(path: Path, content: str) -> None:
    """To start without would let go what was attached."""
    refuses(path, content.encode("latin-1"))


@pytest.mark.parametrize("wrong", WRONG, ids=map(str, WRONG))
def test_a_file_of_another_release_refuses_the_start(path: Path, wrong: dict[str, object]) -> None:
    """It says one thing that this one does not understand."""
    Attachments(path, DEVICE).put(ATTACHED)
    said = json.loads(path.read_text())
    (attachment,) = said["attachments"]
    (said if wrong.keys() <= said.keys() else attachment).update(wrong)
    refuses(path, json.dumps(said).encode())


def test_a_file_cut_anywhere_refuses_the_start(path: Path) -> None:
    """It is written beside and renamed, so nobody of ours has left such a thing."""
    written(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        refuses(path, whole[:length])


def test_what_cannot_be_written_is_not_attached(path: Path) -> None:
    """The next process would not police it. What goes is gone all the same, and what was there before stays."""
    attachments = written(path)
    path.with_name("attachments.new").mkdir()
    for attachment in (replace(ATTACHED, owner=LEASE), replace(ATTACHED, ifindex=10)):
        with pytest.raises(ControlError, match="attachments cannot be written: Is a directory"):
            attachments.put(attachment)
    assert attachments.by_ifindex == {7: ATTACHED, 8: LEASED}
    attachments.remove([7])
    attachments.restore(8, replace(LEASED, owner=COMMAND))
    assert attachments.report("engine", {9: EndpointSettings("veth9")})
    assert {ifindex: each.owner for ifindex, each in attachments.by_ifindex.items()} == {8: COMMAND, 9: "engine"}


def test_what_a_person_attached_is_not_the_engines(path: Path) -> None:
    """An engine reports all that it has; only its own goes with it."""
    attachments = written(path)
    found = {7: EndpointSettings("veth7"), 9: EndpointSettings("veth9")}
    assert attachments.report("engine", found)
    assert not attachments.report("engine", found)
    assert attachments.by_ifindex[7] is ATTACHED
    assert attachments.report("engine", {})
    assert set(attachments.by_ifindex) == {7, 8}


# --- policies of its own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [(), TEXTS])
def test_own_policies_close_both_directions(texts: tuple[PolicyText, ...]) -> None:
    """Whatever they say, also nothing: only the host may come in."""
    policies = own_policies(texts)
    assert any(policy.default_deny_egress for policy in policies)
    assert any(policy.default_deny_ingress for policy in policies)
    (inward,) = [rule for policy in policies for rule in policy.rules if rule.direction is Direction.INGRESS]
    assert [str(peer) for peer in inward.peers or ()] == ["host"]


def test_own_policies_open_the_guard_as_asked() -> None:
    """Each of them, whatever it lets through itself; what is no network is a mistake like others."""
    policies = own_policies(TEXTS, NETWORKS)
    assert {tuple(map(str, policy.allow_addresses)) for policy in policies} == {("10.9.0.0/16", "2001:db8::7/128")}
    with pytest.raises(PolicyError, match="--allow-addresses"):
        own_policies(TEXTS, ["10.0.0.0/33"])


def test_mistakes_of_all_texts_are_told_by_their_names() -> None:
    """As files' are; text that is no text is one."""
    texts = {"--allow": "a b", "x.yaml": "\ud800", "empty": "", "right": "a.test"}
    with pytest.raises(PolicyError) as caught:
        own_policies(PolicyText(*each) for each in texts.items())
    assert [mistake.file for mistake in caught.value.mistakes] == ["--allow", "x.yaml", "empty"]
