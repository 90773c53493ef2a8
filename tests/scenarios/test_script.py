"""The format: every mistake is found at its line, and an expectation that does not hold says where it stands."""

from __future__ import annotations

import pytest

from tests.scenarios.script import Scenario, ScenarioError, Step, parse, seconds
from tests.scenarios.stage import Stage

STORY = """# A name is asked and opens.
endpoint e1
policy web
  a.example:443

query e1 a.example A -> upstream
reply a.example 192.0.2.101 ttl=60     # the upstream's word
expect released
packet e1 192.0.2.101 tcp/443 -> allow
"""


def play(text: str) -> None:
    scenario = parse("story.txt", text)
    Stage(scenario).play(scenario.setup, scenario.steps)


def test_steps_and_what_stands_below_them() -> None:
    """Lines, words, outcomes; comments and empty lines are nothing."""
    scenario = parse("story.txt", STORY)
    assert (scenario.story, len(scenario.setup), len(scenario.steps)) == ("A name is asked and opens.", 2, 4)
    assert scenario.setup[1] == Step(3, "policy", ("web",), "", ((4, "  a.example:443"),))
    assert scenario.steps[1] == Step(7, "reply", ("a.example", "192.0.2.101", "ttl=60"))
    assert isinstance(scenario, Scenario)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("endpoint e1\nexpect nothing\n", "story.txt:1: a scenario begins with its story"),
        ("# x\nask e1\n", "story.txt:2: 'ask' is no step"),
        ("# x\nquery e1 a.example\n", "story.txt:2: query takes 3 to 4 words and has 2"),
        ("# x\npacket e1 192.0.2.1 tcp/443\n", "story.txt:2: say what becomes of the packet"),
        ("# x\nexpect held -> yes\n", "story.txt:2: expect has no outcome"),
        ("# x\nquery e1 a A ->\n", "story.txt:2: the arrow points to nothing"),
        ("# x\nroom\n  here\n", "story.txt:3: nothing belongs below room"),
        ("# x\n\nendpoint e1\nroom\n", "story.txt:4: nothing is expected"),
        ("# x\nnot-under rain: wet\n", "story.txt:2: there is no expander 'rain'"),
        ("# x\nnot-under restarts\n", "story.txt:2: say why"),
        ("# x\nexpect nothing\nsetting names 1\n", "story.txt:3: setting stands before the start"),
    ],
)
def test_a_mistake_is_found_at_its_line(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message.replace("(", r"\(")):
        parse("story.txt", text)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("-> allow", "-> drop", "story.txt:9: packet e1 192.0.2.101 tcp/443 -> drop: it is allow"),
        ("-> upstream", "-> denied", "story.txt:6: .*: it is upstream 203.0.113.53"),
        ("expect released", "expect servfail", "story.txt:8: expect servfail: the answers are {'released': 1}"),
        ("expect released", "expect released 1 192.0.2.102", "story.txt:8: .*the addresses are"),
        ("a.example:443", "a.example:443:443", "story.txt:4: "),
        ("expect released", "advance soon", "story.txt:8: advance soon: 'soon' is no time"),
        ("reply a.example", "reply b.example", "story.txt:7: .*no question for b.example"),
    ],
)
def test_what_does_not_hold_is_told_with_its_line(before: str, after: str, message: str) -> None:
    play(STORY)
    with pytest.raises(ScenarioError, match=message):
        play(STORY.replace(before, after))


def test_times() -> None:
    assert [seconds(text) for text in ("20ms", "1.5s", "2m", "1h")] == [0.02, 1.5, 120.0, 3600.0]
