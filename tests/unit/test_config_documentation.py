"""docs/CONFIGURATION.md against the dataclasses that hold the configuration."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agent.config import (
    ContainerSettings,
    ControlSettings,
    DatapathSettings,
    DnsSettings,
    EndpointSettings,
    GateSettings,
    Limits,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "CONFIGURATION.md"
SECTIONS = (EndpointSettings, ContainerSettings, DnsSettings, GateSettings, ControlSettings, DatapathSettings, Limits)
# What the dataclasses hold beside keys.
NO_KEYS = {"line", "asks-the-server-asked"}


def test_every_key_is_documented_and_every_documented_key_is_there() -> None:
    """The first column of its tables names the keys."""
    rows = re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    documented = {key for row in rows for key in re.findall(r"`([a-z-]+)`", row)}
    keys = {field.name.replace("_", "-") for section in SECTIONS for field in dataclasses.fields(section)}
    assert documented == keys - NO_KEYS
