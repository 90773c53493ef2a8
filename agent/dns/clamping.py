"""TTLs shortened to what the policy holds (`dns.clamp-ttl`, DECISIONS 14): who keeps an address for longer would use it when
it is closed.

Rule 1: only in the answer section, and in place: nothing else opens anything, and nothing else changes.
Rule 2: signatures of records hold: they are made over the TTL that stands in them, and a cache sends less (RFC 4035 5.3.3). A
message that is signed as a whole passes as it is.
Rule 3: a TTL with the top bit set is 0 (RFC 2181 8) and stays.
"""

from __future__ import annotations

from struct import Struct

from agent.dns.removal import ANSWER, signs_the_message, walk

_TTL = Struct("!I")
_TTL_BEFORE_DATA = 6  # and the length of the data between them
_TTL_MAX = 0x7FFF_FFFF


def clamped(reply: bytes, ttl_max: int) -> bytes:
    """The reply with no TTL over so many seconds. It is one that `read_reply` called OK."""
    records = list(walk(reply))
    if any(signs_the_message(reply, record) for record in records):
        return reply
    octets = bytearray(reply)
    for record in records:
        at = record.data - _TTL_BEFORE_DATA
        if record.section == ANSWER and ttl_max < _TTL.unpack_from(reply, at)[0] <= _TTL_MAX:
            _TTL.pack_into(octets, at, ttl_max)
    return bytes(octets)
