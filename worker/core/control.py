"""Control records (verdicts are the only kind): their headers and signatures.

They share the source topic with the traces because a replay loses the order between two topics. They are signed
because many clients may write there.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from worker.core.records import Headers
from worker.core.trace import InvalidTrace, Reason

CONTROL_HEADER: Final = "kp-control"
SIGNATURE_HEADER: Final = "kp-control-signature"  # the signature: HMAC-SHA256 of the exact value, 64 hexadecimal digits

VERDICT: Final = b"verdict"

MIN_KEY_BYTES: Final = 32  # as long as the hash, as RFC 2104 advises
_BLOCK: Final = 64  # bytes of a SHA-256 block
Judges = Mapping[str, Sequence[bytes]]  # the keys of each judge, by name


def control_headers(kind: bytes, body: bytes, key: bytes) -> list[tuple[str, bytes]]:
    """Return the headers of a control record: its kind and its signature."""
    return [(CONTROL_HEADER, kind), (SIGNATURE_HEADER, _signature(body, key))]


def control_kind(headers: Headers) -> bytes | None:
    """Return the kind of control record that the headers name, known or not; None for any other record."""
    return next((content or b"" for name, content in headers if name == CONTROL_HEADER), None)


def check_signature(headers: Headers, body: bytes, keys: Iterable[bytes], held_in: str) -> None:
    """Raise InvalidTrace unless the record has exactly one signature, by one of the keys; `held_in` says whose."""
    said = [content or b"" for name, content in headers if name == SIGNATURE_HEADER]
    if len(said) != 1:
        raise bad_control(f"a control record needs one header {SIGNATURE_HEADER}, got {len(said)}")
    for key in keys:
        if hmac.compare_digest(_signature(body, key), said[0]):
            return
    raise bad_control(f"{SIGNATURE_HEADER} is not the signature of this value by {held_in}")


def bad_control(message: str) -> InvalidTrace:
    """Return why a control record must not be honoured."""
    return InvalidTrace(Reason.BAD_CONTROL, "", message)


def _signature(body: bytes, key: bytes) -> bytes:
    return _signer(key)(body)


@functools.lru_cache(64)
def _signer(key: bytes) -> Callable[[bytes], bytes]:
    """Return HMAC-SHA256 with a key (RFC 2104). Copying two prepared hashes takes a quarter of hmac.digest's time."""
    padded = (key if len(key) <= _BLOCK else hashlib.sha256(key).digest()).ljust(_BLOCK, b"\0")
    inner_start, outer_start = (hashlib.sha256(bytes(byte ^ pad for byte in padded)) for pad in (0x36, 0x5C))

    def sign(body: bytes) -> bytes:
        inner, outer = inner_start.copy(), outer_start.copy()
        inner.update(body)
        outer.update(inner.digest())
        return outer.hexdigest().encode()

    return sign
