"""A denied client learns at once, by real sockets over real devices (DECISIONS 19): checksums are what can go wrong here.

A local sender leaves them to the device, or, with offload switched off, completes them itself; the refusal has to be right in
either case, or the sender's stack drops it and the client waits.
"""

from __future__ import annotations

import errno
import statistics
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.netns.lab import Lab
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

FAIL_MS_MAX: Final = 50
TRIES: Final = 9
DENIED: Final = {4: "198.51.100.66", 6: "2001:db8:53::66"}
# "Administratively prohibited", as Linux tells it to a socket.
PROHIBITED: Final = {4: errno.EHOSTUNREACH, 6: errno.EACCES}

# So often: the errno that a connection, or a datagram, fails with, and after how many milliseconds.
_FAIL = """
import socket, sys, time
address, kind, tries = sys.argv[1], socket.SocketKind[sys.argv[2]], int(sys.argv[3])
for _ in range(tries):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as s:
        s.settimeout(2)
        begun, error = time.monotonic(), 0
        try:
            s.connect((address, 443))
            s.send(b"x")
            s.recv(1)
        except OSError as failed:
            error = failed.errno or -1
        print(error, (time.monotonic() - begun) * 1000)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The client is an endpoint, and so is the host itself."""
    with Lab(ports=(443,)) as lab:
        client = {"interface": lab.client.endpoint, "addresses": list(lab.client.addresses)}
        host = {"interface": lab.uplink, "orientation": "uplink"}
        with RunningAgent(lab, "a.test\n", tmp_path_factory.mktemp("agent"), endpoints=[client, host]):
            yield lab


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("offload", ["on", "off"])
@pytest.mark.parametrize("where", ["veth", "uplink"])
def test_a_denied_client_fails_within_50_ms(lab: Lab, where: str, offload: str, version: int, kind: str) -> None:
    """TCP by a reset, UDP by "administratively prohibited"; the median, for the machine may be busy."""
    namespace, device = (lab.client.namespace, lab.client.device) if where == "veth" else (lab.host, lab.uplink)
    lab.run(namespace, "ethtool", "-K", device, "tx", offload)
    assert f"tx-checksumming: {offload}\n" in lab.run(namespace, "ethtool", "-k", device).stdout
    said = lab.run(namespace, sys.executable, "-c", _FAIL, DENIED[version], kind, str(TRIES)).stdout.splitlines()
    errors, took_ms = zip(*(map(float, line.split()) for line in said), strict=True)
    assert set(errors) == {errno.ECONNREFUSED if kind == "SOCK_STREAM" else PROHIBITED[version]}
    assert statistics.median(took_ms) < FAIL_MS_MAX, took_ms
