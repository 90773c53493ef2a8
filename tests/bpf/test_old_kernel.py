"""The essential promises of the datapath where the kernel lacks TCX and batches: clsact filters, and rows one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.datapath import syscall
from tests.bpf import test_datapath, test_proof, test_takeover

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def old_kernel() -> Iterator[None]:
    syscall.pretend_without(["tcx", "batch"])
    try:
        yield
    finally:
        syscall.pretend_without([])


test_packets = test_datapath.test_packets
test_refusal = test_datapath.test_refusal
test_uplink = test_datapath.test_uplink
test_questions_reach_the_proxy = test_datapath.test_questions_reach_the_proxy
test_no_listener = test_datapath.test_no_listener
test_detach = test_datapath.test_detach
test_others_are_detached = test_datapath.test_others_are_detached
test_full_map = test_datapath.test_full_map

test_rows = test_takeover.test_rows
test_what_was_seen_goes_on = test_takeover.test_what_was_seen_goes_on
test_not_asked = test_takeover.test_not_asked
test_upgrade_under_traffic = test_takeover.test_upgrade_under_traffic

test_a_canary_is_nobodys_packet = test_proof.test_a_canary_is_nobodys_packet
test_the_program_of_before = test_proof.test_the_program_of_before
test_the_gate = test_proof.test_the_gate
