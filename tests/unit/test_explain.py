"""`explain`: what it says of a packet, a name, an address and a drop, and that its change turns the verdict round."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent.core.events import EndpointAdded, Tick
from agent.core.rules import Policy
from agent.core.types import PROTOCOL_NAMES, Direction, EndpointValue, GroupValue, Table, Verdict, packed
from agent.policy.files import read_policy_text
from tests.bug_scene import Scene
from tests.explaining import explained
from tests.sim.world import World

DENIALS: Final = int(os.environ.get("EXPLAINED_DENIALS", "50"))
ADDRESSES: Final = ("203.0.113.7", "198.51.100.165", "198.51.100.9", "10.0.0.5", "2001:db8::7")


def learned(scene: Scene, name: str, *addresses: str) -> None:
    scene.world.resolve(name, *addresses)


def test_case_165_both_rules_are_named() -> None:
    """A network that is denied and a name that is allowed: the denial decides and the allow loses; the other address passes."""
    scene = Scene("!203.0.113.0/24\na.test:443/tcp\n")
    learned(scene, "a.test.", "203.0.113.7", "198.51.100.165")
    denied = explained(scene.world, "203.0.113.7", "tcp/443")
    assert (denied["verdict"], denied["reason"], denied["rule"]) == ("denied", "deny", "p:1")
    assert [(rule["verdict"], rule["rule"], rule["decides"]) for rule in denied["rules"]] == [
        ("deny", "p:1", True),
        ("allow", "p:2", False),
    ]
    assert denied["names"][0]["name"] == "a.test."
    assert denied["change"]["take_out"] == ["p:1"]
    allowed = explained(scene.world, "198.51.100.165", "tcp/443")
    assert (allowed["verdict"], allowed["rule"]) == ("allowed", "p:2")
    assert allowed["change"]["entry"] == "!198.51.100.165:443/tcp"
    assert allowed["change"]["or_take_out"] == "p:2"


# --- the change ------------------------------------------------------------------------------------------------------

_NETWORKS: Final = (
    "203.0.113.0/24",
    "203.0.113.7",
    "198.51.100.0/24",
    "198.51.100.165/32",
    "10.0.0.0/8",
    "2001:db8::/32",
    "::/0",
)
_SUFFIXES: Final = ("", ":443/tcp", ":80-500", "/udp", "/icmp", ":443/tcp", "/tcp")
_PACKETS: Final = ("tcp/443", "tcp/443", "tcp/25", "udp/443", "udp/53", "icmp", "icmp/13", "sctp/443", "47", "tcp/0")
_PORTS: Final = (
    "",
    '      toPorts: [{ports: [{port: "443", protocol: TCP}]}]\n',
    '      toPorts: [{ports: [{port: "1", endPort: 600, protocol: ANY}]}]\n',
    "      icmps: [{fields: [{family: IPv4, type: 8}, {family: IPv6, type: 128}]}]\n",
)
_HEAD: Final = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: q}\nspec:\n  endpointSelector: {}\n"


@st.composite
def entries(draw: st.DrawFn) -> str:
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(("a.test", "*.test", "b.test"))) + draw(st.sampled_from(_SUFFIXES))
    network = draw(st.sampled_from(_NETWORKS))
    suffix = draw(st.sampled_from(_SUFFIXES))
    target = f"[{network}]" if ":" in network and ":" in suffix else network
    return f"{draw(st.sampled_from(('', '!', '!')))}{target}{suffix}"


@st.composite
def documents(draw: st.DrawFn) -> str:
    text = _HEAD
    for section in draw(st.sets(st.sampled_from(("ingress", "ingressDeny", "egress", "egressDeny")), min_size=1)):
        side = "to" if section.startswith("egress") else "from"
        text += f"  {section}:\n"
        for network in draw(st.lists(st.sampled_from(_NETWORKS), min_size=1, max_size=2)):
            prefix = network if "/" in network else f"{network}/32"
            text += f'    - {side}CIDR: ["{prefix}"]\n' + draw(st.sampled_from(_PORTS))
    return text


def policies_with(
    entries: list[str] | None,
    documents: list[str],
    take_out: Sequence[str] = (),
    entry: str | None = None,
    added: str | None = None,
) -> tuple[Policy, ...]:
    """A list and documents as a person would change them: lines out, a line in, a file more."""
    texts = [(f"document{place}", text) for place, text in enumerate(documents)] + ([("added", added)] if added else [])
    if entries is not None:
        lines = ["nothing.test:1", *entries]
        kept = ["" if f"list:{number}" in take_out else line for number, line in enumerate(lines, 1)]
        texts.insert(0, ("list", "\n".join([*kept, *([entry] if entry else [])])))
    policies: list[Policy] = []
    for name, text in texts:
        reading = read_policy_text(name, text.encode())
        assert not reading.mistakes, (text, reading.mistakes)
        policies += reading.policies
    return tuple(
        replace(policy, rules=tuple(rule for rule in policy.rules if str(rule.origin) not in take_out)) for policy in policies
    )


def passes(world: World, address: str, direction: Direction, protocol: int, port: int) -> bool:
    """By the rows alone, and by another judge than the model."""
    verdict = world.kernel.verdict_for(101, packed(address), protocol, port, direction)
    if verdict is None:
        endpoint = world.kernel.rows[Table.ENDPOINTS][101]
        assert isinstance(endpoint, EndpointValue)
        group = world.kernel.rows[Table.GROUPS][endpoint.group]
        assert isinstance(group, GroupValue)
        return not (group.default_deny_egress if direction is Direction.EGRESS else group.default_deny_ingress)
    return verdict is Verdict.ALLOW or (verdict is Verdict.REDIRECT and direction is Direction.EGRESS)


@pytest.mark.timeout(60 + DENIALS)
def test_the_change_turns_the_verdict_round() -> None:
    """Denials and allowed packets of random policies: each form of the proposed change, applied, gives the other verdict."""
    counted: Counter[str] = Counter()

    @settings(
        max_examples=DENIALS // 2,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        st.one_of(st.none(), *[st.lists(entries(), max_size=6)] * 3),
        st.lists(documents(), max_size=2),
        st.sets(st.tuples(st.sampled_from(("a.test.", "b.test.")), st.sampled_from(ADDRESSES)), max_size=3),
        st.lists(
            st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(_PACKETS), st.sampled_from(Direction)), min_size=4, max_size=4
        ),
    )
    def one(
        entries: list[str] | None,
        documents: list[str],
        names: set[tuple[str, str]],
        packets: list[tuple[str, str, Direction]],
    ) -> None:
        world = World()
        world.start(*policies_with(entries, documents))
        world.add_endpoint(1, "192.0.2.11")
        world.handle(EndpointAdded(1, "veth1", 101, {"app": "e1"}, (packed("192.0.2.11"), packed("2001:db8:1::11"))))
        for name, address in sorted(names):
            scope = world.engine.groups.endpoints[1].scope
            world.engine.names.learn(name, [(packed(address), 60)], scope, world.now)
            world.engine.proxy.history.note(name, packed(address), 1, (name,), world.now + 60, world.now)
        world.handle(Tick())
        for address, packet, direction in packets:
            answer = explained(world, address, packet, ingress=direction is Direction.INGRESS)
            asked = answer["question"]
            protocol = next((n for n, text in PROTOCOL_NAMES.items() if text == asked["protocol"]), 47)
            about = (address, direction, protocol, asked["port"])
            assert answer["allowed"] is passes(world, *about), f"{about}: {answer['reason']}, and the rows say otherwise"
            assert answer["differences"] == []
            change = answer["change"]
            assert change is not None, f"nothing turns {about} round: {answer['reason']}"
            counted["allowed" if answer["allowed"] else "denied"] += 1
            forms = [
                {"take_out": change["take_out"], "entry": change["entry"]} if change["entry"] is not None else None,
                {"take_out": change["take_out"], "added": change["policy"]} if change["policy"] is not None else None,
                {"take_out": change["take_out"]} if change["take_out"] and change["policy"] is None else None,
                {"take_out": [change["or_take_out"]]} if change["or_take_out"] is not None else None,
            ]
            for form in [form for form in forms if form is not None]:
                if "entry" in form and entries is None:
                    continue  # of a list that is not there
                world.apply(*policies_with(entries, documents, **form))
                world.advance(0.0)
                if change["after_asking"] is not None:
                    scope = world.engine.groups.endpoints[1].scope
                    world.engine.names.learn(change["after_asking"], [(packed(address), 60)], scope, world.now)
                    world.handle(Tick())
                assert passes(world, *about) is not answer["allowed"], f"{form} does not turn {about} round"
                world.apply(*policies_with(entries, documents))
                world.advance(0.0)

    one()
    print(dict(counted))
    assert counted["denied"] >= DENIALS
    assert counted["allowed"] >= DENIALS // 4
