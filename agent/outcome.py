"""What became of a question, in one word: for the agent and for its views. Imports nothing heavy: `--help` imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def question_verdict(fields: Mapping[str, Any]) -> str | None:
    """Of its fact: allowed, audited, denied or failed; it failed as well where its client hung up."""
    outcome = fields["outcome"]
    if outcome == "released":
        verdict: str | None = fields.get("verdict")
        return verdict
    return "denied" if outcome == "denied" else "failed"
