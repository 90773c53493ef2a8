"""`namegate doctor`, its conditions made up: what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from agent.cli import main
from agent.cli.environment import Environment
from agent.config import Config
from agent.host.doctor import Condition, State

_GOOD = Condition("kernel", State.GOOD, "Linux 6.18")
_AROUND = Condition("rp_filter", State.WORKED_AROUND, "strict: the device has its own")
_BAD = Condition("firewall", State.BAD, "a chain drops DNS", "nft insert rule …")


def _doctor(*arguments: str, conditions: list[Condition], is_root: bool = True) -> Result:
    asked: list[Config] = []

    def examine(config: Config) -> list[Condition]:
        asked.append(config)
        return conditions

    return CliRunner().invoke(main, ["doctor", *arguments], obj=Environment(is_root=lambda: is_root, examine=examine))


@pytest.mark.parametrize(("conditions", "code"), [([_GOOD, _AROUND], 0), ([_GOOD, _AROUND, _BAD], 1)])
def test_exit_code(conditions: list[Condition], code: int) -> None:
    """What is worked around is no reason to fail; one bad condition is."""
    assert _doctor(conditions=conditions).exit_code == code


def test_not_root() -> None:
    """Without root it is used wrongly, and says so in a sentence."""
    result = _doctor(conditions=[], is_root=False)
    assert result.exit_code == 2
    assert "needs root" in result.stderr


def test_text() -> None:
    """A line for each condition, uncut, and one for its remedy."""
    assert _doctor(conditions=[_GOOD, _BAD]).stdout.splitlines() == [
        "good           kernel    Linux 6.18",
        "bad            firewall  a chain drops DNS",
        "                         remedy: nft insert rule …",
    ]


def test_json() -> None:
    """The same as data."""
    assert json.loads(_doctor("-o", "json", conditions=[_BAD]).stdout) == [
        {"name": "firewall", "state": "bad", "found": "a chain drops DNS", "remedy": "nft insert rule …"}
    ]
