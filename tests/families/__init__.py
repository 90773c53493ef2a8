"""Families of packet cases: what the stories of verdict_cases.py only touch, gone through member by member.

A member is a case of its own where it says something of its own: another field, another header, another state. What differs
only by a number is one case with several steps.
"""

from __future__ import annotations

from typing import Final

from tests.families import flows, fragments, policies, reading, senders
from tests.verdict_cases import CASES

TABLE: Final = (*CASES, *reading.FAMILY, *senders.FAMILY, *fragments.FAMILY, *flows.FAMILY, *policies.FAMILY)
