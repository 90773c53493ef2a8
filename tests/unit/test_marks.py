"""Which bits of the packet mark the agent takes: the first that nobody has, the same as before, or those it was told."""

from __future__ import annotations

import errno

import pytest

from agent.config import DatapathSettings
from agent.datapath import device
from agent.datapath.datapath import Settings
from agent.datapath.errors import DatapathError
from agent.host import marks
from agent.host.firewall import Firewall
from agent.host.marks import CANDIDATES, settled

_CILIUM = device.Rule(2, 9, 2004, "", 0x200, 0xF00)
_TAILSCALE = device.Rule(2, 5210, 254, "", 0x80000, 0xFF0000)
_WIREGUARD = device.Rule(2, 32764, 51820, "", 0xCA6C, 0xFFFF_FFFF)


class _Host:
    """What the choice looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rules: list[device.Rule] = []
        self.firewall: dict[str, int] = {}
        self.note = ""
        monkeypatch.setattr(device, "rules", lambda: self.rules)
        monkeypatch.setattr(device, "noted", lambda _: self.note)
        monkeypatch.setattr(Firewall, "read", classmethod(lambda _: Firewall()))
        monkeypatch.setattr(Firewall, "marks", lambda _: self.firewall)

    def chooses(self, mark: int = 0, mark_mask: int = 0xF00) -> tuple[int, int]:
        chosen = settled(DatapathSettings(mark=mark, mark_mask=mark_mask))
        return chosen.mark, chosen.mark_mask


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    return _Host(monkeypatch)


def test_the_first_that_is_free(host: _Host) -> None:
    """Candidate by candidate, as others come: a mask of theirs counts, of a whole mark the bits it has."""
    assert host.chooses() == CANDIDATES[0]
    host.rules = [_TAILSCALE]
    assert host.chooses() == CANDIDATES[0]
    host.rules = [_TAILSCALE, _WIREGUARD]  # 0xca6c has bits of 0xf00
    assert host.chooses() == CANDIDATES[1]
    host.rules = [_CILIUM]
    assert host.chooses() == CANDIDATES[1]
    host.firewall = {"nftables ip calico mark": 0xF000_1000}
    assert host.chooses() == CANDIDATES[3]


def test_none_is_free(host: _Host) -> None:
    """Then a start is refused, and the sentence says who has the bits and which setting helps."""
    host.firewall = {"nftables ip everything mark": 0xFFFF_FFF0}
    with pytest.raises(DatapathError, match=r"everything.*say `datapath\.mark`") as refusal:
        host.chooses()
    assert refusal.value.errno == errno.EBUSY


def test_the_choice_of_before(host: _Host) -> None:
    """A restart keeps what the programs in force are compiled with, whoever came since."""
    host.rules = [_CILIUM]
    host.note = Settings(mark=0xA00, mark_mask=0xF00).note
    assert host.chooses() == (0xA00, 0xF00)


def test_a_stated_one(host: _Host) -> None:
    """Is used as it is; with a bit of a routing rule it is refused, and says whose."""
    host.rules = [_TAILSCALE]
    assert host.chooses(mark=0xA00, mark_mask=0xF00) == (0xA00, 0xF00)
    with pytest.raises(DatapathError, match=r"0x10000/0x30000 has bits of the rule `5210: from all fwmark 0x80000/0xff0000"):
        host.chooses(mark=0x10000, mark_mask=0x30000)


def test_candidates() -> None:
    """Each has its value inside its mask, another one for refusals, and no bit of the others."""
    taken = 0
    for value, mask in CANDIDATES:
        answer = Settings(mark=value, mark_mask=mask).mark_answer
        assert value & ~mask == answer & ~mask == taken & mask == 0
        assert len({0, value, answer}) == 3
        taken |= mask
    assert marks.Mark(0xA00, 0xF00) == CANDIDATES[0]
