"""A minute of fuzzing in every run of the suite, and the proof that it finds what is wrong.

FUZZ_SECONDS: how long each process fuzzes; 30 by default, by two processes. At length: scripts/fuzz dns.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agent.dns
from agent.dns import messages, removal, wire
from tests.fuzz import __main__ as command
from tests.fuzz.comparing import Disagreement
from tests.fuzz.judging import Judge
from tests.fuzz.making import Message

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
JOBS = 2
ROOT = Path(__file__).parents[2]
# The rarest thing that is counted comes once in some thousands.
EVERY_PLACE = (
    "question", "no question: formerr", "no question: ignore", "no question: notimp", "reply that teaches", "reply: loop",
    "reply: malformed", "reply: mismatch", "reply: ok", "reply: truncated", "reply altered", "reply that cannot be altered",
    "reply cut to the client's size", "through the engine", "compared: neither", "compared: ours alone: stepped over",
    "compared: ours alone: parameters", "compared: dnspython alone: two aliases", "compared: dnspython alone: loop",
)  # fmt: skip


def run(*arguments: str, hash_seed: str = "0") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", "dns", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def counts_in(said: str) -> dict[str, int]:
    return {what: int(count) for count, what in re.findall(r"^ +(\d+) (.+)$", said, re.MULTILINE)}


@pytest.mark.timeout(SECONDS * 3 + 120)
def test_a_minute_of_messages_finds_nothing() -> None:
    """Two processes, half a minute each, with a new seed; the stream gets to every place, and half of what is compared with
    dnspython is good for both."""
    fuzzing = run("--seconds", str(SECONDS), "--jobs", str(JOBS))
    said, _ = fuzzing.communicate()
    print(said)
    assert fuzzing.returncode == 0, said
    counts = counts_in(said)
    assert [what for what in EVERY_PLACE if not counts.get(what)] == []
    assert counts["compared: both"] * 2 >= counts["compared"]


def test_the_same_seed_is_the_same_run() -> None:
    """With another number of processes and other hashes too."""
    runs = [
        run("--messages", "3000", "--seed", "7", "--jobs", jobs, hash_seed=hash_seed)
        for jobs, hash_seed in (("1", "1"), ("2", "2"))
    ]
    first, second = (re.sub(r" in \d+ s by \d processes", "", one.communicate()[0]) for one in runs)
    assert "3000 messages, digest" in first
    assert first == second


# What the code would be with a mistake in it: module, what stands there, what would stand there.
MISTAKES = {
    "a pointer may go forward": (wire, "if target >= start or jumps == JUMPS_MAX:", "if jumps == JUMPS_MAX:"),
    "a pointer may go forward for ever": (wire, "if target >= start or jumps == JUMPS_MAX:", "if False:"),
    "the authority section teaches": (
        wire,
        "at = records.read_answers(at, answers)\n",
        "at = records.read_answers(at, answers + authorities)\n        authorities = 0\n",
    ),
    "every owner teaches": (
        wire,
        "ttls = self._ttls_by_owner.get(question.wire_name)",
        "ttls = {a: t for each in self._ttls_by_owner.values() for a, t in each.items()}",
    ),
    "the chain is not followed": (wire, "owner = self._aliases.get(owner) or self._renamed(owner)", "owner = None"),
    "the chain may come back": (wire, "if owner in chain:", "if False:"),
    "OPT's part of the result code is forgotten": (wire, "rcode |= message[opt + 5] << 4", "pass"),
    "the end of the message is not looked at": (
        wire,
        'if at > len(message):\n            raise WireError(Fault.FORMERR, "cut short")\n        return at\n',
        "return at\n",
    ),
    "an error of struct comes out": (
        wire,
        "except (IndexError, struct.error, WireError):\n        return _n",
        "except WireError:\n        return _n",
    ),
    "a TTL with the top bit is taken": (wire, "ttl = 0  # RFC 2181 8", "pass"),
    "alias mode has hints": (wire, "if octets and priority:", "if octets:"),
    "any class teaches": (wire, "elif rclass != CLASS_IN:", "elif False:"),
    "a name may have any length": (wire, "if len(name) > NAME_OCTETS_MAX:", "if False:"),
    "a question may be compressed": (
        wire,
        'if length > LABEL_OCTETS_MAX:\n                raise WireError(Fault.FORMERR, "a compressed or',
        'if False:\n                raise WireError(Fault.FORMERR, "a compressed or',
    ),
    "a second OPT is taken": (wire, "if index < others or opt is not None or", "if index < others or"),
    "a response is answered": (messages, "if error.fault is Fault.IGNORE:", "if len(message) < HEADER_OCTETS:"),
    "junk comes back with the answer": (
        messages,
        "| rcode, 0, 0, 0, 0)\n\n\ndef truncated",
        "| rcode, 1, 0, 0, 0) + message[12:]\n\n\ndef truncated",
    ),
    "the client's size is not looked at": (messages, "len(reply) <= size_taken(question):", "len(reply) <= UDP_SIZE:"),
    "padding outgrows the client": (messages, "> size_taken(question):\n            opt", "> 65535:\n            opt"),
    "only answers are guarded": (removal, "for _ in range(answers + authorities + additionals):", "for _ in range(answers):"),
    "hints are not guarded": (removal, "return _hints(data) if rtype in _SERVICES else ()", "return ()"),
    "the other records go too": (removal, "kept = [record for record in records if record not in gone]", "kept = []"),
    "a pointer goes to its old place": (
        removal,
        "self._put_name(owner)\n        fixed",
        "self._out += self._source[record.start : at]\n        fixed",
    ),
}


def judge_with(mistake: tuple[ModuleType, str, str], monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A judge of the same code, but for the mistake."""
    where, there, instead = mistake
    modules = []
    for real in (wire, messages, removal):
        assert real.__file__ is not None
        source = Path(real.__file__).read_text()
        if real is where:
            assert source.count(there) >= 1, f"{real.__name__} does not say any more: {there}"
            source = source.replace(there, instead)
        module = ModuleType(real.__name__)
        # Those behind it import from it.
        monkeypatch.setitem(sys.modules, real.__name__, module)
        monkeypatch.setattr(agent.dns, real.__name__.rpartition(".")[2], module)
        exec(compile(source, real.__file__, "exec"), module.__dict__)
        modules.append(module)
    return Judge(*modules)


def first_finding(judge: Judge, seed: int = 1, chunks: int = 10) -> tuple[Message, str] | None:
    for chunk in range(chunks):
        outcome = command.judge_chunk(seed, chunk, command.CHUNK, judge)
        if outcome.found is not None:
            return outcome.found
    return None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds."""
    monkeypatch.setattr(command, "CHUNK_S_MAX", 2.0)
    assert first_finding(judge_with(MISTAKES[mistake], monkeypatch)) is not None


def test_a_mistake_of_the_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it learns is looked up in its cache, and not only in what the walker says."""

    def read_reply(message: bytes, question: wire.Question) -> wire.Answer:
        answer = wire.read_reply(message, question)
        return answer._replace(addresses=(*answer.addresses, (b"\xcb\x00\x71\x63", 60))) if answer.addresses else answer

    monkeypatch.setattr("agent.core.proxy.read_reply", read_reply)
    found = first_finding(Judge())
    assert found is not None
    assert "the cache holds an address that no alias leads to" in found[1]


def test_without_a_mistake_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code, compiled in the same way: it is the mistakes that are found."""
    assert first_finding(judge_with((wire, "Rule 1", "Rule 1"), monkeypatch), chunks=1) is None


def test_what_was_found_can_be_found_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed as hex with the command that judges just this message."""
    judge = judge_with(MISTAKES["a pointer may go forward"], monkeypatch)
    outcome = command.judge_chunk(1, 0, command.CHUNK * 10, judge)
    monkeypatch.setattr(command, "fuzz", lambda *_: outcome)
    monkeypatch.setattr(command, "Judge", lambda: judge)
    assert command.main(["dns", "--seed", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("seed 1\n")
    (again,) = re.findall(r"^again with: scripts/fuzz (.*)$", said, re.MULTILINE)
    assert command.main(again.split()) == 1
    monkeypatch.setattr(command, "Judge", Judge)
    assert command.main(again.split()) == 0


def test_a_difference_that_nobody_listed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """dnspython is asked in earnest: a walker that reads a type one off is found by the comparison alone."""
    judge = Judge()
    query = bytes.fromhex("123401000001000000000000") + b"\x03www\x07example\x00\x00\x01\x00\x01"
    question = wire.read_question(query)
    question.qtype = 2
    monkeypatch.setattr(judge, "_question", lambda _: question)
    with pytest.raises(Disagreement, match="type and class"):
        judge.judge(Message(query, None, is_gated=False))
