"""Which policies a buffer can have, and the reason where it cannot."""

from __future__ import annotations

from collections.abc import Mapping

from outcore.cost.buffers import Buffer
from outcore.errors import PlanError
from outcore.ops.recompute_encode import CODECS, PIXELS, codec_for
from outcore.program.policies import KEEP, Encode, Keep, Policies, Policy, Recompute

__all__ = ["check_policies", "check_policy"]


def check_policies(buffers: Mapping[str, Buffer], policies: Policies) -> None:
    """Refuse policies that their buffers cannot have, alone or together."""
    for name, how in policies.items():
        check_policy(buffers[name], how)
        for source in buffers[name].sources if isinstance(how, Recompute) else ():
            if policies.get(source, KEEP).codec == "sign":
                raise PlanError(
                    f"{source} cannot be encoded as sign: another value is made from it; keep or offload it"
                )


def check_policy(buffer: Buffer, how: Policy) -> None:
    """Refuse a policy that a buffer cannot have."""
    if isinstance(how, Recompute) and buffer.obstacle:
        raise PlanError(f"{buffer.name} cannot be recomputed: {buffer.obstacle}; keep or offload it")
    if isinstance(how, Encode):
        codec = how.codec
        if how.offloads and codec in ("sign", "sparse"):
            reason = "how large it becomes is in the data" if codec == "sparse" else "its bits stay with its operation"
            raise PlanError(f"{buffer.name} cannot leave as {codec}: {reason}; write encode:{codec} or offload")
        if codec not in CODECS:
            raise PlanError(f"policy {how!r} of {buffer.name} is not known; encodings are {', '.join(CODECS)}")
        if codec == "sign" and buffer.need != "sign":
            raise PlanError(f"{buffer.name} cannot be encoded as {codec}: its backward needs all of it")
        if codec == "window" and codec_for(buffer) != "window":
            raise PlanError(
                f"{buffer.name} cannot be encoded as window: these are no indices of a max pool over at most "
                f"{PIXELS} pixels each; keep or offload it"
            )
    if buffer.opaque and not isinstance(how, Keep):
        raise PlanError(f"{buffer.name} is kept by a part that must stay whole; keep it")
