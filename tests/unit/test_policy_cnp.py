"""CiliumNetworkPolicy documents: what they become, and what is said about the ones that are refused."""

from __future__ import annotations

import textwrap

import pytest

from agent.core.rules import Cidr, Endpoints, Entity, Expression, Fqdn, LabelSelector, Operator, Policy, Ports, Rule
from agent.core.types import (
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    Direction,
    Prefix,
)
from agent.policy.files import Reading, read_policy_text

HEADER = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p}\n"
SPEC = HEADER + "spec:\n  endpointSelector: {}\n"


def read(text: str) -> Reading:
    return read_policy_text("p.yaml", text.encode())


def policies_of(text: str) -> tuple[Policy, ...]:
    reading = read(text)
    assert not reading.mistakes, list(map(str, reading.mistakes))
    return reading.policies


def rules_of(rules: str, section: str = "egress") -> tuple[Rule, ...]:
    (policy,) = policies_of(f"{SPEC}  {section}:\n{textwrap.indent(textwrap.dedent(rules).strip(), '  ')}\n")
    return policy.rules


def mistakes_of(text: str) -> list[str]:
    """As a person sees them."""
    return [str(mistake) for mistake in read(text).mistakes]


def only(items: tuple[Rule, ...]) -> Rule:
    (item,) = items
    return item


# --- what documents become -------------------------------------------------------------------------------------------


def test_names_with_ports() -> None:
    """Names are normalised and all go into one rule, whose origin is the rule's line."""
    rule = only(
        rules_of(
            """
            - toFQDNs:
              - matchName: API.Example.com
              - matchPattern: "*.cdn.example.com."
              toPorts:
              - ports:
                - {port: "443", protocol: TCP}
                - {port: "8000", endPort: 8080, protocol: UDP}
            """
        )
    )
    assert rule.peers == (Fqdn("api.example.com."), Fqdn("*.cdn.example.com."))
    assert rule.ports == (Ports(PROTOCOL_TCP, 443, 443), Ports(PROTOCOL_UDP, 8000, 8080))
    assert (rule.direction, rule.deny, rule.names) == (Direction.EGRESS, False, None)
    assert (str(rule.origin), rule.origin.policy) == ("p.yaml:7", "p")


@pytest.mark.parametrize("protocol", ["", ", protocol: ANY", ', protocol: ""', ", protocol: any"])
def test_any_protocol_is_every_protocol_with_ports(protocol: str) -> None:
    """Left out, ANY, empty: TCP, UDP and SCTP."""
    rule = only(rules_of(f'- toPorts: [{{ports: [{{port: "443"{protocol}}}]}}]'))
    assert rule.ports == tuple(Ports(number, 443, 443) for number in (PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP))
    assert rule.peers is None


def test_port_zero_is_every_port_of_its_protocol() -> None:
    """Not port 0."""
    rule = only(rules_of('- toPorts: [{ports: [{port: "0", protocol: TCP}]}]'))
    assert rule.ports == (Ports(PROTOCOL_TCP, 0, 65535),)


def test_a_service_name_is_its_port() -> None:
    """Whatever its case."""
    rule = only(rules_of("- toPorts: [{ports: [{port: HTTPS, protocol: TCP}, {port: domain, protocol: UDP}]}]"))
    assert rule.ports == (Ports(PROTOCOL_TCP, 443, 443), Ports(PROTOCOL_UDP, 53, 53))


def test_dns_rules_stand_apart_from_plain_ports() -> None:
    """One rule of the core for the plain ports, one for each entry with names; DNS is not spoken over SCTP."""
    plain, dns, every = rules_of(
        """
        - toCIDR: [192.0.2.53]
          toPorts:
          - ports: [{port: "53", protocol: ANY}]
            rules: {dns: [{matchName: a.test}, {matchPattern: "*.b.test"}]}
          - ports: [{port: "443", protocol: TCP}]
          - ports: [{port: "5353", protocol: UDP}]
            rules: {dns: []}
        """
    )
    assert (plain.ports, plain.names) == ((Ports(PROTOCOL_TCP, 443, 443),), None)
    assert dns.ports == (Ports(PROTOCOL_TCP, 53, 53), Ports(PROTOCOL_UDP, 53, 53))
    assert dns.names == ("a.test.", "*.b.test.")
    assert (every.ports, every.names) == ((Ports(PROTOCOL_UDP, 5353, 5353),), ())
    assert plain.peers == dns.peers == every.peers == (Cidr(Prefix.parse("192.0.2.53/32")),)


def test_empty_rules_say_nothing_about_dns() -> None:
    """`rules: {}` is not `rules: {dns: []}`."""
    assert only(rules_of('- toPorts: [{ports: [{port: "53"}], rules: {}}]')).names is None


def test_other_peers() -> None:
    """Networks with holes, entities, endpoints; host bits are masked and said so."""
    reading = read(
        SPEC
        + textwrap.dedent(
            """\
              egress:
              - toCIDRSet: [{cidr: 10.0.0.1/8, except: [10.96.0.0/12]}]
              - toEntities: [world, host]
              - toEndpoints: [{matchLabels: {"k8s:app": db}}]
            """
        )
        .replace("\n", "\n  ")
        .replace("egress", "  egress", 1)
        .rstrip(" ")
    )
    assert not reading.mistakes
    networks, entities, endpoints = reading.policies[0].rules
    assert networks.peers == (Cidr(Prefix.parse("10.0.0.0/8"), (Prefix.parse("10.96.0.0/12"),)),)
    assert entities.peers == (Entity.WORLD, Entity.HOST)
    assert endpoints.peers == (Endpoints(LabelSelector((Expression("app", Operator.IN, frozenset({"db"})),))),)
    (caution,) = reading.cautions
    assert (
        str(caution)
        == "p.yaml:7: spec.egress[0].toCIDRSet[0].cidr: 10.0.0.1/8 has bits behind its length; it is taken as 10.0.0.0/8"
    )


def test_ingress_and_denials() -> None:
    """The same rules, turned round."""
    rule = only(rules_of('- fromCIDR: ["2001:db8::/32"]', "ingressDeny"))
    assert (rule.direction, rule.deny, rule.peers) == (Direction.INGRESS, True, (Cidr(Prefix.parse("2001:db8::/32")),))
    assert rule.ports is None


def test_icmp_types_by_name_and_number() -> None:
    """IPv4 where no family is given."""
    rule = only(rules_of("- icmps: [{fields: [{type: 8}, {type: EchoRequest, family: IPv6}, {type: '3'}]}]"))
    assert rule.ports == (Ports(PROTOCOL_ICMP, 8, 8), Ports(PROTOCOL_ICMPV6, 128, 128), Ports(PROTOCOL_ICMP, 3, 3))


def test_a_rule_that_says_nothing_opens_nothing() -> None:
    """Unlike Kubernetes' NetworkPolicy; the section is there, so it closes."""
    (policy,) = policies_of(SPEC + "  egress: [{}]\n  egressDeny: [{toPorts: []}]\n")
    assert policy.rules == ()
    assert (policy.default_deny_egress, policy.default_deny_ingress) == (True, False)


def test_missing_and_empty_are_two_things() -> None:
    """No list of ports is every port; an empty list of peers is nobody."""
    everywhere, nobody = rules_of("- toEntities: [all]\n- toCIDR: []")
    assert (everywhere.peers, everywhere.ports) == ((Entity.ALL,), None)
    assert nobody.peers == ()


def test_selectors_are_equal_however_they_were_written() -> None:
    """Sources of labels and the order of expressions have no meaning."""
    a, b = (
        only(rules_of(f"- toEndpoints: [{selector}]"))
        for selector in (
            '{matchLabels: {a: "1", "any:b": x}}',
            '{matchExpressions: [{key: a, operator: In, values: ["1"]}], matchLabels: {"k8s:b": x}}',
        )
    )
    assert a.peers == b.peers


def test_a_description_may_stand_at_every_level() -> None:
    """It is for people, and documentation puts it beside the metadata and into it as often as into the spec."""
    (policy,) = policies_of(
        """\
        apiVersion: cilium.io/v2
        kind: CiliumClusterwideNetworkPolicy
        description: why
        metadata: {name: p, description: why}
        spec: {description: why, endpointSelector: {}, egress: [{toEntities: [world]}]}
        """
    )
    assert policy.name == "p"


def test_a_namespaced_policy_stays_in_its_namespace() -> None:
    """Its subject, and its peers unless their selector speaks of namespaces; names and networks have none."""
    (policy,) = policies_of(
        HEADER.replace("name: p", "name: p, namespace: shop")
        + 'spec: {endpointSelector: {}, egress: [{toEndpoints: [{}, {matchLabels: {"k8s:io.kubernetes.pod.namespace": dns}}]}]}'
    )
    assert policy.namespace == "shop"
    assert policy.selects({"namespace": "shop"})
    assert not policy.selects({})
    here, there = only(policy.rules).peers or ()
    assert isinstance(here, Endpoints)
    assert isinstance(there, Endpoints)
    assert here.selector.matches({"namespace": "shop"})
    assert not here.selector.matches({"namespace": "other"})
    assert [expression.key for expression in there.selector.expressions] == ["io.kubernetes.pod.namespace"]


def test_a_clusterwide_policy_has_no_namespace() -> None:
    """One that names one would be taken for narrower than it is."""
    text = (SPEC + "  egress: [{}]\n").replace("CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
    assert policies_of(text)[0].namespace is None
    (mistake,) = mistakes_of(text.replace("name: p", "name: p, namespace: shop"))
    assert "has no namespace" in mistake


def test_annotations() -> None:
    """Prefixes the address guard lets through, and names taken out."""
    annotations = 'other: x, namegate/allow-addresses: "10.0.0.0/8, fd00::/8", namegate/except-names: "*.Ads.test, a.test"'
    header = HEADER.replace("{name: p}", f"{{name: p, annotations: {{{annotations}}}}}")
    (policy,) = policies_of(header + "spec: {endpointSelector: {}, egress: [{}]}")
    assert policy.allow_addresses == (Prefix.parse("10.0.0.0/8"), Prefix.parse("fd00::/8"))
    assert policy.except_names == ("*.ads.test.", "a.test.")


def test_spec_and_specs_are_a_policy_each() -> None:
    """Named so that a verdict can tell them apart."""
    specs = "specs:\n- {endpointSelector: {}, egress: [{}]}\n- {endpointSelector: {}, ingress: [{}]}\n"
    policies = policies_of(SPEC + "  egress: [{}]\n" + specs)
    assert [(policy.name, policy.origin.line) for policy in policies] == [("p", 4), ("p[0]", 8), ("p[1]", 9)]


def test_what_kubectl_gives_back_is_taken() -> None:
    """A List, with the fields the API server adds."""
    document = textwrap.dedent(
        """\
        apiVersion: v1
        kind: List
        metadata: {resourceVersion: ""}
        items:
        - apiVersion: cilium.io/v2
          kind: CiliumNetworkPolicy
          metadata:
            name: p
            creationTimestamp: 2024-08-23T10:00:00Z
            generation: 1
            managedFields: [{manager: kubectl}]
          spec:
            description: text
            labels: [{key: a, value: b, source: k8s}]
            log: {value: noted}
            endpointSelector: {matchLabels: {app: web}}
            egress: [{toEntities: [all]}]
          status: {conditions: []}
        """
    )
    (policy,) = policies_of(document)
    assert policy.selects({"app": "web"})


# --- what is refused -------------------------------------------------------------------------------------------------


def test_all_mistakes_of_a_file_come_at_once_each_with_its_line() -> None:
    """A person mends the file once."""
    text = SPEC + textwrap.dedent(
        """\
          egres: []
          egress:
          - toFQDNs: [{matchName: 192.0.2.7}]
            toPort: []
          - toCIDR: [300.1.2.0/24]
          - toFQDNs:
            - matchPattern: "*.a.test"
            toCIDR: [10.0.0.0/8]
          - toPorts:
            - ports: [{port: 443}]
            - ports: [{port: "443", protocol: GRE}]
        """
    ).replace("\n", "\n  ").rstrip(" ").replace("egres:", "  egres:", 1)
    said = mistakes_of(text)
    assert [mistake.split(": ")[0] for mistake in said] == [f"p.yaml:{line}" for line in (6, 8, 9, 10, 13, 15, 16)]
    for sentence, words in zip(
        said,
        (
            "did you mean egress?",
            "cidr:192.0.2.7/32",
            "did you mean toPorts?",
            "no network",
            "a rule for each",
            'quotes: "443"',
            "TCP, UDP",
        ),
        strict=True,
    ):
        assert words in sentence


@pytest.mark.parametrize(
    ("spec", "place", "words"),
    [
        ("egress: [{toFQDNs: [{}]}]", "spec.egress[0].toFQDNs[0]", "an empty entry selects nothing"),
        ("egress: [{toFQDNs: []}]", "spec.egress[0].toFQDNs", "the list of names is empty"),
        ("egress: [{toFQDNs: [{matchName: .}]}]", "spec.egress[0].toFQDNs[0].matchName", "is the root"),
        ("egress: [{toFQDNs: [{matchName: no}]}]", "spec.egress[0].toFQDNs[0].matchName", 'in quotes: "no"'),
        ("egress: [{toFQDNs: [{matchName: on}]}]", "spec.egress[0].toFQDNs[0].matchName", 'in quotes: "on"'),
        ("egress: [{toPorts: [{ports: [{port: 0443}]}]}]", "spec.egress[0].toPorts[0].ports[0].port", 'in quotes: "0443"'),
        (
            'egress: [{toPorts: [{ports: [{port: "0443"}]}]}]',
            "spec.egress[0].toPorts[0].ports[0].port",
            "without leading zeros",
        ),
        ('egress: [{toPorts: [{ports: "443"}]}]', "spec.egress[0].toPorts[0].ports", "must be a list"),
        ("egress: [{toPorts: [{}]}]", "spec.egress[0].toPorts[0]", "leave toPorts out"),
        ("egress: [{toPorts: [{ports: []}]}]", "spec.egress[0].toPorts[0]", "leave toPorts out"),
        (
            'egress: [{toPorts: [{ports: [{port: "1", endPort: "9"}]}]}]',
            "spec.egress[0].toPorts[0].ports[0].endPort",
            "without quotes",
        ),
        (
            'egress: [{toPorts: [{ports: [{port: "9", endPort: 1}]}]}]',
            "spec.egress[0].toPorts[0].ports[0].endPort",
            "exchange them",
        ),
        ("egress: [{toPorts: [{ports: [{port: nosuchservice}]}]}]", "spec.egress[0].toPorts[0].ports[0].port", "/etc/services"),
        (
            'egress: [{toPorts: [{ports: [{port: "53"}], rules: {dns: [{}]}}]}]',
            "spec.egress[0].toPorts[0].rules.dns[0]",
            'matchPattern: "*"',
        ),
        (
            'egress: [{toPorts: [{ports: [{port: "80"}], rules: {http: []}}]}]',
            "spec.egress[0].toPorts[0].rules.http",
            "not supported",
        ),
        (
            'egress: [{toPorts: [{ports: [{port: "53", protocol: SCTP}], rules: {dns: []}}]}]',
            "spec.egress[0].toPorts[0].ports[0].protocol",
            "ANY for both",
        ),
        (
            'egress: [{toPorts: [{ports: [{port: "443"}], serverNames: [a.test]}]}]',
            "spec.egress[0].toPorts[0].serverNames",
            "toFQDNs",
        ),
        ("egress: [{toServices: []}]", "spec.egress[0].toServices", "toCIDR"),
        ("ingress: [{fromRequires: []}]", "spec.ingress[0].fromRequires", "fromEndpoints"),
        ("ingress: [{fromFQDNs: []}]", "spec.ingress[0].fromFQDNs", "fromCIDR"),
        ("egressDeny: [{toFQDNs: [{matchName: a.test}]}]", "spec.egressDeny[0].toFQDNs", "namegate/except-names"),
        ("egress: [{toCIDRSet: [{cidrGroupRef: x}]}]", "spec.egress[0].toCIDRSet[0].cidrGroupRef", "write its networks out"),
        ('egress: [{toCIDR: ["::ffff:192.0.2.7"]}]', "spec.egress[0].toCIDR[0]", "as IPv4"),
        ("egress: [{toEntities: [world-ipv4]}]", "spec.egress[0].toEntities[0]", "0.0.0.0/0"),
        ("egress: [{toEndpoints: [{matchLabels: {app: 1}}]}]", "spec.egress[0].toEndpoints[0].matchLabels.app", 'quotes: "1"'),
        (
            'egress: [{toEndpoints: [{matchLabels: {"reserved:host": ""}}]}]',
            "spec.egress[0].toEndpoints[0].matchLabels.reserved:host",
            "toEntities",
        ),
        ("egress:", "spec.egress", "no value"),
        ("enableDefaultDeny: {egress: yes}", "spec.enableDefaultDeny.egress", "true or false"),
        ("nodeSelector: {}", "spec.nodeSelector", "uplink"),
        (
            "egress: [{toPorts: [{ports: [{protocol: VRRP}]}]}]",
            "spec.egress[0].toPorts[0].ports[0].protocol",
            "a rule without toPorts",
        ),
        ("egress: [{toPorts: [{ports: [{protocol: TCP}]}]}]", "spec.egress[0].toPorts[0].ports[0]", "has no port"),
        ("ingress: [{authentication: {mode: required}}]", "spec.ingress[0].authentication", "leave it out"),
        (
            "ingress: [{fromEndpoints: [{matchExpressions: [{key: a, operator: within}]}]}]",
            "spec.ingress[0].fromEndpoints[0].matchExpressions[0].operator",
            "In, NotIn",
        ),
        (
            "ingress: [{fromEndpoints: [{matchExpressions: [{key: a, operator: notin, values: [b]}]}]}]",
            "spec.ingress[0].fromEndpoints[0].matchExpressions[0].operator",
            "capitals count, write NotIn",
        ),
        ("authentication: {}", "spec.authentication", "unknown field"),
    ],
)
def test_what_is_refused_names_the_field_and_the_remedy(spec: str, place: str, words: str) -> None:
    """One sentence, on the line of the field."""
    (mistake,) = read(SPEC + "  " + spec + "\n").mistakes
    assert (mistake.line, mistake.field) == (6, place)
    assert words in mistake.message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("apiVersion: cilium.io/v1\nkind: CiliumNetworkPolicy\n", 1, "cilium.io/v2"),
        ("apiVersion: cilium.io/v2\nkind: NetworkPolicy\n", 2, "CiliumNetworkPolicy"),
        ("kind: CiliumNetworkPolicy\n", 1, "no apiVersion"),
        ("apiVersion: cilium.io/v2\nKind: CiliumNetworkPolicy\n", 1, "no kind"),
        (HEADER + "spec: {nodeSelector: {}, egress: [{}]}\n", 4, "uplink"),
        (HEADER + "description: [a, b]\nspec: {endpointSelector: {}, egress: [{}]}\n", 4, "must be text"),
        (HEADER + 'spec: {endpointSelector: {matchLabels: {"reserved:init": ""}}, egress: [{}]}\n', 4, "labels of its own"),
        (HEADER + "spec: {endpointSelector: {}}\nspec: {endpointSelector: {}}\n", 5, "given twice, first in line 4"),
        (HEADER + "spec: {egress: [{}]}\n", 4, "endpointSelector: {}"),
        (SPEC.replace("{name: p}", "{}"), 3, "no name"),
        (SPEC.replace("{name: p}", "{name: p, annotations: {namegate/alow: x}}"), 3, "unknown annotation"),
        (SPEC.replace("{name: p}", "{name: p, annotations: {namegate/except-names: 'a.test,'}}"), 3, "the name is empty"),
        (SPEC + "  egress:\n\t- {}\n", 7, "tab"),
        (SPEC + "  egress: [{toFQDNs: [{matchPattern: *.a.test}]}]\n", 6, "must stand in quotes"),
        (SPEC + "  <<: {egress: [{}]}\n", 6, "a merge key"),
        (SPEC + "  !!str egress: []\n", 6, "without it"),
    ],
)
def test_documents_that_are_refused(text: str, line: int, words: str) -> None:
    """The traps of YAML and of the header."""
    (mistake,) = read(text).mistakes
    assert (mistake.line, words in mistake.message) == (line, True), str(mistake)


def test_deny_rules_are_read_as_strictly_as_allow_rules() -> None:
    """A broken denial that denies nothing in silence is the worst outcome."""
    (mistake,) = mistakes_of(SPEC + "  egressDeny: [{toCIDRSet: [{cidr: 10.0.0.0/8, except: [11.0.0.0/16]}]}]\n")
    assert "does not lie inside 10.0.0.0/8" in mistake
