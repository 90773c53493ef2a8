"""Mistakes that can be switched on, so that the tests are known to see them. Never on outside the test suites."""

from __future__ import annotations

import enum


class KnownBad(enum.StrEnum):
    WRITE_ORDER_REVERSED = "write-order-reversed"  # the ipcache row before the policy rows of its identity
    IDENTITY_REUSED = "identity-reused"  # a released number is given to the next label set
    NOTHING_CHANGED_NO_WAIT = "nothing-changed-no-wait"  # the race T0 to T6 of barrier.py
    WAIT_PER_BATCH = "wait-per-batch"  # any acknowledged batch releases everything that waits
    EDIT_IN_PLACE = "edit-in-place"  # a policy change rewrites the rows of the set in force
    RELEASE_FIRST = "release-first"  # the reply leaves, then the rows are written
