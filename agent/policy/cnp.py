"""CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy (`cilium.io/v2`): documents to policies of the core.

Rule 1: what is not understood is refused, never left out: a rule that is read in part allows more than its writer meant.
Rule 2: a section that is there closes its direction (`egress: [{}]` too), an empty one (`egress: []`) is none, and
`enableDefaultDeny` has the last word.

A document is the header (metadata) and its specs; each spec is one policy of the core. The rules in it are `cnp_rules`'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from agent.core.rules import LabelSelector, Origin, Policy
from agent.core.types import Direction, Prefix
from agent.documents.fields import Field
from agent.documents.yaml_tree import Scalar
from agent.policy.cnp_rules import Section, read_rule, read_selector
from agent.policy.values import read_excepted, read_prefix

API_VERSION = "cilium.io/v2"
KIND_NAMESPACED = "CiliumNetworkPolicy"
KIND_CLUSTERWIDE = "CiliumClusterwideNetworkPolicy"
LISTS = {("v1", "List"), (API_VERSION, KIND_NAMESPACED + "List"), (API_VERSION, KIND_CLUSTERWIDE + "List")}

ANNOTATION_PREFIX = "namegate/"
ANNOTATION_ALLOW_ADDRESSES = "namegate/allow-addresses"
ANNOTATION_EXCEPT_NAMES = "namegate/except-names"

# `description` is a field of a spec; Cilium's documentation has it beside the metadata and inside it too.
_DOCUMENT = ("apiVersion", "kind", "metadata", "description", "spec", "specs", "status")
_LIST = ("apiVersion", "kind", "metadata", "items")
# What `kubectl get -o yaml` adds has no meaning here and is not looked at.
_METADATA = (
    "name",
    "namespace",
    "description",
    "annotations",
    "labels",
    "generateName",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "managedFields",
    "ownerReferences",
    "selfLink",
)
_SECTIONS = (
    Section("egress", Direction.EGRESS, deny=False),
    Section("egressDeny", Direction.EGRESS, deny=True),
    Section("ingress", Direction.INGRESS, deny=False),
    Section("ingressDeny", Direction.INGRESS, deny=True),
)
_SPEC = (
    "endpointSelector",
    *(section.key for section in _SECTIONS),
    "enableDefaultDeny",
    "description",
    "labels",
    "log",
)
_SPEC_REFUSED = {
    "nodeSelector": "there are no nodes on one host; make the host's uplink an endpoint and select it with endpointSelector",
}

T = TypeVar("T")


def read_document(document: Field) -> list[Policy]:
    """The policies of a document, or of a list of documents; mistakes go to the document's remarks."""
    version, kind = document.peek("apiVersion"), document.peek("kind")
    spelled = tuple(field.node.text if field and isinstance(field.node, Scalar) else "" for field in (version, kind))
    if spelled in LISTS:
        return _read_list(document)
    if spelled not in {(API_VERSION, KIND_NAMESPACED), (API_VERSION, KIND_CLUSTERWIDE)}:
        wrong = kind if spelled[0] == API_VERSION else version
        if wrong is None:
            missing = "kind" if version else "apiVersion"
            document.mistake(f"the document has no {missing}; write apiVersion: {API_VERSION} and kind: {KIND_NAMESPACED}")
            return []
        wrong.mistake(f"only {KIND_NAMESPACED} and {KIND_CLUSTERWIDE} of apiVersion {API_VERSION} are policies here")
        return []
    return _read_policy(document, is_clusterwide=spelled[1] == KIND_CLUSTERWIDE)


def _read_list(document: Field) -> list[Policy]:
    parts = document.parts(_LIST) or {}
    if "items" not in parts:
        document.mistake("the list has no items")
        return []
    return [policy for item in parts["items"].items() or () for policy in read_document(item)]


@dataclass(frozen=True, slots=True)
class _Header:
    """What a document's metadata says about each of its specs."""

    name: str
    namespace: str | None
    allow_addresses: tuple[Prefix, ...]
    except_names: tuple[str, ...]


def _read_policy(document: Field, *, is_clusterwide: bool) -> list[Policy]:
    parts = document.parts(_DOCUMENT) or {}
    if "metadata" in parts:
        header = _read_header(parts["metadata"], is_clusterwide=is_clusterwide)
    else:
        document.mistake("the policy has no metadata; write metadata: {name: …}, every verdict can then name it")
        header = _Header("", None, (), ())
    _read_description(parts)
    if "spec" not in parts and "specs" not in parts:
        document.mistake("the policy has neither spec nor specs, so it says nothing")
    specs = [(header.name, parts["spec"])] if "spec" in parts else []
    if "specs" in parts:
        specs += [(f"{header.name}[{place}]", spec) for place, spec in enumerate(parts["specs"].items() or ())]
    return [policy for name, spec in specs if (policy := _read_spec(spec, name, header)) is not None]


def _read_header(metadata: Field, *, is_clusterwide: bool) -> _Header:
    parts = metadata.parts(_METADATA) or {}
    _read_description(parts)
    name = parts["name"].text() if "name" in parts else None
    if "name" not in parts or name == "":
        metadata.mistake("the policy has no name; write name: …, every verdict can then name it")
    namespace = parts["namespace"].text() if "namespace" in parts else None
    if "namespace" in parts and is_clusterwide:
        parts["namespace"].mistake(f"a clusterwide policy has no namespace; leave it out, or make it a {KIND_NAMESPACED}")
    elif namespace == "":
        parts["namespace"].mistake("the namespace is empty; leave it out where every endpoint is meant")
    annotations = (parts["annotations"].any_parts() or {}) if "annotations" in parts else {}
    for key, annotation in annotations.items():
        if key.startswith(ANNOTATION_PREFIX) and key not in {ANNOTATION_ALLOW_ADDRESSES, ANNOTATION_EXCEPT_NAMES}:
            known = f"{ANNOTATION_ALLOW_ADDRESSES} and {ANNOTATION_EXCEPT_NAMES}"
            annotation.mistake(f"unknown annotation; known here: {known}")
    return _Header(
        name or "",
        namespace,
        _read_separated(annotations.get(ANNOTATION_ALLOW_ADDRESSES), read_prefix),
        _read_separated(annotations.get(ANNOTATION_EXCEPT_NAMES), read_excepted),
    )


def _read_separated(field: Field | None, read: Callable[[str], tuple[T, str | None]]) -> tuple[T, ...]:
    """Values with commas between them."""
    text = None if field is None else field.text()
    if field is None or text is None:
        return ()
    values = (field.converted(part.strip(), read) for part in text.split(","))
    return tuple(value for value in values if value is not None)


# --- one spec --------------------------------------------------------------------------------------------------------


def _read_spec(spec: Field, name: str, header: _Header) -> Policy | None:
    parts = spec.parts(_SPEC, _SPEC_REFUSED)
    if parts is None:
        return None
    if "endpointSelector" in parts:
        subject = read_selector(parts["endpointSelector"])
    else:
        if not any(spec.peek(key) for key in _SPEC_REFUSED):
            spec.mistake("the policy selects no endpoint; write endpointSelector: {} where every endpoint is meant")
        subject = LabelSelector()
    _read_notes(parts)
    rules = []
    closes = dict.fromkeys(Direction, False)
    for section in _SECTIONS:
        items = (parts[section.key].items() or ()) if section.key in parts else ()
        closes[section.direction] |= bool(items)
        for item in items:
            rules += read_rule(item, section, name, header.namespace)
    if "enableDefaultDeny" in parts:
        switches = parts["enableDefaultDeny"].parts(("egress", "ingress")) or {}
        for direction in Direction:
            switch = switches.get(direction.name.lower())
            if switch is not None:
                closes[direction] = switch.truth() or False
    if not rules and not any(closes.values()):
        spec.caution("the policy closes nothing and allows nothing, so it has no effect")
    return Policy(
        name=name,
        subject=subject,
        rules=tuple(rules),
        default_deny_egress=closes[Direction.EGRESS],
        default_deny_ingress=closes[Direction.INGRESS],
        namespace=header.namespace,
        except_names=header.except_names,
        allow_addresses=header.allow_addresses,
        origin=Origin(spec.remarks.file, spec.line, name),
    )


def _read_notes(parts: dict[str, Field]) -> None:
    """Fields for people only: their form is judged, their text is not kept."""
    _read_description(parts)
    if "log" in parts:
        for note in (parts["log"].parts(("value",)) or {}).values():
            note.text()
    if "labels" in parts:
        for label in parts["labels"].items() or ():
            for note in (label.parts(("key", "value", "source")) or {}).values():
                note.text()


def _read_description(parts: dict[str, Field]) -> None:
    if "description" in parts:
        parts["description"].text()
