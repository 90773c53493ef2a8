"""Looks a name up and connects at once to port 443 of what it was told.

    lookup.py socket NAME        socket.getaddrinfo: the C library
    lookup.py dnspython NAME     dnspython's resolver, with the search list of resolv.conf

What it prints is drawn in ../test_clients.py.
"""

from __future__ import annotations

import socket
import sys
import time


def _by_socket(name: str) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


def _by_dnspython(name: str) -> list[str]:
    # Here, because it takes longer to load than the other way takes in all.
    import dns.exception
    import dns.resolver

    try:
        return list(dns.resolver.resolve_name(name, search=True).addresses())
    except dns.exception.DNSException as error:
        raise OSError(str(error)) from None


def _connect(address: str) -> str:
    try:
        socket.create_connection((address, 443), timeout=3).close()
    except OSError as error:
        return error.strerror or str(error)
    return "connected"


def main(way: str, name: str) -> None:
    begun = time.monotonic()
    try:
        addresses = {"socket": _by_socket, "dnspython": _by_dnspython}[way](name)
    except OSError as error:
        print(f"failed {(time.monotonic() - begun) * 1e3:.1f} {error}")
        return
    took_ms = (time.monotonic() - begun) * 1e3
    for is_v6 in (False, True):
        address = next((address for address in addresses if (":" in address) is is_v6), None)
        if address is not None:
            connecting = time.monotonic()
            outcome = _connect(address)
            print(f"connection {(time.monotonic() - connecting) * 1e3:.1f} {address} {outcome}")
    print(f"addresses {took_ms:.1f} {' '.join(addresses)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
