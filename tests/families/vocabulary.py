"""What the families say their packets with."""

from __future__ import annotations

import struct
from typing import Final

from agent.datapath.abi import Reason
from tests.packets import (
    ACK,
    CLIENT,
    CLIENT6,
    PEER,
    PEER6,
    SYN,
    frame,
    tcp,
    udp,
)
from tests.verdict_cases import (
    ALLOW,
    INGRESS,
    rule,
)

R = Reason
EVERYTHING: Final = (rule(ALLOW, 0, 0), rule(ALLOW, 0, 0, direction=INGRESS))
DATAGRAM, OPENING, OPENED = udp(4, 443), tcp(40000, 443), tcp(443, 40000, SYN | ACK)
SENT, RECEIVED = tcp(40000, 443, ACK), tcp(443, 40000, ACK)
ANOTHER: Final = 6


def sent_frame(payload: bytes, protocol: int, *, is_v6: bool = False) -> bytes:
    return frame(CLIENT6, PEER6, protocol, payload) if is_v6 else frame(CLIENT, PEER, protocol, payload)


def patched(whole: bytes, at: int, octets: bytes) -> bytes:
    return whole[:at] + octets + whole[at + len(octets) :]


def short(number: int) -> bytes:
    return struct.pack(">H", number)
