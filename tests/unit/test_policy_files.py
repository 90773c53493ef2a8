"""Policy files: which form, taken whole or not at all, and what hostile ones do (nothing)."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.documents.remarks import MISTAKES_MAX, PolicyError
from agent.policy.files import FILE_OCTETS_MAX, read_files, read_policies, read_policy_text

GOOD = """\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p, namespace: shop, annotations: {namegate/except-names: "a.test, *.b.test"}}
spec:
  endpointSelector: {matchLabels: {"k8s:app": web}, matchExpressions: [{key: a, operator: NotIn, values: [b]}]}
  enableDefaultDeny: {egress: true}
  egress:
  - toFQDNs: &names
    - matchName: api.example.com
    - matchPattern: "*.example.org"
    toPorts: [{ports: [{port: "443", endPort: 450, protocol: TCP}]}]
  - toFQDNs: *names
    icmps: [{fields: [{family: IPv6, type: 128}]}]
  - toCIDRSet: [{cidr: 10.0.0.0/8, except: [10.96.0.0/12]}]
    toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*"}]}}]
  egressDeny: [{toEntities: [host]}]
---
# nothing
---
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: q}
specs: [{endpointSelector: {}, ingress: [{fromCIDR: [192.0.2.0/24]}]}]
"""


def test_each_file_has_the_form_its_content_has(tmp_path: Path) -> None:
    """Names of files say nothing: a list may be called p.yaml, and JSON is YAML."""
    (tmp_path / "p.yaml").write_text("\ufeff# names\n\na.test:443\r\n*.b.test\r\n")
    (tmp_path / "q.txt").write_text("# policy\n\n" + GOOD)
    json_policy: dict[str, object] = {"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "r"}}
    json_policy["spec"] = {"endpointSelector": {}, "egress": [{}]}
    (tmp_path / "r").write_text(json.dumps(json_policy, indent=1))
    policies = read_policies(sorted(tmp_path.iterdir()))
    assert [policy.name for policy in policies] == ["p.yaml", "p", "q[0]", "r"]


def test_one_mistake_refuses_all_and_every_mistake_is_named(tmp_path: Path) -> None:
    """`file:line: field: message`, a line each, all files."""
    (tmp_path / "a").write_text("a.test\n")
    (tmp_path / "b").write_text("b.test:x\n")
    (tmp_path / "c").write_text(GOOD.replace("endPort: 450", "endPort: 1").replace("[host]", "[hosts]"))
    with pytest.raises(PolicyError) as refused:
        read_policies([*sorted(tmp_path.iterdir()), tmp_path / "d"])
    lines = str(refused.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(tmp_path / place) for place in ("b:1", "c:11", "c:16", "d:1")]
    assert ": spec.egressDeny[0].toEntities[0]: 'hosts' is no entity" in lines[2]
    assert [policy.name for policy in read_files(sorted(tmp_path.iterdir())).policies] == ["a"]


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", 1, "no policy in the file"),
        (b"# only\n\n# words\n", 1, "no policy in the file"),
        (b"---\n---\n", 1, "no policy in the file"),
        (b"- a.test\n- b.test\n", 1, "no '- ' in front"),
        (b"a.test\n\xff\xfe\n", 2, "UTF-8"),
        (b"a.test\n\x7fELF\0\0", 2, "control character"),
        ("a.test\nb.test\u2028c.test\n".encode(), 2, "control character"),
        (b"a.test\nb.test\rc.test\n", 2, "control character"),
        (b"a: [" + b"1," * 900_000, 1, "split it"),
        (b"spec: [\n", 2, "no YAML"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefghi"),
            6,
            "written out",
        ),
        (b"a: &a [*a]\n", 1, "no anchor"),
        (b"a: " + b"[" * 100_000, 1, "nested"),
        (b"a: " + b"9" * 100_000 + b"\n", 1, "apiVersion"),
    ],
)
def test_files_that_are_no_policies(data: bytes, line: int, words: str) -> None:
    """Refused with a line, in bounded time."""
    (mistake,) = read_policy_text("p", data).mistakes
    assert (mistake.line, words in mistake.message) == (line, True), str(mistake)


def test_a_number_of_a_hundred_thousand_digits_is_out_of_range() -> None:
    """Nobody turns it into a number first."""
    (mistake,) = read_policy_text("p", GOOD.replace("450", "9" * 100_000).encode()).mistakes
    assert "out of range" in mistake.message
    assert len(mistake.message) < 200


def test_pipes_devices_directories_and_giants_are_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to must not stop the agent."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "giant").open("wb") as giant:
        giant.truncate(1 << 30)
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    paths = ["pipe", "giant", "zero", "loop", ".", "missing"]
    mistakes = read_files(tmp_path / path for path in paths).mistakes
    assert [mistake.file for mistake in mistakes] == [str(tmp_path / path) for path in paths]
    assert [any(words in m.message for words in ("plain file", "split it", "cannot be read")) for m in mistakes] == [True] * 6
    assert f"{FILE_OCTETS_MAX >> 20} MiB" in mistakes[1].message


def test_a_file_wrong_in_every_line_has_a_bounded_number_of_mistakes() -> None:
    """A file of another kind costs bounded memory, whatever its size."""
    assert len(read_policy_text("p", b"a.test/x\n" * 5_000).mistakes) == MISTAKES_MAX


def test_ten_thousand_names_are_taken() -> None:
    """The bounds are far from what people have."""
    names = "".join(f"    - matchName: n{number}.example.com\n" for number in range(10_000))
    text = GOOD.split("  egress:\n", maxsplit=1)[0] + "  egress:\n  - toFQDNs:\n" + names
    reading = read_policy_text("p", text.encode())
    assert not reading.mistakes
    assert len(reading.policies[0].rules[0].peers or ()) == 10_000


PIECES = [
    "{}",
    "[]",
    "null",
    "*x",
    "&x ",
    "!!int ",
    "'",
    '"',
    ": ",
    "- ",
    "\n",
    "\t",
    "[",
    "]",
    "{",
    "}",
    "#",
    "|",
    "<<",
    "---",
    "no",
    "010",
    "1:30",
    "9" * 400,
    "\x85",
    "\u2028",
    "ü",
    "\ufeff",
    "%",
    "@",
    "`",
    ",",
    "?",
]


@given(st.integers(0, 2**32), st.integers(1, 6), st.binary(max_size=12) | st.sampled_from([piece.encode() for piece in PIECES]))
def test_whatever_is_done_to_a_file_it_is_taken_or_refused(seed: int, times: int, piece: bytes) -> None:
    """Cut, doubled, exchanged, with foreign pieces in it: mistakes with lines of the file, never another exception."""
    choices = random.Random(seed)
    data = GOOD.encode()
    for _ in range(times):
        a, b = sorted(choices.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + choices.choice([1, 3, 40, 400]))
        data = (
            data[:a]
            + choices.choice([b"", piece, data[a:b] * 2, data[a:b][::-1], PIECES[choices.randrange(len(PIECES))].encode()])
            + data[b:]
        )
    reading = read_policy_text("p", data)
    assert bool(reading.policies) != bool(reading.mistakes)
    for mistake in reading.mistakes:
        assert 1 <= mistake.line <= data.count(b"\n") + 2
        assert str(mistake).isprintable(), str(mistake)


@given(st.text(max_size=60))
def test_any_text_is_taken_or_refused(text: str) -> None:
    """Also as a line of the shorthand."""
    reading = read_policy_text("p", text.encode("utf-8", "surrogatepass"))
    assert bool(reading.policies) != bool(reading.mistakes)
