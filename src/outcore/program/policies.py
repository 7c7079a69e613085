"""What is done with a tensor that autograd saves for backward: one of four policies.

    Keep                       it stays where it is
    Recompute                  it is dropped, and made again in backward by the calls that wrote it
    Offload(early)             it is copied to the host or to disk, and prefetched before backward needs it
    Encode(codec, offload)     a smaller form is kept, or copied out, and decoded when backward needs it

Each says which encoding it has (`codec`, empty without one) and whether anything leaves the device (`offloads`).

Policies are frozen values. A plan's JSON document writes them as short strings (``recompute``, ``offload:early``,
``encode:sparse+offload``); `parse_policy` and ``str`` are the only places that know that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from outcore.errors import PlanError


@dataclass(frozen=True, slots=True)
class Keep:
    """It stays as autograd saved it."""

    codec: ClassVar[str] = ""
    offloads: ClassVar[bool] = False

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """It is made again in backward by the calls that wrote it."""

    codec: ClassVar[str] = ""
    offloads: ClassVar[bool] = False

    def __str__(self) -> str:
        return "recompute"


@dataclass(frozen=True, slots=True)
class Offload:
    """It is copied off the device after its last use in forward and prefetched for backward."""

    early: bool = False
    """The end of forward waits until it is gone."""

    codec: ClassVar[str] = ""
    offloads: ClassVar[bool] = True

    def __str__(self) -> str:
        return "offload:early" if self.early else "offload"


@dataclass(frozen=True, slots=True)
class Encode:
    """Only its encoded form lives between forward and backward (`outcore.ops.recompute_encode`)."""

    codec: str
    offloads: bool = False
    """The encoded form also leaves the device."""

    def __str__(self) -> str:
        return f"encode:{self.codec}+offload" if self.offloads else f"encode:{self.codec}"


Policy: TypeAlias = Keep | Recompute | Offload | Encode
Policies: TypeAlias = Mapping[str, Policy]
"""Buffer (by its first value) -> policy."""

KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_EARLY = Keep(), Recompute(), Offload(), Offload(early=True)
_SIMPLE: dict[str, Policy] = {str(policy): policy for policy in (KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_EARLY)}


def parse_policy(text: str | Policy) -> Policy:
    """The policy that a string names; a policy is returned as it is.

    >>> parse_policy("encode:half+offload")
    Encode(codec='half', offloads=True)
    >>> str(parse_policy("offload:early"))
    'offload:early'
    """
    if not isinstance(text, str):
        return text
    if (found := _SIMPLE.get(text)) is not None:
        return found
    kind, _, codec = text.partition(":")
    name = codec.removesuffix("+offload")
    if kind != "encode" or not name or "+" in name:
        raise PlanError(f"policy {text!r} is not known; choose keep, offload, offload:early, recompute or encode:<how>")
    return Encode(name, codec != name)


def kind_of_policy(policy: Policy) -> str:
    """The policy without its settings: keep, recompute, offload or encode."""
    return type(policy).__name__.lower()


def parse_policies(written: Mapping[str, str | Policy]) -> dict[str, Policy]:
    """The policies of a document, or of what was written by hand."""
    return {name: parse_policy(how) for name, how in written.items()}


def policies_to_json(policies: Policies) -> dict[str, str]:
    """The form of a document, which `parse_policies` reads."""
    return {name: str(how) for name, how in policies.items()}
