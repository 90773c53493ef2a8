"""The agent's configuration: one YAML file to frozen dataclasses.

Rule 1: all mistakes of a file are reported at once, each with its line; nothing is taken from a file that has one.
Rule 2: what the file does not say has its default in the dataclass, and nowhere else.
Rule 3: values are ready for use: addresses packed, durations as seconds, paths absolute (relative ones count from the file's
directory).

    endpoints:
      - interface: veth-build
        labels: {app: build}
    policies: [policies/]
    dns:
      upstreams: [192.0.2.53]

Durations are `200ms`, `60s`, `5m`, `24h`, `7d`, or a number of seconds.
"""

from __future__ import annotations

import difflib
import glob
import ipaddress
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from agent.control.runs import RUNS_DEVICE
from agent.core.distinct import NAMES_OF_A_MINUTE_MAX
from agent.core.known_bad import KnownBad
from agent.core.settings import Upstream
from agent.core.types import Address, Orientation, Prefix, packed, text_of
from agent.documents.fields import Field
from agent.documents.remarks import Caution, Mistake, Remarks
from agent.documents.yaml_tree import Scalar, Sequence, YamlError, line_of_unprintable, read_documents

_Word = TypeVar("_Word", bound=StrEnum)


class ConfigError(Exception):
    """The person who wrote the configuration is wrong; every mistake, in the order of the file."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(sorted(mistakes))
        super().__init__("\n".join(map(str, self.mistakes)))


class Learn(StrEnum):
    """For whom an address is opened that this endpoint learned: all endpoints whose policy selects the name, or only itself."""

    SHARED = "shared"
    PER_ENDPOINT = "per-endpoint"


class Denied(StrEnum):
    """How a packet of the endpoint is refused: answered, so that the client fails at once, or dropped without a word."""

    ANSWER = "answer"
    DROP = "drop"


class DeniedAnswer(StrEnum):
    NXDOMAIN = "nxdomain"
    REFUSED = "refused"


class Cname(StrEnum):
    """How a target of an allowed name's chain is judged when it is asked directly."""

    JUDGE = "judge"
    FOLLOW = "follow"


class OnFailure(StrEnum):
    """What a client gets whose reply could not be backed by kernel rows in time."""

    SERVFAIL = "servfail"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """One of `endpoints`: an interface whose traffic is policed, or a pattern of such.

    interface: its name, such as the host side of a veth; or a pattern: `*` is any run of characters, `?` any one, `[a-f]` and
    `[!a-f]` one that is in the set and one that is not. An interface belongs to the entry with its own name, else to the first
    whose pattern it matches. No pattern matches lo or the agent's own device.
    labels: what policies select it by, `{app: build}`.
    addresses: what it may send from, single addresses and small networks; none: taken from the host's routes and neighbours
    (host/endpoints.py).
    orientation: `behind` (default; veth, tap: a workload is behind it) or `uplink` (the host itself sends through it).
    audit: true lets everything pass and reports what would have been dropped; default false.
    learn: `shared` (default) or `per-endpoint`.
    dhcp: true lets it ask for an address; default: true for a tap and an uplink.
    denied: `answer` (default: a denied packet of the endpoint is refused, and the client fails at once) or `drop` (silently).
    line: where it stands in the file.
    """

    interface: str
    labels: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[Address, ...] = ()
    orientation: Orientation = Orientation.BEHIND
    audit: bool = False
    learn: Learn = Learn.SHARED
    dhcp: bool | None = None
    denied: Denied = Denied.ANSWER
    line: int = 0


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """One of `containers`: the containers of an engine that are policed.

    engine: its socket. select: labels that a container must have, all of them; none: every container of this engine. labels: of
    the endpoint besides the container's own. audit, learn, denied: as of `endpoints`. line: where it stands in the file.
    """

    engine: Path
    select: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    audit: bool = False
    learn: Learn = Learn.SHARED
    denied: Denied = Denied.ANSWER
    line: int = 0


@dataclass(frozen=True, slots=True)
class DnsSettings:
    """`dns`.

    upstreams: who is asked, in turn: addresses, with a port as `192.0.2.53:5353` or `[2001:db8::53]:5353`; default: the name
    servers of /etc/resolv.conf. The word `asked` instead of a list (upstreams is then empty, `asks_the_server_asked` true)
    passes each question to the server the workload asked: then the workload chooses who answers.
    ttl-floor: an address stays open at least so long after an answer; default 60s (TTLs of a few seconds are common, and
    clients connect later than that). ttl-cap: and at most so long; default 24h.
    clamp-ttl: `true` shortens the TTLs of answers to ttl-cap, so that no cache keeps an address that is closed; default false:
    they pass unchanged.
    denied-answer: `nxdomain` (default) or `refused`.
    cname: `judge` (default: a target of a chain that is asked directly needs a rule of its own) or `follow` (who was led to it
    by an allowed name may ask for it as long as that answer lives).
    keep-while-flow-seen: an address past its lifetime stays open while a packet of a flow was seen in this time; default 60s.
    keep-past-lifetime: but at most so long past it; default 1h.
    allow-addresses: networks the address guard lets through for every name, such as `[10.0.0.0/8]`; default none: an answer
    never opens private, link-local, loopback, metadata or the host's own addresses, and the record is taken out. For one
    policy: its annotation `namegate/allow-addresses`.
    history-file: where the names seen on addresses in the last day are kept, so that drops can be explained after a reboot too;
    default /var/lib/namegate/history; `none`: in memory alone.
    holder: `false`: no process keeps the DNS sockets while there is no agent, and questions are refused then; default true.
    holder-patience: how long it waits for the next agent before it answers SERVFAIL itself; default 800ms.
    names-per-minute: different names that one endpoint may ask under one pattern; what is over is answered like a denied name.
    Default 0: any number; how many they are is counted all the same.
    randomize-case: `true` asks upstreams in a random mix of upper and lower case (0x20), which their replies must repeat; a
    client gets its own back. Default false: some resolvers change it, and all their replies would be taken for forged.
    """

    upstreams: tuple[Upstream, ...] = ()
    asks_the_server_asked: bool = False
    ttl_floor: float = 60.0
    ttl_cap: float = 86_400.0
    clamp_ttl: bool = False
    denied_answer: DeniedAnswer = DeniedAnswer.NXDOMAIN
    cname: Cname = Cname.JUDGE
    keep_while_flow_seen: float = 60.0
    keep_past_lifetime: float = 3_600.0
    allow_addresses: tuple[Prefix, ...] = ()
    history_file: Path | None = Path("/var/lib/namegate/history")
    holder: bool = True
    holder_patience: float = 0.8
    names_per_minute: int = 0
    randomize_case: bool = False


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`gate`.

    deadline: how long a reply is held for its rows; default 1s, at most 4s: a stub resolver gives up after 5 s.
    on-failure: `servfail` (default: the address is not released) or `release` (it is; counted and logged each time).
    """

    deadline: float = 1.0
    on_failure: OnFailure = OnFailure.SERVFAIL


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """`control`. socket: where `namegate status` and its kind reach the agent; default /run/namegate/control.sock."""

    socket: Path = Path("/run/namegate/control.sock")


@dataclass(frozen=True, slots=True)
class DatapathSettings:
    """`datapath`: what the agent takes for itself in the kernel, and the sizes of its tables.

    pin-directory: on a bpf file system; default /sys/fs/bpf/namegate.
    device: name of the device that takes DNS questions over; default ng-gate.
    mark, mark-mask: the bits of the packet mark that say "from the agent"; default `auto`: the first of a list that nobody else
    uses on this host, and the same again at the next start. A mark alone is of mask 0xf00.
    routing-table, rule-priority: where the device's packets are made local; default table 2004, rule 9.
    ipcache-rows, policy-rows, flow-rows, fragment-rows, last-seen-rows: sizes of the kernel's maps; default 524288 (each
    family), 262144, 262144, 8192, 524288.
    answers-per-second: refusals sent to one endpoint, the rest is dropped silently; default 100, 0 for none.
    questions-per-second, question-burst: DNS questions that one endpoint may ask, what is over is denied; default 2000, 500;
    0 a second for no limit.
    verify-every: how often the kernel's tables are compared with what was written into them; default 30s, 0 for never.
    """

    pin_directory: Path = Path("/sys/fs/bpf/namegate")
    device: str = "ng-gate"
    mark: int = 0  # auto
    mark_mask: int = 0xF00
    routing_table: int = 2004
    rule_priority: int = 9
    ipcache_rows: int = 524_288
    policy_rows: int = 262_144
    flow_rows: int = 262_144
    fragment_rows: int = 8_192
    last_seen_rows: int = 524_288
    answers_per_second: int = 100
    questions_per_second: int = 2_000
    question_burst: int = 500
    verify_every: float = 30


@dataclass(frozen=True, slots=True)
class Limits:
    """`limits`: how much of everything, so that no client can have it all. Reaching one is counted and shown by `status`.

    identities (16384); names (1000000) in the DNS cache; addresses-per-name (1000); history (100000) of
    names seen on addresses, kept a day; policy-rows-per-set (16384); open-questions (8192) in all and
    open-questions-per-endpoint (512); held-replies (4096); tcp-connections (1024) in all and tcp-connections-per-endpoint
    (64) of clients.
    """

    identities: int = 16_384
    names: int = 1_000_000
    addresses_per_name: int = 1_000
    history: int = 100_000
    policy_rows_per_set: int = 16_384
    open_questions: int = 8_192
    open_questions_per_endpoint: int = 512
    held_replies: int = 4_096
    tcp_connections: int = 1_024
    tcp_connections_per_endpoint: int = 64


class Feature(StrEnum):
    """What the datapath does without on older kernels."""

    TCX = "tcx"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class TestingSettings:
    """`testing`: only for the test suites; without `enabled: true` the other keys are refused.

    enabled: allows the control command `inject`, which delays map writes and makes them fail; default false.
    known-bad: mistakes to make on purpose, so that a test is known to see them; a list of the words of `KnownBad`.
    trace: a file that gets a line of JSON for each map write the kernel has answered.
    without: features of newer kernels that are not to be used, as on one that lacks them: `tcx`, `batch`.
    """

    __test__ = False  # or pytest takes the name for a test class

    enabled: bool = False
    known_bad: frozenset[KnownBad] = frozenset()
    trace: Path | None = None
    without: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file.

    policies: files, directories and globs, made absolute; `policy_files` says which files these are now.
    warnings: what was accepted and should not pass unseen.
    """

    file: str = ""
    endpoints: tuple[EndpointSettings, ...] = ()
    containers: tuple[ContainerSettings, ...] = ()
    policies: tuple[str, ...] = ()
    dns: DnsSettings = DnsSettings()
    gate: GateSettings = GateSettings()
    control: ControlSettings = ControlSettings()
    datapath: DatapathSettings = DatapathSettings()
    limits: Limits = Limits()
    testing: TestingSettings = TestingSettings()
    warnings: tuple[Caution, ...] = ()


FILE_BYTES_MAX: Final = 4 << 20
ENDPOINTS_MAX: Final = 4_096  # rows of the kernel's table
NETWORK_ADDRESSES_MAX: Final = 256  # each is a row; a network of more is somebody's who could be asked for less
PATTERN_BYTES_MAX: Final = 64
RESOLV_CONF: Final = Path("/etc/resolv.conf")
POLICY_SUFFIXES: Final = (".yaml", ".yml", ".json", ".txt", ".list")


def load(path: Path, resolv_conf: Path = RESOLV_CONF) -> Config:
    """The configuration of a file; raises ConfigError."""
    try:
        with path.open("rb") as stream:
            octets = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([Mistake(str(path), 1, "", f"cannot be read: {error.strerror}")]) from None
    if len(octets) > FILE_BYTES_MAX:
        raise ConfigError([Mistake(str(path), 1, "", f"is larger than {FILE_BYTES_MAX >> 20} MiB: is it a configuration?")])
    try:
        return parse(octets.decode("utf-8-sig"), path, resolv_conf)
    except UnicodeDecodeError as error:
        line = octets.count(b"\n", 0, error.start) + 1
        raise ConfigError([Mistake(str(path), line, "", "is not UTF-8 text")]) from None


def runs_pins(network_namespace: int) -> Path:
    return Path(f"/sys/fs/bpf/namegate-runs-{network_namespace}")


def for_runs(directory: Path, network_namespace: int, resolv_conf: Path = RESOLV_CONF) -> Config:
    """Of an agent that only serves runs: nothing of it is an administrator's agent's. Raises ConfigError."""
    remarks = Remarks(str(resolv_conf))
    (nothing,) = read_documents("{}")
    upstreams = _resolvers(resolv_conf, Field(nothing, 1, "", remarks))
    if remarks.mistakes:
        raise ConfigError(remarks.mistakes)
    return Config(
        dns=DnsSettings(upstreams=upstreams, history_file=None, holder=False),
        control=ControlSettings(directory / "control.sock"),
        datapath=DatapathSettings(
            pin_directory=runs_pins(network_namespace),
            device=RUNS_DEVICE,
            routing_table=2005,
            rule_priority=8,
        ),
    )


def parse(text: str, path: Path, resolv_conf: Path = RESOLV_CONF) -> Config:
    """The configuration that a text says; `path` is where it stands. Raises ConfigError."""
    remarks = Remarks(str(path))
    unprintable = line_of_unprintable(text)
    if unprintable is not None:
        remarks.mistake(unprintable, "", "has a character that no text file has")
        raise ConfigError(remarks.mistakes)
    try:
        found = read_documents(text)
    except YamlError as error:
        remarks.mistake(error.line, "", error.message)
        raise ConfigError(remarks.mistakes) from None
    if not found:
        remarks.mistake(1, "", "says nothing: it needs `endpoints` and `policies`")
    elif len(found) > 1:
        remarks.mistake(found[1].line, "", "a second document: the configuration is one")
    if remarks.mistakes:
        raise ConfigError(remarks.mistakes)
    config = _config(Field(found[0], found[0].line, "", remarks), path, resolv_conf)
    if remarks.mistakes:
        raise ConfigError(remarks.mistakes)
    return config


def policy_files(policies: Iterable[str]) -> tuple[Path, ...]:
    """The files that paths, directories and globs stand for now, sorted, each once.

    Of a directory: its visible files whose name ends like a policy's (`POLICY_SUFFIXES`), without its subdirectories. A path
    that is not there stays in the result, so that reading it says so; a glob may match nothing.
    """
    files: dict[Path, None] = {}
    for policy in policies:
        path = Path(policy)
        if path.is_dir():
            inside = (entry for entry in path.iterdir() if entry.suffix in POLICY_SUFFIXES and not entry.name.startswith("."))
            files.update(dict.fromkeys(sorted(entry for entry in inside if entry.is_file())))
        elif path.exists() or not glob.has_magic(policy):
            files[path] = None
        else:
            directory, pattern = _directory_and_pattern(path)
            matches = (match for match in directory.glob(pattern) if match.is_file() and not match.name.startswith("."))
            files.update(dict.fromkeys(sorted(matches)))
    return tuple(files)


# --- sections --------------------------------------------------------------------------------------------------------


def _config(root: Field, path: Path, resolv_conf: Path) -> Config:
    keys = ("endpoints", "policies", "containers", "dns", "gate", "control", "datapath", "limits", "testing")
    entries = _entries(root, keys, required=keys[:2])
    base = path.absolute().parent
    datapath = _datapath(entries.get("datapath"), base)
    endpoints = _endpoints(entries.get("endpoints"), datapath.device, is_all="containers" not in entries)
    dns = _dns(entries.get("dns"), root, base, resolv_conf)
    sentence = asking_ourselves(dns.upstreams, endpoints, _is_loopback)
    if sentence is not None:
        entries.get("dns", root).mistake(sentence)
    return Config(
        file=str(path),
        endpoints=endpoints,
        containers=_containers(entries.get("containers"), base),
        policies=_policies(entries.get("policies"), base),
        dns=dns,
        gate=_gate(entries.get("gate")),
        control=_control(entries.get("control"), base),
        datapath=datapath,
        limits=_limits(entries.get("limits")),
        testing=_testing(entries.get("testing"), base),
        warnings=tuple(root.remarks.cautions),
    )


def _endpoints(entry: Field | None, device: str, *, is_all: bool) -> tuple[EndpointSettings, ...]:
    if entry is None:
        return ()
    items = entry.items()
    if items == [] and is_all:
        entry.caution("no endpoint: only what `namegate attach` names is policed")
    elif len(items or ()) > ENDPOINTS_MAX:
        entry.mistake(f"more than {ENDPOINTS_MAX} endpoints")
    endpoints: list[EndpointSettings] = []
    lines: dict[str, int] = {}
    for item in items or ():
        endpoint = _endpoint(item, device)
        interface = endpoint.interface
        if interface in lines:
            item.mistake(f"`{interface}` is an endpoint already, in line {lines[interface]}")
        elif interface:
            lines[interface] = item.line
        endpoints.append(endpoint)
    return tuple(endpoints)


ENDPOINT_KEYS: Final = ("interface", "labels", "addresses", "orientation", "audit", "learn", "dhcp", "denied")


def _endpoint(item: Field, device: str) -> EndpointSettings:
    entries = _entries(item, ENDPOINT_KEYS, required=ENDPOINT_KEYS[:1])
    interface = _interface_or_pattern(entries.get("interface"), device)
    orientation = Orientation[_word(entries.get("orientation"), _OrientationWord.BEHIND).name]
    if glob.has_magic(interface) and "addresses" in entries:
        entries["addresses"].mistake("are one interface's, not a pattern's: name it in an entry of its own")
    if orientation is Orientation.UPLINK and "addresses" in entries:
        entries["addresses"].mistake("an uplink has the host's: leave the key out")
    dhcp = entries["dhcp"].truth() if "dhcp" in entries else None
    if orientation is Orientation.UPLINK and dhcp is False:
        entries["dhcp"].mistake("an uplink may always ask, or the host would lose its address: leave the key out")
    return EndpointSettings(
        interface=interface,
        labels=_labels(entries.get("labels")),
        addresses=_addresses(entries.get("addresses")),
        orientation=orientation,
        audit=_truth(entries.get("audit"), False),
        learn=_word(entries.get("learn"), Learn.SHARED),
        dhcp=dhcp,
        denied=_word(entries.get("denied"), Denied.ANSWER),
        line=item.line,
    )


def _containers(entry: Field | None, base: Path) -> tuple[ContainerSettings, ...]:
    containers = []
    for item in _items(entry):
        keys = ("engine", "select", "labels", "audit", "learn", "denied")
        entries = _entries(item, keys, required=keys[:1])
        containers.append(
            ContainerSettings(
                engine=_path(entries.get("engine"), base, Path()),
                select=_labels(entries.get("select")),
                labels=_labels(entries.get("labels")),
                audit=_truth(entries.get("audit"), False),
                learn=_word(entries.get("learn"), Learn.SHARED),
                denied=_word(entries.get("denied"), Denied.ANSWER),
                line=item.line,
            )
        )
    return tuple(containers)


def endpoint_of(said: Mapping[str, object], device: str) -> EndpointSettings:
    """One endpoint, said with the keys and in the syntax of `endpoints`, as by `attach`; a value of None is not said.

    Raises ConfigError, which names the keys.
    """
    remarks = Remarks("attach")
    text = json.dumps({key: value for key, value in said.items() if value is not None}, ensure_ascii=False)
    if line_of_unprintable(text) is not None:
        remarks.mistake(1, "", "there is a character in it that no text has")
        raise ConfigError(remarks.mistakes)
    try:
        (root,) = read_documents(text)
    except YamlError as error:
        remarks.mistake(1, "", error.message)
        raise ConfigError(remarks.mistakes) from None
    endpoint = _endpoint(Field(root, root.line, "", remarks), device)
    if not remarks.mistakes and glob.has_magic(endpoint.interface):
        remarks.mistake(1, "interface", "a pattern stands in the configuration; here one interface is named")
    if remarks.mistakes:
        raise ConfigError(remarks.mistakes)
    return endpoint


def said_of(endpoint: EndpointSettings) -> dict[str, object]:
    """What `endpoint_of` reads again."""
    return {
        "interface": endpoint.interface,
        "labels": dict(endpoint.labels),
        "addresses": [text_of(address) for address in endpoint.addresses] or None,
        "orientation": endpoint.orientation.name.lower(),
        "audit": endpoint.audit,
        "learn": endpoint.learn.value,
        "dhcp": endpoint.dhcp,
        "denied": endpoint.denied.value,
    }


class _OrientationWord(StrEnum):
    BEHIND = "behind"
    UPLINK = "uplink"


_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_KEY: Final = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL.pattern}")


def is_label(key: str, value: str) -> bool:
    """Kubernetes' syntax, because policies that select by them are checked by Kubernetes' rules too."""
    return bool(_LABEL_KEY.fullmatch(key)) and (not value or bool(_LABEL.fullmatch(value)))


def _labels(entry: Field | None) -> dict[str, str]:
    """Kubernetes' syntax, because policies that select by them are checked by Kubernetes' rules too."""
    if entry is None:
        return {}
    labels: dict[str, str] = {}
    for key, value in (entry.any_parts() or {}).items():
        text = value.text()
        if not _LABEL_KEY.fullmatch(key):
            value.mistake(f"`{key}` is no label: letters, digits, `-`, `_`, `.`, at most 63, with an optional prefix and `/`")
        elif text is not None and text and not _LABEL.fullmatch(text):
            value.mistake(f"`{text}` is no label's value: letters, digits, `-`, `_`, `.`, at most 63")
        elif text is not None:
            labels[key] = text
    return labels


def _addresses(entry: Field | None) -> tuple[Address, ...]:
    """A network stands for the addresses a host in it can have: not for its own, nor for an IPv4 network's broadcast."""
    addresses: dict[Address, None] = {}
    for item in _items(entry):
        text = item.text()
        if text is None:
            continue
        try:
            prefix = Prefix.parse(text)
        except ValueError:
            item.mistake(f"`{text}` is not an address")
            continue
        if prefix.is_address:
            addresses[prefix.address] = None
            continue
        network = ipaddress.ip_network((prefix.address, prefix.length))
        if network.num_addresses > NETWORK_ADDRESSES_MAX:
            item.mistake(
                f"`{text}` is more than {NETWORK_ADDRESSES_MAX} addresses: name those in use, or leave `addresses` out"
            )
            continue
        addresses.update(dict.fromkeys(host.packed for host in network.hosts()))
    return tuple(addresses)


def _packed(text: str) -> Address:
    """Raises ValueError, also for an address with a zone (`fe80::1%eth0`), which `ipaddress` takes and packs without it."""
    if "%" in text:
        raise ValueError(text)
    return packed(text)


def _policies(entry: Field | None, base: Path) -> tuple[str, ...]:
    """A path that is not there is a mistake, or a typing error would leave an endpoint without its policy."""
    policies: list[str] = []
    for item in _items(entry):
        text = item.text()
        if text is None:
            continue
        policy = base / text
        if not text:
            item.mistake("is empty: say a file, a directory or a glob")
        elif policy.exists() or (glob.has_magic(text) and _directory_and_pattern(policy)[0].is_dir()):
            policies.append(str(policy))
        else:
            item.mistake(f"there is no {policy}")
    return tuple(policies)


def _directory_and_pattern(policy: Path) -> tuple[Path, str]:
    """An absolute glob to the directory that its literal part names, and the rest."""
    literal = next(index for index, part in enumerate(policy.parts) if glob.has_magic(part))
    return Path(*policy.parts[:literal]), str(Path(*policy.parts[literal:]))


def _dns(entry: Field | None, root: Field, base: Path, resolv_conf: Path) -> DnsSettings:
    default = DnsSettings()
    keys = (
        "upstreams",
        "ttl-floor",
        "ttl-cap",
        "clamp-ttl",
        "denied-answer",
        "cname",
        "keep-while-flow-seen",
        "keep-past-lifetime",
        "allow-addresses",
        "history-file",
        "holder",
        "holder-patience",
        "names-per-minute",
        "randomize-case",
    )
    entries = _entries(entry, keys)
    floor = _seconds(entries.get("ttl-floor"), default.ttl_floor, 0, _WEEK)
    cap = _seconds(entries.get("ttl-cap"), default.ttl_cap, 1, _WEEK)
    if floor > cap:
        entries.get("ttl-floor", entries.get("ttl-cap", root)).mistake("ttl-floor is above ttl-cap")
    stated = entries.get("upstreams")
    asked = stated is not None and isinstance(stated.node, Scalar) and stated.node.text == "asked"
    upstreams: tuple[Upstream, ...] = ()
    if stated is None:
        upstreams = _resolvers(resolv_conf, entry or root)
    elif asked:
        stated.caution("`asked`: a workload chooses who answers, and so can open any address for a name it may ask")
    else:
        upstreams = _upstreams(stated)
    return DnsSettings(
        upstreams=upstreams,
        asks_the_server_asked=asked,
        ttl_floor=floor,
        ttl_cap=cap,
        clamp_ttl=_truth(entries.get("clamp-ttl"), default.clamp_ttl),
        denied_answer=_word(entries.get("denied-answer"), default.denied_answer),
        cname=_word(entries.get("cname"), default.cname),
        keep_while_flow_seen=_seconds(entries.get("keep-while-flow-seen"), default.keep_while_flow_seen, 0, _WEEK),
        keep_past_lifetime=_seconds(entries.get("keep-past-lifetime"), default.keep_past_lifetime, 0, _WEEK),
        allow_addresses=_prefixes(entries.get("allow-addresses")),
        history_file=_path_or_none(entries.get("history-file"), base, default.history_file),
        holder=_truth(entries.get("holder"), default.holder),
        holder_patience=_seconds(entries.get("holder-patience"), default.holder_patience, 0, 60),
        names_per_minute=_integer(entries.get("names-per-minute"), default.names_per_minute, 0, NAMES_OF_A_MINUTE_MAX),
        randomize_case=_truth(entries.get("randomize-case"), default.randomize_case),
    )


def _prefixes(entry: Field | None) -> tuple[Prefix, ...]:
    found: dict[Prefix, None] = {}
    for item in _items(entry):
        text = item.text()
        if text is None:
            continue
        try:
            found[Prefix.parse(text)] = None
        except ValueError:
            item.mistake(f"`{text}` is not a network: write 10.0.0.0/8 or fd00::/8")
    return tuple(found)


def _upstreams(entry: Field) -> tuple[Upstream, ...]:
    if not isinstance(entry.node, Sequence):
        entry.mistake("must be a list of addresses, or the word `asked`")
        return ()
    upstreams: dict[Upstream, None] = {}
    for item in entry.items() or ():
        text = item.text()
        if text is None:
            continue
        try:
            upstreams[_upstream(text)] = None
        except ValueError:
            item.mistake(f"`{text}` is not an upstream: write 192.0.2.53, 192.0.2.53:5353 or [2001:db8::53]:5353")
    if not entry.node.items:
        entry.mistake("no upstream: nothing could be resolved; leave the key out for those of /etc/resolv.conf")
    return tuple(upstreams)


_WITH_PORT: Final = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<v4>[^:]+)):(?P<port>[0-9]{1,5})")


def _upstream(text: str) -> Upstream:
    """Raises ValueError."""
    parts = _WITH_PORT.fullmatch(text)
    if parts is None:
        upstream = Upstream(_packed(text[1:-1] if text.startswith("[") and text.endswith("]") else text))
    else:
        upstream = Upstream(_packed(parts["v6"] or parts["v4"]), int(parts["port"]))
    if not 0 < upstream.port < 1 << 16 or not any(upstream.address) or ipaddress.ip_address(upstream.address).is_multicast:
        raise ValueError(text)
    return upstream


def _resolvers(resolv_conf: Path, place: Field) -> tuple[Upstream, ...]:
    """The host's own resolvers (resolv.conf(5)). Ones with a zone (`fe80::1%eth0`) are left out: an upstream is an address."""
    try:
        lines = resolv_conf.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        place.mistake(f"{resolv_conf} cannot be read ({error.strerror}): say `dns.upstreams`")
        return ()
    upstreams: dict[Upstream, None] = {}
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                upstreams[Upstream(_packed(words[1]))] = None
            except ValueError:
                continue
    if not upstreams:
        place.mistake(f"{resolv_conf} names no server that can be asked: say `dns.upstreams`")
    return tuple(upstreams)


def asking_ourselves(
    upstreams: Iterable[Upstream], endpoints: Iterable[EndpointSettings], is_here: Callable[[Address], bool]
) -> str | None:
    """With an uplink endpoint the questions of a resolver on this host are intercepted: it would ask us what we ask it."""
    uplinks = [endpoint.interface for endpoint in endpoints if endpoint.orientation is Orientation.UPLINK]
    here = [upstream for upstream in upstreams if is_here(upstream.address)]
    if not uplinks or not here:
        return None
    return (
        f"upstream {text_of(here[0].address)} is on this host, and `{uplinks[0]}` is an uplink: its questions would come back "
        "to us; say in `dns.upstreams` whom it asks (systemd-resolved: those of /run/systemd/resolve/resolv.conf)"
    )


def _is_loopback(address: Address) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _gate(entry: Field | None) -> GateSettings:
    default = GateSettings()
    if entry is None:
        return default
    entries = _entries(entry, ("deadline", "on-failure"))
    return GateSettings(
        deadline=_seconds(entries.get("deadline"), default.deadline, 0.01, 4),
        on_failure=_word(entries.get("on-failure"), default.on_failure),
    )


def _control(entry: Field | None, base: Path) -> ControlSettings:
    default = ControlSettings()
    if entry is None:
        return default
    entries = _entries(entry, ("socket",))
    socket = _path(entries.get("socket"), base, default.socket)
    if len(str(socket).encode()) > 107:  # sockaddr_un.sun_path has 108 bytes
        entries["socket"].mistake("is longer than the 107 bytes of a unix socket's path")
    return ControlSettings(socket)


def _datapath(entry: Field | None, base: Path) -> DatapathSettings:
    default = DatapathSettings()
    if entry is None:
        return default
    sizes = [name for name in _names(DatapathSettings) if name.endswith("-rows")]
    rates = ("answers-per-second", "questions-per-second", "question-burst")
    keys = ("pin-directory", "device", "mark", "mark-mask", "routing-table", "rule-priority", "verify-every", *sizes, *rates)
    entries = _entries(entry, keys)
    mark, mask = _mark(entries.get("mark"), entries.get("mark-mask"), default)
    table = _integer(entries.get("routing-table"), default.routing_table, 1, 0xFFFF_FFFF)
    if table in _TABLES_OF_THE_KERNEL:
        entries["routing-table"].mistake(f"{table} is the kernel's own table: choose a number nobody uses")
    return DatapathSettings(
        pin_directory=_path(entries.get("pin-directory"), base, default.pin_directory),
        device=_interface(entries.get("device"), default.device),
        mark=mark,
        mark_mask=mask,
        routing_table=table,
        rule_priority=_integer(entries.get("rule-priority"), default.rule_priority, 1, 32_765),
        **_numbers(entries, sizes, ROWS_MAX),
        answers_per_second=_integer(entries.get("answers-per-second"), default.answers_per_second, 0, RATE_MAX),
        questions_per_second=_integer(entries.get("questions-per-second"), default.questions_per_second, 0, RATE_MAX),
        question_burst=_integer(entries.get("question-burst"), default.question_burst, 1, RATE_MAX),
        verify_every=_seconds(entries.get("verify-every"), default.verify_every, 0, _WEEK),
    )


def _mark(stated: Field | None, stated_mask: Field | None, default: DatapathSettings) -> tuple[int, int]:
    """The program marks its own packets too, by the mark with the lowest bit of the mask turned over: that must not be none."""
    is_auto = stated is None or (isinstance(stated.node, Scalar) and stated.node.text == "auto")
    if stated is None or is_auto:
        if stated_mask is not None:
            stated_mask.mistake("says of which bits `mark` is; without a mark the agent chooses both")
        return default.mark, default.mark_mask
    mark = _integer(stated, default.mark, 1, 0xFFFF_FFFF)
    mask = _integer(stated_mask, default.mark_mask, 1, 0xFFFF_FFFF)
    if mark & ~mask:
        stated.mistake(f"mark {mark:#x} has bits outside mark-mask {mask:#x}")
    elif mark and mark == mask & -mask:
        stated.mistake(f"mark {mark:#x} is the lowest bit of mark-mask {mask:#x} alone: take another, or a higher one with it")
    return mark, mask


_TABLES_OF_THE_KERNEL: Final = (253, 254, 255)  # default, main, local
RATE_MAX: Final = 1_000_000
ROWS_MAX: Final = 1 << 24  # 16 million rows of the smallest map are a gigabyte


def _limits(entry: Field | None) -> Limits:
    if entry is None:
        return Limits()
    keys = _names(Limits)
    entries = _entries(entry, keys)
    limits = Limits(**_numbers(entries, keys, ROWS_MAX))
    for share, whole in (
        ("open-questions-per-endpoint", limits.open_questions),
        ("tcp-connections-per-endpoint", limits.tcp_connections),
    ):
        if share in entries and getattr(limits, share.replace("-", "_")) > whole:
            entries[share].mistake(f"is more than there are for all endpoints together, {whole}")
    return limits


def _testing(entry: Field | None, base: Path) -> TestingSettings:
    default = TestingSettings()
    entries = _entries(entry, ("enabled", "known-bad", "trace", "without"))
    enabled = _truth(entries.get("enabled"), default.enabled)
    for key in entries.keys() - {"enabled"} if not enabled else ():
        entries[key].mistake("makes the agent worse on purpose: only with `enabled: true`, in a test")
    known_bad = {_word(item, KnownBad.RELEASE_FIRST) for item in _items(entries.get("known-bad"))}
    trace = _path(entries.get("trace"), base, Path()) if "trace" in entries else default.trace
    without = frozenset(_word(item, Feature.TCX) for item in _items(entries.get("without")))
    return TestingSettings(enabled, frozenset(known_bad), trace, without)


# --- readers: the value of a key, or its default when the key is absent or wrong -------------------------------------


def _truth(entry: Field | None, default: bool) -> bool:
    value = entry.truth() if entry is not None else None
    return default if value is None else value


def _entries(entry: Field | None, known: Collection[str], required: Iterable[str] = ()) -> dict[str, Field]:
    parts = entry.parts(known) if entry is not None else None
    if entry is None or parts is None:
        return {}
    for key in required:
        if key not in parts:
            entry.mistake(f"`{key}` is missing")
    return parts


def _items(entry: Field | None) -> list[Field]:
    return (entry.items() if entry is not None else None) or []


def _integer(entry: Field | None, default: int, first: int, last: int) -> int:
    value = _number(entry, first, last) if entry is not None else None
    return default if value is None else value


_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}|0x[0-9a-fA-F]{1,16}")


def _number(entry: Field, first: int, last: int) -> int | None:
    """Decimal or 0x, as marks are written; YAML's other spellings (`010`, `1_000`) mean different things to different readers.

    So does `Field.whole_number`, but for 0x and numbers of ten digits.
    """
    text = _scalar(entry)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        entry.mistake(f"`{text}` is no whole number: write digits, or 0x and hexadecimal ones")
        return None
    value = int(text, 0)
    if not first <= value <= last:
        entry.mistake(f"{text} is outside {first} to {last}")
        return None
    return value


def _scalar(entry: Field) -> str | None:
    """The characters of a value with a grammar of its own (`1s`, `0xa00`), whatever YAML takes them for."""
    if isinstance(entry.node, Scalar) and entry.node.text:
        return entry.node.text
    entry.mistake("must be one value")
    return None


def _numbers(entries: Mapping[str, Field], keys: Iterable[str], last: int) -> dict[str, int]:
    """Arguments for a dataclass: those of the keys that are there and right."""
    values = {key.replace("-", "_"): _number(entries[key], 1, last) for key in keys if key in entries}
    return {name: value for name, value in values.items() if value is not None}


def _names(settings: type[Limits | DatapathSettings]) -> list[str]:
    return [each.name.replace("_", "-") for each in fields(settings)]


def _word(entry: Field | None, default: _Word) -> _Word:
    """One of the values of an enumeration."""
    text = entry.text() if entry is not None else None
    if entry is None or text is None:
        return default
    words = [word.value for word in type(default)]
    if text not in words:
        near = difflib.get_close_matches(text, words, n=1)
        entry.mistake(f"`{text}` is not one of {', '.join(words)}{f'; did you mean {near[0]}?' if near else ''}")
        return default
    return type(default)(text)


def _interface(entry: Field | None, default: str) -> str:
    """IFNAMSIZ has 16 bytes with the final zero; the kernel's own rule (dev_valid_name) forbids `/`, `:` and blanks."""
    text = entry.text() if entry is not None else None
    if entry is None or text is None:
        return default
    if len(text.encode()) > 15 or text in (".", "..") or not _NAME_CHARACTERS.fullmatch(text) or not text.isprintable():
        entry.mistake(f"`{text}` is no interface's name: 1 to 15 bytes, no blank, `/` or `:`")
        return default
    if glob.has_magic(text):
        entry.mistake(f"`{text}` is a pattern: name one interface")
        return default
    return text


_NAME_CHARACTERS: Final = re.compile(r"[^/:\s]+")
_OPEN_SET: Final = re.compile(r"\[(?!!?\]?[^\]]*\])")


def _interface_or_pattern(entry: Field | None, device: str) -> str:
    """An endpoint's; empty where it is neither."""
    text = entry.text() if entry is not None else None
    if entry is None or text is None:
        return ""
    if not glob.has_magic(text):
        if text == "lo":
            entry.mistake("`lo` is no endpoint: what a host says to itself is not policed")
        elif text == device:
            entry.mistake(f"`{text}` is the agent's own device (`datapath.device`)")
        return _interface(entry, "")
    if len(text.encode()) > PATTERN_BYTES_MAX or not _NAME_CHARACTERS.fullmatch(text) or not text.isprintable():
        entry.mistake(f"`{text}` matches no interface's name: at most {PATTERN_BYTES_MAX} bytes, no blank, `/` or `:`")
    elif _OPEN_SET.search(text):
        entry.mistake(f"`{text}` has a `[` without its `]`: write the set whole, `veth[0-9]*`")
    elif not text.strip("*?"):
        entry.caution(f"`{text}` matches every interface, those that lead out of this host too")
    return text


def _path(entry: Field | None, base: Path, default: Path) -> Path:
    text = entry.text() if entry is not None else None
    if entry is None or text is None:
        return default
    if not text or "\0" in text:
        entry.mistake("is no path")
        return default
    return base / text


def _path_or_none(entry: Field | None, base: Path, default: Path | None) -> Path | None:
    """`none`, or nothing at all, is none."""
    if entry is None:
        return default
    return None if entry.text() in (None, "none", "") else _path(entry, base, Path())


_WEEK: Final = 7 * 86_400.0
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "": 1.0}
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|)")


def _seconds(entry: Field | None, default: float, least: float, most: float) -> float:
    text = _scalar(entry) if entry is not None else None
    if entry is None or text is None:
        return default
    value = seconds_of(text)
    if value is None:
        entry.mistake(f"`{text}` is not a duration: write 200ms, 60s, 5m, 24h, 7d or a number of seconds")
        return default
    if not least <= value <= most:
        entry.mistake(f"{text} is outside {duration_text(least)} to {duration_text(most)}")
        return default
    return value


def seconds_of(duration: str) -> float | None:
    """A duration's seconds; None: it is not one."""
    parts = _DURATION.fullmatch(duration)
    return float(parts[1]) * _UNITS[parts[2]] if parts else None


def duration_text(seconds: float) -> str:
    """The shortest of the forms that `seconds_of` reads: 90 is 90s, 7200 is 2h."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{seconds * 1000:g}ms"
