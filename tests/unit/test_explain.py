"""`explain`: what it says of a packet, a name, an address and a drop, and that its change turns the verdict round.

EXPLAINED_DENIALS=500 makes a long run of the last.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent.cli import main
from agent.cli.environment import Environment
from agent.control import ControlError
from agent.core.events import EndpointAdded, Tick
from agent.core.rules import Policy
from agent.core.types import (
    PROTOCOL_NAMES,
    SCOPE_SHARED,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Prefix,
    Table,
    Verdict,
    packed,
)
from agent.datapath.abi import FlowState, Reason
from agent.datapath.maps import Flow
from agent.policy.files import read_policy_text
from agent.why.asked import read_packet
from agent.why.explain import at_once
from agent.why.reasons import meaning
from agent.why.rows import judge
from agent.why.supposed import Situation, suppose
from tests.bug_scene import Scene, policies_of
from tests.explaining import WorldTables, explain_in, explained
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
_TO_DNS: Final = '      toPorts: [{ports: [{port: "53", protocol: ANY}], rules: {dns: [{matchPattern: "*"}]}}]\n'
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
        max_examples=DENIALS,
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


def test_denials_over_one_another() -> None:
    """All of them are to be taken out, and what then lacks an allow gets one."""
    scene = Scene("!203.0.113.0/24\n!203.0.113.7\n198.51.100.9\n!0.0.0.0/0:443/tcp\n")
    change = explained(scene.world, "203.0.113.7", "tcp/443")["change"]
    assert sorted(change["take_out"]) == ["p:1", "p:2", "p:4"]
    assert change["entry"] == "203.0.113.7:443/tcp"


def test_a_change_that_ends_a_scope() -> None:
    """What an endpoint learned for itself alone, by servers of a rule, it asks again once nothing names servers any more."""
    scene = Scene(f"{_HEAD}  egressDeny:\n    - toCIDR: [203.0.113.0/24]\n  egress:\n    - toCIDR: [192.0.2.53/32]\n{_TO_DNS}")
    scope = scene.world.engine.groups.endpoints[1].scope
    assert scope != SCOPE_SHARED
    scene.world.engine.names.learn("a.test.", [(packed("198.51.100.9"), 60)], scope, scene.world.now)
    situation = Situation(
        scene.world.settings,
        scene.world.engine.groups.endpoints[1].added,
        (),
        frozenset(),
        policies_of("a.test:443/tcp\n"),
        frozenset(scene.world.engine.dns_cache.lifetimes),
        scene.world.now,
    )
    asked = read_packet("198.51.100.9", "tcp/443", Direction.EGRESS)
    for question, reason in ((None, Reason.DROP_POLICY), (("a.test.", asked.remote), Reason.PASS_POLICY)):
        grounds = at_once(suppose(replace(situation, asked=question)))
        assert judge(grounds.rows, situation.added, asked, situation.now).judgement.reason is reason


def test_a_network_that_is_a_server_too() -> None:
    """Open at every port it may be asked, so the endpoint learns for itself alone; supposed, it does as well."""
    scene = Scene("a.test:443/tcp\n192.0.2.53\n")
    scope = scene.world.engine.groups.endpoints[1].scope
    assert scope != SCOPE_SHARED
    scene.world.engine.names.learn("a.test.", [(packed("198.51.100.9"), 60)], scope, scene.world.now)
    scene.world.handle(Tick())
    answer = explained(scene.world, "198.51.100.9", "tcp/443")
    assert (answer["allowed"], answer["change"]["entry"]) == (True, "!198.51.100.9:443/tcp")


# --- drops, reasons, words -------------------------------------------------------------------------------------------


def drop_of(reason: Reason, direction: Direction, protocol: int, address: str, port: int) -> dict[str, object]:
    """As `Drops` shows an event."""
    own = "2001:db8:1::11" if ":" in address else "192.0.2.11"
    source, destination = (own, address) if direction is Direction.EGRESS else (address, own)
    return {
        "time": "2026-02-03T04:05:06.789+00:00",
        "endpoint": 1,
        "reason": reason.text,
        "audited": False,
        "direction": direction.name.lower(),
        "protocol": PROTOCOL_NAMES.get(protocol, str(protocol)),
        "source": source,
        "destination": destination,
        "port": port,
        "identity": 2,
        "rule": "no rule",
        "names": [],
        "why": None,
    }


def test_every_drop_resolves() -> None:
    """For every reason, way, protocol and family: a rule or "no rule", number and sentence; and a packet where rules decide."""
    world = World()
    world.start(*policies_with(["203.0.113.0/24:443/tcp", "!198.51.100.0/24"], []))
    explain = explain_in(world)
    addresses = (("203.0.113.7", 443), ("198.51.100.9", 3), ("2001:db8::7", 128), ("224.0.0.1", 0))
    packets = [(protocol, *end) for protocol in (0, 1, 6, 17, 41, 47, 58, 132, 255) for end in addresses]
    of_rules = 0
    for place, reason in enumerate(reason for reason in Reason if reason.is_drop):
        for direction in Direction:
            for protocol, address, port in packets if reason is Reason.DROP_POLICY else packets[place :: len(addresses) + 1]:
                answer = at_once(explain.drop(drop_of(reason, direction, protocol, address, port)))
                then, now = answer["then"], answer["now"]
                assert isinstance(then, dict)
                assert all(then[key] for key in ("reason", "number", "sentence", "rule")), then
                if isinstance(now, dict) and now["reason"] in {"policy", "deny", "pass-policy", "pass-redirect"}:
                    assert now["rule"], now
                    of_rules += 1
    assert of_rules > 100


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_number(reason: Reason) -> None:
    """One that stands in verdict.h, where the step is said."""
    text = (Path(__file__).parents[2] / "bpf" / "verdict.h").read_text().partition("*/\n/*")[2].partition("#ifndef")[0]
    number, letter = re.fullmatch(r"(\d+)([a-e]?)", meaning(reason).number).groups()  # type: ignore[union-attr]
    step = re.search(rf"^ \* *{number}\. (.*?)(?=^ \* *\d+\. |\Z)", text, re.MULTILINE | re.DOTALL)
    assert step is not None
    assert not letter or re.search(rf"^ \* +{letter}\. ", step[1], re.MULTILINE)


def test_the_drop_of_a_vanished_endpoint() -> None:
    """What was said then stays; there is nobody to judge anew."""
    world = World()
    world.start(*policies_with([], []))
    drop = drop_of(Reason.DROP_POLICY, Direction.EGRESS, 6, "203.0.113.7", 443) | {"endpoint": 9, "rule": "p:3"}
    answer = at_once(explain_in(world, drops=[drop]).explained({"drop": 1}))
    assert answer["then"]["rule"] == "p:3"  # type: ignore[index]
    assert answer["now"] is None
    with pytest.raises(ControlError, match="there is no 2"):
        at_once(explain_in(world, drops=[drop]).explained({"drop": 2}))
    with pytest.raises(ControlError, match="this is no drop"):
        at_once(explain_in(world).explained({"drop": {"reason": "weather"}}))


def test_what_no_policy_can_turn_round() -> None:
    """An address that is on no wire, and a source that is not the endpoint's: no change is proposed; the number says why."""
    world = World()
    world.start(*policies_with(["203.0.113.0/24"], []))
    for target, number in (("127.0.0.1", "5"), ("2001:db8::7", "5")):
        answer = explained(world, target, "tcp/443")
        assert (answer["allowed"], answer["number"], answer["change"]) == (False, number, None)


def test_under_audit() -> None:
    """It passes, and what would drop it is said."""
    world = World()
    world.add_endpoint(1, "192.0.2.11", audit=True)
    world.start(*policies_with(["!203.0.113.0/24"], []), endpoints={2: "192.0.2.12"})
    answer = explained(world, "203.0.113.7", "tcp/443", endpoint="veth1")
    assert (answer["allowed"], answer["audited"], answer["reason"], answer["rule"]) == (True, True, "deny", "list:2")


def test_a_name_that_is_gone_is_asked_again() -> None:
    """The history names it after its lifetime: the change opens it by name, and says that it has to be asked again."""
    scene = Scene("b.test:443/tcp\na.test:80/tcp\n")
    learned(scene, "a.test.", "203.0.113.7")
    scene.at(4_000)
    answer = explained(scene.world, "203.0.113.7", "tcp/443")
    assert answer["names"][0]["expires_in"] is None
    assert (answer["change"]["entry"], answer["change"]["after_asking"]) == ("a.test:443/tcp", "a.test.")
    assert answer["would_open"] == [{"selector": "fqdn:b.test.", "rule": "p:1"}]


def test_a_difference_is_shown() -> None:
    """A row that the kernel lost, and one that it has and nobody wants."""
    scene = Scene("a.test:443/tcp\n")
    learned(scene, "a.test.", "203.0.113.7")
    rows = scene.world.kernel.rows[Table.IPCACHE]
    key = IpcacheKey(1, Prefix.of(packed("203.0.113.7")))
    identity = rows.pop(key)
    answer = explained(scene.world, "203.0.113.7", "tcp/443")
    assert not answer["allowed"]
    assert answer["differences"] == [f"ipcache row 1 203.0.113.7/32: the agent wants {identity}, the kernel has no row"]
    rows[key] = identity
    rows[IpcacheKey(1, Prefix.parse("198.51.100.0/24"))] = identity
    answer = explained(scene.world, "198.51.100.9", "tcp/443")
    assert answer["allowed"]
    assert len(answer["differences"]) == 1
    assert explained(scene.world, "198.51.100.9")["differences"] == answer["differences"]


def test_an_endpoint_is_meant_by_number_interface_or_label() -> None:
    """Of several one has to be said for a packet; a name and an address are answered for each."""
    world = World()
    world.start(*policies_with(["203.0.113.0/24:443/tcp"], []), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    for text in ("2", "veth2", "app=e2"):
        assert explained(world, "203.0.113.7", "tcp/443", endpoint=text)["question"]["endpoint"] == 2
    with pytest.raises(ControlError, match="--endpoint with one of veth1, veth2"):
        explained(world, "203.0.113.7", "tcp/443")
    assert [row["endpoint"] for row in explained(world, "203.0.113.7")["endpoints"]] == [1, 2]
    assert [row["endpoint"] for row in explained(world, "a.test")["endpoints"]] == [1, 2]


def test_a_label_without_its_key_is_understood() -> None:
    """Not obeyed: the sentence says how it is written."""
    with pytest.raises(ControlError, match=r"no endpoint is 'e1': app=e1\? `namegate endpoints`"):
        explained(Scene("a.test\n").world, "a.test", endpoint="e1")


def said_by(answer: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """Exit code and text of the command, from an agent that answers so."""

    class Agent:
        def __init__(self, *_: object) -> None:
            pass

        def ask(self, command: str, /, **arguments: object) -> object:
            return answer

    environment = Environment(Agent, is_root=lambda: True)
    result = CliRunner(env={"NAMEGATE_CONTROL": None}).invoke(main, ["explain", *arguments], obj=environment)
    return result.exit_code, result.output


def test_a_name_without_addresses_has_the_verdict_of_its_question() -> None:
    """And it is said that its packets cannot be judged yet."""
    world = Scene("a.test:443/tcp\n").world
    for name, code in (("a.test", 0), ("b.test", 1)):
        given, said = said_by(explained(world, name, "tcp/443"), name, "tcp/443")
        assert (given, "no address of it is known here: tcp/443 can be judged when it was asked" in said) == (code, True)
    world.resolve("a.test.", "203.0.113.7")
    assert "no address of it" not in said_by(explained(world, "a.test", "tcp/443"), "a.test", "tcp/443")[1]


def test_what_the_guard_took_out_is_said_of_the_name() -> None:
    """With the remedy; of another name nothing."""
    world = Scene("internal.test\nb.test\n").world
    world.resolve("internal.test.", "10.9.9.9")
    explain = explain_in(world)
    fact = next(fact for fact in world.facts if fact.kind == "guard")
    explain.hear_of_guard(fact.fields, fact.at)
    answer: dict[str, Any] = at_once(explain.explained({"target": "internal.test"}))
    assert answer["taken_out"]["addresses"] == {"10.9.9.9": "private"}
    said = said_by(answer, "internal.test")[1]
    assert "10.9.9.9 (private), by the address guard, 0s ago" in said
    assert "dns.allow-addresses" in said
    assert at_once(explain.explained({"target": "b.test"}))["taken_out"] is None


def test_a_flow_is_judged_by_what_it_remembers() -> None:
    """Its identity and set, and what becomes of its next packet, beside the verdict of a new flow."""
    scene = Scene("a.test:443/tcp\n")
    learned(scene, "a.test.", "203.0.113.7")
    tables, now = WorldTables(scene.world), scene.world.now
    identity = scene.world.kernel.rows[Table.IPCACHE][IpcacheKey(1, Prefix.of(packed("203.0.113.7")))]
    flow = Flow(
        1, packed("192.0.2.11"), packed("203.0.113.7"), 50_000, 443, 6, int(str(identity)), 1, 1, Direction.EGRESS,
        FlowState.LIVE, False, False, now - 5, now + 100, 443, True, False,
    )  # fmt: skip
    ended = flow._replace(local_port=50_001, state=FlowState.ENDED, last=now - 9)
    other = flow._replace(remote_port=80, policy_port=80)
    tables.kept += [ended, flow, other]
    asked = {"target": "203.0.113.7", "packet": "tcp/443"}
    shown: Any = at_once(explain_in(scene.world, tables).explained(asked))
    assert [(one["state"], one["next_packet"], one["next_passes"]) for one in shown["flows"]] == [
        ("live", "pass-flow", True),
        ("ended", "flow-ended", False),
    ]
    scene.apply("b.test\n")
    shown = at_once(explain_in(scene.world, tables).explained(asked))
    assert [one["next_packet"] for one in shown["flows"]] == ["policy", "policy"], "what an ended flow sends is judged anew"


def test_policies_that_are_not_in_force(tmp_path: Path) -> None:
    """The verdict is theirs, with the names known now, and nothing is put in force; a mistake in them is a sentence."""
    scene = Scene("a.test:443/tcp\n")
    learned(scene, "a.test.", "203.0.113.7")
    other = tmp_path / "other.list"
    other.write_text("a.test:80/tcp\n")
    files = [str(other)]
    assert not explained(scene.world, "203.0.113.7", "tcp/443", policies=files)["allowed"]
    answer = explained(scene.world, "203.0.113.7", "tcp/80", policies=files)
    assert (answer["allowed"], answer["rule"]) == (True, f"{other}:1")
    assert explained(scene.world, "203.0.113.7", "tcp/443")["allowed"]
    assert explained(scene.world, "b.test", policies=files)["endpoints"][0]["change"]["entry"] == "b.test"
    other.write_text("a.test:80/nonsense\n")
    with pytest.raises(ControlError, match="is no protocol"):
        explained(scene.world, "203.0.113.7", "tcp/80", policies=files)


_ASKING: Final = "    - toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchName: a.test}]}}]\n"


@pytest.mark.parametrize("policy", ["a.test\n", f"{_HEAD}  egress:\n{_ASKING}"])
def test_the_change_for_a_name(policy: str) -> None:
    """Where DNS is implied a name opens itself; where a rule speaks of DNS it is told to as well. A line out closes it."""
    scene = Scene(policy)
    answer = explained(scene.world, "b.test", "tcp/443")["endpoints"][0]
    assert not answer["may_ask"]
    text = answer["change"]["policy"]
    scene.world.apply(*policies_of(policy), *policies_of(text))
    scene.world.advance(0.0)
    allowed = explained(scene.world, "b.test")["endpoints"][0]
    assert allowed["may_ask"], text
    assert allowed["change"]["take_out"]


def test_policies_without_an_agent(tmp_path: Path) -> None:
    """A packet to a network is judged without root and without anything that runs; what a name would open is said."""
    policies = tmp_path / "p.list"
    policies.write_text("203.0.113.0/24:443/tcp\na.test:80/tcp\n")
    environment = Environment(is_root=lambda: False)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner(env={"NAMEGATE_CONTROL": None}).invoke(main, ["explain", *arguments], obj=environment)
        return result.exit_code, result.output

    code, said = call("--policy", str(policies), "203.0.113.7", "tcp/443")
    assert (code, f"{policies}:1" in said, "no agent was asked" in said) == (0, True, True)
    code, said = call("--policy", str(policies), "198.51.100.7", "tcp/80")
    assert code == 1
    assert f"were it an address of fqdn:a.test. ({policies}:2)" in said
    assert "add to a list: 198.51.100.7:80/tcp" in said
    assert call("--policy", str(policies), "a.test")[0] == 2
    assert call("198.51.100.7", "tcp/80")[0] == 2
    only_of_build = _HEAD.replace("endpointSelector: {}", "endpointSelector: {matchLabels: {app: build}}")
    policies.with_suffix(".yaml").write_text(f"{only_of_build}  egress:\n    - toCIDR: [203.0.113.7/32]\n")
    for labels, expected in (("app=build", 1), ("app=web", 0)):
        asked = ("--policy", str(policies.with_suffix(".yaml")), "--endpoint", labels, "203.0.113.9", "tcp/443")
        assert call(*asked)[0] == expected
