"""`check`: warnings about policies that are good and may not be meant, and the DNS that they imply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.policy.check import CheckResult, check

HEADER = """\
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: NAME}
spec:
  endpointSelector: SUBJECT
  egress:
"""
BY_NAME = "  - toFQDNs: [{matchName: a.test}, {matchPattern: '*.b.test'}]\n    toPorts: [{ports: [{port: '443'}]}]\n"
DNS = (
    "  - toEndpoints: [{matchLabels: {k8s-app: kube-dns}}]\n"
    "    toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchPattern: 'PATTERN'}]}}]\n"
)

Judge = Callable[..., CheckResult]


def document(rules: str, name: str = "p", subject: str = "{}") -> str:
    return HEADER.replace("NAME", name).replace("SUBJECT", subject) + rules


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def judged(*texts: str, endpoints: list[dict[str, str]] | None = None) -> CheckResult:
        paths = [tmp_path / f"f{place}" for place in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return check(paths, endpoints)

    return judged


def said(result: CheckResult) -> list[str]:
    return [str(warning._replace(file=Path(warning.file).name)) for warning in result.warnings]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("*.test", "test. is a public suffix"),
        ("*.com", "com. is a public suffix"),
        ("**.com", "com. is a public suffix"),
        ("*.co.uk", "co.uk. is a public suffix"),
        ("api-*.github.io", "github.io. is a public suffix"),
        ("*.*", "every top-level domain"),
        ("*", "every name there is"),
        ("198.51.100.9/25", "is taken as 198.51.100.0/25"),
        ("2001:db8:42::9/64", "is taken as 2001:db8:42::/64"),
    ],
)
def test_what_opens_more_than_one_thinks_is_taken_with_a_warning(judge: Judge, entry: str, words: str) -> None:
    """Accepted, with the line and what it opens; the exit code stays good."""
    result = judge(f"a.test\n{entry}\n")
    assert not result.mistakes
    (warning,) = said(result)
    assert warning.startswith("f0:2: ")
    assert words in warning


@pytest.mark.parametrize("entry", ["com", "*.example.com", "**.a.co.uk", "!*.com", "!*", "192.0.2.0/24"])
def test_what_is_narrow_has_no_warning(judge: Judge, entry: str) -> None:
    """Nor has a name that is taken out: the more of those, the less is open."""
    assert said(judge(entry)) == []


def test_names_imply_dns_for_exactly_these_names(judge: Judge) -> None:
    """Where no rule speaks of DNS, and `check` says so."""
    (implied,) = judge("a.test:443/tcp\n*.b.test\n!x.b.test\n192.0.2.7\n").implied
    assert implied.names == ("a.test.", "*.b.test.")
    assert "exactly these names is implied" in str(implied)
    assert str(implied).endswith("a.test., *.b.test. without x.b.test.")


@pytest.mark.parametrize("entry", ["192.0.2.53:53", "192.0.2.53:1-100/udp"])
def test_a_rule_for_port_53_ends_the_implication(judge: Judge, entry: str) -> None:
    """A rule that names port 53 is what the writer wants of DNS."""
    assert judge(f"a.test\n{entry}\n").implied == ()
    assert judge("a.test\n192.0.2.53:54\n!192.0.2.53:53\n").implied != ()


def test_another_policy_of_the_same_endpoints_ends_it_too(judge: Judge) -> None:
    """As far as labels alone can tell: one for all endpoints does, one for other endpoints does not."""
    names = document(BY_NAME, subject="{matchLabels: {app: web}}")
    assert judge(names, document(DNS.replace("PATTERN", "*"), "dns")).implied == ()
    assert judge(names, document(DNS.replace("PATTERN", "*"), "dns", "{matchLabels: {app: db}}")).implied != ()


def test_a_name_that_nobody_may_ask_for_is_never_learned(judge: Judge) -> None:
    """The usual mistake: a DNS rule for one name, a rule for another."""
    warnings = said(judge(document(BY_NAME + DNS.replace("PATTERN", "*.b.test")), endpoints=[{"k8s-app": "kube-dns"}]))
    assert warnings == ["f0:7: a.test. is open here, but no rule lets anybody ask for it, so its addresses are never learned"]
    wide = document(BY_NAME + DNS.replace("PATTERN", "**.test"))
    (warning,) = said(judge(wide, endpoints=[{"k8s-app": "kube-dns"}]))
    assert warning.startswith("f0:10: spec.egress[1].toPorts[0].rules.dns[0].matchPattern: **.test. takes names that")


def test_a_dns_rule_for_nobody_means_the_upstreams(judge: Judge) -> None:
    """In a cluster it names the DNS service; on one host nobody has its labels, and `check` says what that means."""
    text = document(BY_NAME + DNS.replace("PATTERN", "*"))
    assert any("where no endpoint here has these labels the DNS rule means" in warning for warning in said(judge(text)))
    assert any("labels, so the DNS rule means" in warning for warning in said(judge(text, endpoints=[{"app": "web"}])))
    assert not any("these labels" in warning for warning in said(judge(text, endpoints=[{"k8s-app": "kube-dns"}])))


def test_port_53_of_nobody_opens_no_question(judge: Judge) -> None:
    """Without rules.dns the server is meant, and there is none: no name is ever learned, and `check` says why."""
    service = "  - toEndpoints: [{matchLabels: {k8s-app: kube-dns}}]\n    toPorts: [{ports: [{port: 'PORT', protocol: UDP}]}]\n"
    text = document(BY_NAME + service.replace("PORT", "53"))
    for warning in (*said(judge(text)), *said(judge(text, endpoints=[{"app": "web"}]))):
        assert warning.startswith("f0:9: ")
        assert "no name can be asked by this rule; give it rules: {dns: […]}" in warning
    assert len(said(judge(text))) == len(said(judge(text, endpoints=[{"app": "web"}]))) == 1
    assert said(judge(text, endpoints=[{"k8s-app": "kube-dns"}])) == said(judge(document(service.replace("PORT", "80")))) == []


def test_two_policies_of_one_name_and_a_policy_without_effect(judge: Judge) -> None:
    """Both are taken, both are hardly meant."""
    warnings = said(judge(document("  - {}\n"), document("  - {}\n"), document("", "empty").replace("  egress:\n", "")))
    assert [warning.split(": ")[0] for warning in warnings] == ["f2:4", "f0:4"]
    assert "no effect" in warnings[0]
    assert "this name too" in warnings[1]


def test_mistakes_and_warnings_come_together(judge: Judge) -> None:
    """What is implied is not said while a file is refused: the answer may stand in it."""
    result = judge("*.com\n", "b.test:x\n")
    assert (len(result.policies), len(result.mistakes), len(result.warnings), result.implied) == (1, 1, 1, ())
