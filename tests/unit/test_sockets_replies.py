"""The checksum of our datagrams; no root. That it is right on the wire is in test_sockets.py."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from agent.dns.replies import checksum_of


@given(st.binary(max_size=64))
@example(b"\xff\xff")
@example(b"\xff\xfe\x00\x01")
@example(b"\x00\x00")
@example(b"\x12")
def test_the_checksum_is_the_textbooks(octets: bytes) -> None:
    """RFC 1071's loop says the same; RFC 768: what would be 0 is sent as all ones."""
    total = 0
    for at in range(0, len(octets), 2):
        total += int.from_bytes(octets[at : at + 2].ljust(2, b"\x00"), "big")
    while total > 0xFFFF:
        total = (total >> 16) + (total & 0xFFFF)
    assert checksum_of(octets) == (~total & 0xFFFF or 0xFFFF)
