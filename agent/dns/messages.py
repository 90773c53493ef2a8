"""The messages we write ourselves: denials, failures, and the empty replies that send a client to TCP.

Rule 1: an answer of ours repeats what the client can check (id, question in its own case, RD, CD, COOKIE) and never holds an
address or an SOA: it cannot be mistaken for data, and nobody caches it (RFC 2308 5).
Rule 2: EDNS only towards who spoke EDNS (RFC 6891 7); then DO is copied (RFC 3225 3) and the reason is an extended error.
Rule 3: what cannot be read is answered with a bare header, which costs less than what it answers.

The COOKIE goes back as it came, the server's part included: to the client a cookie of its own proves that the answer is not
forged, and we neither make nor check server cookies (RFC 7873 5.3).
"""

from __future__ import annotations

import enum
from struct import Struct
from typing import Final

from agent.core.types import PROTOCOL_UDP
from agent.dns.wire import (
    EDNS_DO,
    FLAG_CD,
    FLAG_QR,
    FLAG_RA,
    FLAG_RD,
    FLAG_TC,
    HEADER,
    HEADER_OCTETS,
    MASK_OPCODE,
    OPTION_COOKIE,
    TYPE_OPT,
    Fault,
    Question,
    Rcode,
    WireError,
    find_opt,
)

# What we say we can take over UDP: fits one packet of the smallest IPv6 path (the value of DNS flag day 2020).
UDP_SIZE: Final = 1232
# Without EDNS, and as the least any EDNS size means (RFC 1035 4.2.1, RFC 6891 6.2.3).
UDP_SIZE_MIN: Final = 512
OPTION_EXTENDED_ERROR: Final = 15
# With the longest name, a COOKIE of 40 octets and this text an answer of ours still has fewer than 512 octets.
TEXT_OCTETS_MAX: Final = 128

_OPT: Final = Struct("!BHHBBHH")  # root, type, size, upper bits of the result code, version, flags, length of the options
_OPTION: Final = Struct("!HH")
_COPIED_FLAGS: Final = FLAG_RD | FLAG_CD


class ExtendedError(enum.IntEnum):
    """The info-codes of RFC 8914 that we use."""

    OTHER = 0
    NOT_READY = 14
    BLOCKED = 15
    NOT_SUPPORTED = 21
    NETWORK_ERROR = 23


def denied(
    question: Question,
    rcode: Rcode = Rcode.NXDOMAIN,
    extended_error: ExtendedError = ExtendedError.BLOCKED,
    text: str = "",
) -> bytes:
    """A question that is not let through: NXDOMAIN, NOERROR without records (NODATA), or REFUSED."""
    return _answer(question, rcode, extended_error, text)


def servfail(question: Question, extended_error: ExtendedError = ExtendedError.OTHER, text: str = "") -> bytes:
    """A question that was let through and has no answer we may give."""
    return _answer(question, Rcode.SERVFAIL, extended_error, text)


def refusal(message: bytes, error: WireError) -> bytes | None:
    """The answer to a message that `read_question` refused; None for what is not to be answered at all."""
    if error.fault is Fault.IGNORE:
        return None
    rcode = Rcode.NOTIMP if error.fault is Fault.NOTIMP else Rcode.FORMERR
    number, flags = HEADER.unpack_from(message)[:2]
    return HEADER.pack(number, FLAG_QR | flags & (MASK_OPCODE | _COPIED_FLAGS) | rcode, 0, 0, 0, 0)


def truncated(reply: bytes, question: Question) -> bytes:
    """The reply without its records and with TC: a client asks again over TCP (RFC 2181 9).

    Header flags, result code and the upstream's OPT stay, so that cookies and extended errors arrive. The reply is one that
    `read_reply` called OK or TRUNCATED.
    """
    flags = HEADER.unpack_from(reply)[1] | FLAG_TC
    opt = b""
    if question.edns is not None:
        opt = find_opt(reply) or b""
        # None in a message that was cut before it; or padded beyond what the client takes.
        if not opt or HEADER_OCTETS + len(question.section) + len(opt) > size_taken(question):
            opt = own_opt(question, b"")
    return HEADER.pack(question.id, flags, 1, 0, 0, 1 if opt else 0) + question.section + opt


def fit(reply: bytes, question: Question, protocol: int) -> bytes:
    """The reply, or over UDP `truncated` where it is longer than the client takes."""
    if protocol != PROTOCOL_UDP or len(reply) <= UDP_SIZE_MIN or len(reply) <= size_taken(question):
        return reply
    return truncated(reply, question)


def size_taken(question: Question) -> int:
    """How long a UDP reply the client takes, in octets."""
    return UDP_SIZE_MIN if question.edns is None else max(UDP_SIZE_MIN, question.edns.udp_size)


def _answer(question: Question, rcode: Rcode, extended_error: ExtendedError, text: str) -> bytes:
    flags = FLAG_QR | FLAG_RA | question.flags & _COPIED_FLAGS | rcode
    if question.edns is None:
        return HEADER.pack(question.id, flags, 1, 0, 0, 0) + question.section
    opt = own_opt(question, error_option(extended_error, text))
    return HEADER.pack(question.id, flags, 1, 0, 0, 1) + question.section + opt


def error_option(extended_error: ExtendedError, text: str) -> bytes:
    """An extended error as an option of EDNS (RFC 8914 2)."""
    # Cut between characters, not inside one.
    octets = text.encode()[:TEXT_OCTETS_MAX].decode(errors="ignore").encode()
    return _OPTION.pack(OPTION_EXTENDED_ERROR, 2 + len(octets)) + extended_error.to_bytes(2, "big") + octets


def own_opt(question: Question, options: bytes) -> bytes:
    """An OPT record of ours, with the client's COOKIE before these options."""
    assert question.edns is not None, "EDNS goes only to who spoke it"
    cookie = question.edns.cookie
    if cookie is not None:
        options = _OPTION.pack(OPTION_COOKIE, len(cookie)) + cookie + options
    flags = EDNS_DO if question.edns.do else 0
    return _OPT.pack(0, TYPE_OPT, UDP_SIZE, 0, 0, flags, len(options)) + options


assert HEADER_OCTETS + 255 + 4 + _OPT.size + 4 + 40 + 4 + 2 + TEXT_OCTETS_MAX < UDP_SIZE_MIN
