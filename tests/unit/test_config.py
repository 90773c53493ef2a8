"""agent.config: the file a person writes."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import (
    Config,
    ConfigError,
    DatapathSettings,
    Denied,
    DeniedAnswer,
    DnsSettings,
    EndpointSettings,
    GateSettings,
    Learn,
    Limits,
    OnFailure,
    TestingSettings,
    duration_text,
    load,
    parse,
    policy_files,
    seconds_of,
)
from agent.core.known_bad import KnownBad
from agent.core.settings import Upstream
from agent.core.types import Orientation, packed
from agent.datapath import datapath

SMALLEST = "endpoints: [{interface: veth0}]\npolicies: [policy.yaml]\n"

FULL = """
endpoints:
  - interface: "veth-ci-*"
    orientation: uplink
  - interface: veth0
    labels: {app: build, example.org/tier: "1"}
    addresses: [192.0.2.1, "2001:db8::1", "::ffff:192.0.2.1", 198.51.100.8/30]
    audit: true
    learn: per-endpoint
    dhcp: true
    denied: drop
policies: ["*.yaml"]
dns:
  upstreams: [192.0.2.9, "192.0.2.10:5353", "[2001:db8::9]:53", "2001:db8::10"]
  ttl-floor: 30
  ttl-cap: 2h
  clamp-ttl: true
  denied-answer: refused
  keep-while-flow-seen: 90s
  keep-past-lifetime: 1d
  history-file: history
gate: {deadline: 250ms, on-failure: release}
control: {socket: control.sock}
datapath:
  pin-directory: /sys/fs/bpf/other
  device: ng1
  mark: 0x20
  mark-mask: 0x30
  routing-table: 77
  rule-priority: 10
  ipcache-rows: 64
limits: {identities: 100, open-questions-per-endpoint: 8}
testing: {enabled: true, known-bad: [release-first], trace: trace.json}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a policy and the resolv.conf of a host."""
    (tmp_path / "policy.yaml").write_text("", encoding="utf-8")
    (tmp_path / "resolv.conf").write_text("search test\nnameserver 192.0.2.53\nnameserver 2001:db8::53\n", encoding="utf-8")
    return tmp_path


def read(here: Path, text: str) -> Config:
    return parse(text, here / "namegate.yaml", here / "resolv.conf")


FIRST = "endpoints[0].interface"
ADDRESSES = "namegate.yaml:1: endpoints[0].addresses"


def mistakes(here: Path, text: str) -> list[str]:
    """The sentences with which the text is refused, without the directory."""
    with pytest.raises(ConfigError) as caught:
        read(here, text)
    return [str(mistake).replace(f"{here}/", "") for mistake in caught.value.mistakes]


def test_the_smallest_file_has_every_default(here: Path) -> None:
    """The defaults are those of the dataclasses; upstreams are the host's resolvers."""
    config = read(here, SMALLEST)
    assert config.endpoints == (EndpointSettings("veth0", line=1),)
    assert config.policies == (str(here / "policy.yaml"),)
    assert config.dns == DnsSettings(upstreams=(Upstream(packed("192.0.2.53")), Upstream(packed("2001:db8::53"))))
    assert (config.gate, config.datapath, config.limits) == (GateSettings(), DatapathSettings(), Limits())
    assert str(config.control.socket) == "/run/namegate/control.sock"
    assert not config.testing.enabled
    assert config.warnings == ()


def test_every_key_is_read(here: Path) -> None:
    """Each value differs from its default, and arrives ready for use."""
    config = read(here, FULL)
    [pattern, endpoint] = config.endpoints
    assert pattern == EndpointSettings("veth-ci-*", orientation=Orientation.UPLINK, line=3)
    assert endpoint.interface == "veth0"
    assert endpoint.labels == {"app": "build", "example.org/tier": "1"}
    assert endpoint.addresses == tuple(map(packed, ("192.0.2.1", "2001:db8::1", "198.51.100.9", "198.51.100.10")))
    assert (endpoint.orientation, endpoint.audit, endpoint.learn) == (Orientation.BEHIND, True, Learn.PER_ENDPOINT)
    assert (endpoint.dhcp, endpoint.denied) == (True, Denied.DROP)
    assert config.dns.upstreams == (
        Upstream(packed("192.0.2.9")),
        Upstream(packed("192.0.2.10"), 5353),
        Upstream(packed("2001:db8::9")),
        Upstream(packed("2001:db8::10")),
    )
    dns = config.dns
    assert (dns.ttl_floor, dns.ttl_cap, dns.clamp_ttl, dns.denied_answer) == (30.0, 7200.0, True, DeniedAnswer.REFUSED)
    assert (dns.keep_while_flow_seen, dns.keep_past_lifetime) == (90.0, 86_400.0)
    assert dns.history_file == here / "history"
    assert config.gate == GateSettings(0.25, OnFailure.RELEASE)
    assert config.control.socket == here / "control.sock"
    assert config.datapath == DatapathSettings(Path("/sys/fs/bpf/other"), "ng1", 0x20, 0x30, 77, 10, ipcache_rows=64)
    assert config.limits == Limits(identities=100, open_questions_per_endpoint=8)
    assert config.testing == TestingSettings(True, frozenset({KnownBad.RELEASE_FIRST}), here / "trace.json")


@pytest.mark.parametrize("text", ["none", '""'])
def test_no_history_file(here: Path, text: str) -> None:
    """The word, or empty text: the history is in memory alone."""
    assert read(here, f"{SMALLEST}\ndns: {{history-file: {text}}}\n").dns.history_file is None


def test_all_mistakes_are_told_at_once(here: Path) -> None:
    """In the order of the file, each with its line and path."""
    assert mistakes(
        here,
        """endpoints:
  - interface: name-is-too-long
    lables: {}
  - labels: {app: 1}
  - interface: veth0
    orientation: sideways
  - interface: veth0
    addresses: [nonsense, "fe80::1%veth0"]
policies: [absent.yaml]
dns:
  ttl-floor: 1 minute
gate: {deadline: 5s}
limits: {identities: 0}
datapath: {mark: 0x1000, routing-table: 254}
gates: {}
""",
    ) == [
        f"namegate.yaml:2: {FIRST}: `name-is-too-long` is no interface's name: 1 to 15 bytes, no blank, `/` or `:`",
        "namegate.yaml:3: endpoints[0].lables: unknown field 'lables'; did you mean labels?",
        "namegate.yaml:4: endpoints[1]: `interface` is missing",
        "namegate.yaml:4: endpoints[1].labels.app: '1' is a number in YAML; put it in quotes: \"1\"",
        "namegate.yaml:6: endpoints[2].orientation: `sideways` is not one of behind, uplink",
        "namegate.yaml:7: endpoints[3]: `veth0` is an endpoint already, in line 5",
        "namegate.yaml:8: endpoints[3].addresses[0]: `nonsense` is not an address",
        "namegate.yaml:8: endpoints[3].addresses[1]: `fe80::1%veth0` is not an address",
        "namegate.yaml:9: policies[0]: there is no absent.yaml",
        "namegate.yaml:11: dns.ttl-floor: `1 minute` is not a duration: write 200ms, 60s, 5m, 24h, 7d or a number of seconds",
        "namegate.yaml:12: gate.deadline: 5s is outside 10ms to 4s",
        "namegate.yaml:13: limits.identities: 0 is outside 1 to 16777216",
        "namegate.yaml:14: datapath.mark: mark 0x1000 has bits outside mark-mask 0xf00",
        "namegate.yaml:14: datapath.routing-table: 254 is the kernel's own table: choose a number nobody uses",
        "namegate.yaml:15: gates: unknown field 'gates'; did you mean gate?",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "namegate.yaml:1: says nothing: it needs `endpoints` and `policies`"),
        ("\x00", "namegate.yaml:1: has a character that no text file has"),
        ("policies: []\n", "namegate.yaml:1: `endpoints` is missing"),
        (SMALLEST + "---\na: 1\n", "namegate.yaml:4: a second document: the configuration is one"),
        (SMALLEST + "limits: {open-questions: 8, open-questions-per-endpoint: 9}\n",
         "namegate.yaml:3: limits.open-questions-per-endpoint: is more than there are for all endpoints together, 8"),
        (SMALLEST + "dns: {ttl-floor: 2h, ttl-cap: 1h}\n", "namegate.yaml:3: dns.ttl-floor: ttl-floor is above ttl-cap"),
        (SMALLEST + "datapath: {mark: 0x10, mark-mask: 0x30}\n",
         ("namegate.yaml:3: datapath.mark: mark 0x10 is the lowest bit of mark-mask 0x30 alone: take another, or a higher one "
          "with it")),
        (SMALLEST + "datapath: {mark: auto, mark-mask: 0x30}\n",
         "namegate.yaml:3: datapath.mark-mask: says of which bits `mark` is; without a mark the agent chooses both"),
        (SMALLEST + "testing: {enabled: true, without: [xdp]}\n",
         "namegate.yaml:3: testing.without[0]: `xdp` is not one of tcx, batch"),
        (SMALLEST + "dns: {upstreams: ask}\n",
         "namegate.yaml:3: dns.upstreams: must be a list of addresses, or the word `asked`"),
        (SMALLEST + "testing: {known-bad: [release-first]}\n",
         "namegate.yaml:3: testing.known-bad: makes the agent worse on purpose: only with `enabled: true`, in a test"),
        (SMALLEST + "datapath: {device: 'ng*'}\n", "namegate.yaml:3: datapath.device: `ng*` is a pattern: name one interface"),
        ("endpoints: [{interface: 'veth*'}, {interface: 'veth*'}]\npolicies: []\n",
         "namegate.yaml:1: endpoints[1]: `veth*` is an endpoint already, in line 1"),
        ("endpoints: [{interface: 'veth[ab'}]\npolicies: []\n",
         f"namegate.yaml:1: {FIRST}: `veth[ab` has a `[` without its `]`: write the set whole, `veth[0-9]*`"),
        ("endpoints: [{interface: 'veth *'}]\npolicies: []\n",
         f"namegate.yaml:1: {FIRST}: `veth *` matches no interface's name: at most 64 bytes, no blank, `/` or `:`"),
        ("endpoints: [{interface: 'veth*', addresses: [192.0.2.1]}]\npolicies: []\n",
         f"{ADDRESSES}: are one interface's, not a pattern's: name it in an entry of its own"),
        ("endpoints: [{interface: lo}]\npolicies: []\n",
         f"namegate.yaml:1: {FIRST}: `lo` is no endpoint: what a host says to itself is not policed"),
        ("endpoints: [{interface: ng1}]\npolicies: []\ndatapath: {device: ng1}\n",
         f"namegate.yaml:1: {FIRST}: `ng1` is the agent's own device (`datapath.device`)"),
        ("endpoints: [{interface: br0, addresses: [10.0.0.0/16]}]\npolicies: []\n",
         f"{ADDRESSES}[0]: `10.0.0.0/16` is more than 256 addresses: name those in use, or leave `addresses` out"),
        ("endpoints: [{interface: eth0, orientation: uplink, addresses: [192.0.2.1]}]\npolicies: []\n",
         f"{ADDRESSES}: an uplink has the host's: leave the key out"),
        ("endpoints: [{interface: eth0, orientation: uplink, dhcp: false}]\npolicies: []\n",
         "namegate.yaml:1: endpoints[0].dhcp: an uplink may always ask, or the host would lose its address: leave the key out"),
        ("endpoints: [{interface: veth0, denied: reject}]\npolicies: []\n",
         "namegate.yaml:1: endpoints[0].denied: `reject` is not one of answer, drop"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_sentence(here: Path, text: str, sentence: str) -> None:
    """No mistake brings another with it."""
    assert mistakes(here, text) == [sentence]


@pytest.mark.parametrize(
    "upstream", ["dns.example", "192.0.2.1:0", "192.0.2.1:65536", "[2001:db8::1", "0.0.0.0", "224.0.0.251", "fe80::1%eth0", ""]
)
def test_an_upstream_is_an_address_that_can_be_asked(here: Path, upstream: str) -> None:
    """Names would have to be resolved by what is being configured."""
    [sentence] = mistakes(here, SMALLEST + f'dns: {{upstreams: ["{upstream}"]}}\n')
    assert sentence.startswith(f"namegate.yaml:3: dns.upstreams[0]: `{upstream}` is not an upstream: write 192.0.2.53, ")


def test_a_host_without_resolvers_must_name_upstreams(here: Path) -> None:
    """A zone cannot be asked through an address alone, so it does not count."""
    (here / "resolv.conf").write_text("nameserver fe80::1%eth0\n# nameserver 192.0.2.1\n", encoding="utf-8")
    assert mistakes(here, SMALLEST) == ["namegate.yaml:1: resolv.conf names no server that can be asked: say `dns.upstreams`"]
    (here / "resolv.conf").unlink()
    assert "resolv.conf cannot be read" in mistakes(here, SMALLEST)[0]


def test_a_resolver_on_the_host_is_refused_with_an_uplink(here: Path) -> None:
    """Its own questions would be intercepted and come back to it. Behind a veth it is fine."""
    (here / "resolv.conf").write_text("nameserver 127.0.0.53\n", encoding="utf-8")
    assert read(here, SMALLEST).dns.upstreams == (Upstream(packed("127.0.0.53")),)
    [sentence] = mistakes(here, "endpoints: [{interface: eth0, orientation: uplink}]\npolicies: []\n")
    assert "127.0.0.53 is on this host, and `eth0` is an uplink" in sentence
    assert "/run/systemd/resolve/resolv.conf" in sentence


def test_a_pattern_that_takes_every_interface_is_warned_about(here: Path) -> None:
    """Also those that lead out of the host: it may be meant."""
    config = read(here, "endpoints: [{interface: '*'}]\npolicies: []\n")
    assert [str(warning).split(": ", 2)[-1] for warning in config.warnings] == [
        "`*` matches every interface, those that lead out of this host too"
    ]


def test_asking_the_server_asked_is_warned_about(here: Path) -> None:
    """Then the workload chooses who teaches; resolv.conf does not matter."""
    (here / "resolv.conf").unlink()
    config = read(here, SMALLEST + "dns: {upstreams: asked}\n")
    assert config.dns.asks_the_server_asked
    assert config.dns.upstreams == ()
    assert [warning.line for warning in config.warnings] == [3]


def test_load_tells_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    """As a mistake like any other."""
    with pytest.raises(ConfigError, match=r"none\.yaml:1: cannot be read: No such file or directory"):
        load(tmp_path / "none.yaml")


def test_policies_are_found_from_the_directory_of_the_file(here: Path) -> None:
    """A directory gives its visible policy files, a glob its matches, each once and in order; what is gone stays to be told."""
    directory = here / "policies"
    directory.mkdir()
    for name in ("b.yaml", "a.yml", ".hidden.yaml", "README.md", "names.txt"):
        (directory / name).write_text("", encoding="utf-8")
    config = read(
        here, "endpoints: [{interface: veth0}]\npolicies: [policies, 'policies/*.yaml', policy.yaml, 'policies/no*']\n"
    )
    found = policy_files(config.policies)
    assert [str(path.relative_to(here)) for path in found] == [
        "policies/a.yml",
        "policies/b.yaml",
        "policies/names.txt",
        "policy.yaml",
    ]
    assert policy_files([str(here / "gone.yaml")]) == (here / "gone.yaml",)


def test_a_glob_in_a_directory_that_is_not_there_is_refused(here: Path) -> None:
    """A typing error would leave the endpoints without policy."""
    assert mistakes(here, "endpoints: [{interface: veth0}]\npolicies: ['polices/*.yaml']\n") == [
        "namegate.yaml:2: policies[0]: there is no polices/*.yaml"
    ]


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("200ms", 0.2), ("60s", 60.0), ("5m", 300.0), ("24h", 86_400.0), ("7d", 604_800.0), ("0.5", 0.5), ("10", 10.0)],
)
def test_durations(duration: str, seconds: float) -> None:
    """Each unit, and none."""
    assert seconds_of(duration) == pytest.approx(seconds)


@pytest.mark.parametrize("duration", ["", "s", "-1s", "1 s", "1e3", "1S", "inf", "nan", "1h30m", "١s"])
def test_what_is_no_duration(duration: str) -> None:
    """Nothing is guessed."""
    assert seconds_of(duration) is None


@given(st.integers(0, 10_000_000))
def test_a_duration_written_is_read_back(milliseconds: int) -> None:
    """The text of a bound in an error sentence can be copied into the file."""
    seconds = milliseconds / 1000
    assert seconds_of(duration_text(seconds)) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("settings", [Limits, DatapathSettings, DnsSettings, GateSettings, EndpointSettings, TestingSettings])
def test_every_setting_is_documented(settings: type[Limits]) -> None:
    """The docstring names each key as it is written in the file."""
    unwritten = {"asks_the_server_asked", "line"}
    for each in fields(settings):
        if each.name not in unwritten:
            assert each.name.replace("_", "-") in (settings.__doc__ or ""), each.name


def test_the_datapath_takes_its_settings_by_the_same_names() -> None:
    """And has the same defaults: the command line hands them over as they are. But for the mark, which the start chooses."""
    theirs = {each.name: each.default for each in fields(datapath.Settings)} | {"mark": 0}
    assert {each.name: theirs.get(each.name) for each in fields(DatapathSettings)} == {
        each.name: each.default for each in fields(DatapathSettings)
    }


@settings(max_examples=150)
@given(st.data())
def test_no_text_raises_anything_else(data: st.DataObject) -> None:
    """A good file with a stretch of it replaced: a configuration, or ConfigError."""
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 12)))
    alphabet = st.one_of(st.sampled_from("[]{}:,-#&*!|>'\"%@\\0x~ \n\t"), st.characters(codec="utf-8"))
    text = FULL[:start] + data.draw(st.text(alphabet, max_size=6)) + FULL[end:]
    with contextlib.suppress(ConfigError):
        parse(text, Path("/nonexistent/namegate.yaml"), Path("/nonexistent/resolv.conf"))
