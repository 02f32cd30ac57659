"""Control records on the source topic: their headers and signature.

Two kinds are known: requests to forget (forgetting.py) and verdicts (verdicts.py). They are on the source topic because
the order of two topics is lost in a replay, and signed because many may write there.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from worker.core.records import Headers
from worker.core.trace import InvalidTrace, Reason

CONTROL_HEADER: Final = "kp-control"
SIGNATURE_HEADER: Final = "kp-control-signature"
"""The signature: HMAC-SHA256 of the exact value, 64 hexadecimal digits."""

FORGET: Final = b"forget"
VERDICT: Final = b"verdict"

MIN_KEY_BYTES: Final = 32
"""Shortest key: as long as the hash, as RFC 2104 advises."""


Judges = Mapping[str, Sequence[bytes]]
"""The keys of each judge, by name."""


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The control records that a worker honours.

    `keys`: those that requests to forget are signed with (KP_FORGET); none: such a record is read as a trace. `judges`:
    empty: every verdict is a dead letter. `group`: the worker's consumer group.
    """

    keys: Sequence[bytes] = ()
    group: str = ""
    judges: Judges = field(default_factory=dict)


NO_CONTROL: Final = ControlConfig()


def control_headers(kind: bytes, body: bytes, key: bytes) -> list[tuple[str, bytes]]:
    """Return the headers of a control record, with its signature."""
    return [(CONTROL_HEADER, kind), (SIGNATURE_HEADER, _signature(body, key))]


def control_kind(headers: Headers) -> bytes | None:
    """Return the kind of control record that the headers name; None for any other record."""
    for name, content in headers:
        if name == CONTROL_HEADER and content in (FORGET, VERDICT):
            return content
    return None


def check_signature(headers: Headers, body: bytes, keys: Iterable[bytes], held_in: str) -> None:
    """Raise InvalidTrace unless the record has exactly one signature, by one of the keys. `held_in`: their setting."""
    said = [content or b"" for name, content in headers if name == SIGNATURE_HEADER]
    if len(said) != 1:
        raise bad_control(f"a control record needs one header {SIGNATURE_HEADER}, got {len(said)}")
    if not any(hmac.compare_digest(_signature(body, key), said[0]) for key in keys):
        raise bad_control(f"{SIGNATURE_HEADER} is not the signature of this value by {held_in}")


def bad_control(message: str) -> InvalidTrace:
    """Return the reason of a control record that must not be honoured."""
    return InvalidTrace(Reason.BAD_CONTROL, "", message)


def _signature(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, "sha256").hex().encode()
