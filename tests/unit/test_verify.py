"""Keys as they stand in a map: whatever somebody else wrote there, it is told from what the agent writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.core.types import Direction, IpcacheKey, Key, OwnAddressKey, PolicyKey, Prefix, Table
from agent.datapath import abi
from agent.datapath.maps import MAPS_OF

NUMBERS = st.integers(0, (1 << 32) - 1)
ADDRESSES = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16).filter(lambda a: a[:10] != bytes(10))


@st.composite
def policy_keys(draw: st.DrawFn) -> PolicyKey:
    protocol = draw(st.integers(0, 255))
    bits = draw(st.integers(0, 16)) if protocol else 0
    port = draw(st.integers(0, 0xFFFF)) & (0xFFFF << 16 - bits & 0xFFFF)
    return PolicyKey(draw(NUMBERS), draw(NUMBERS), draw(st.sampled_from(Direction)), protocol, port, bits)


@st.composite
def ipcache_keys(draw: st.DrawFn) -> IpcacheKey:
    address = draw(ADDRESSES)
    return IpcacheKey(draw(NUMBERS), Prefix.masked(address, draw(st.integers(0, 8 * len(address)))))


KEYS = st.one_of(
    st.tuples(st.just(Table.POLICY), policy_keys()),
    st.tuples(st.just(Table.IPCACHE), ipcache_keys()),
    st.tuples(st.just(Table.OWN_ADDRESSES), st.builds(OwnAddressKey, NUMBERS, ADDRESSES)),
    st.tuples(st.sampled_from([Table.GROUPS, Table.ENDPOINTS]), NUMBERS),
)


@given(KEYS)
def test_a_key_that_the_agent_wrote_reads_as_that_key(key_of: tuple[Table, Key]) -> None:
    """Of every table, both quickly and closely."""
    table, key = key_of
    name, packed = abi.map_of(table, key), abi.pack_key(table, key)
    assert list(abi.unpack_keys(name, packed)) == [key]
    assert abi.core_key(name, packed) == key


@given(st.data(), st.sampled_from([name for names in MAPS_OF.values() for name in names]))
def test_no_octets_read_as_a_key_that_is_packed_otherwise(data: st.DataObject, name: str) -> None:
    """A row that covers more, or less, than the agent's row must never be taken for it. Reading never fails."""
    size = abi.MAPS[name][0].size
    octets = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    octets[1:4] = bytes(3)  # prefix lengths that a trie would take, most of the time
    (table,) = [table for table, names in MAPS_OF.items() if name in names]
    (key,) = abi.unpack_keys(name, bytes(octets))
    spelled = abi.core_key(name, bytes(octets))
    if spelled is not None:
        # The same prefix; what stands behind it may differ.
        packed = abi.pack_key(table, spelled)
        assert packed[:4] == octets[:4]
        if key == spelled:
            assert packed == octets
    elif name in {"policy", "ipcache4", "ipcache6"}:
        assert not _is_written_by_the_core(key)


def _is_written_by_the_core(key: Key) -> bool:
    if isinstance(key, PolicyKey):
        return key.direction in set(Direction) and (0 <= key.port_bits <= 16 if key.protocol else key.port_bits == 0)
    return isinstance(key, IpcacheKey) and 0 <= key.prefix.length <= 8 * len(key.prefix.address)
