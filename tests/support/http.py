"""Accept headers at random."""

import random

ACCEPT_WORDS = (
    "application/openmetrics-text", "text/plain", "*/*", "version=", "version=1.0.0", "version=abc", "version=1.x",
    "version=-1", "version=.", "version=99999999999999999999.0", "version=1.0.0.0.a", "version=\u0661.0", "escaping=",
    "escaping=allow-utf-8", "escaping=dots", "escaping=values", "escaping=abc", "q=abc", "version", "=", "charset=x",
    "version=" + "1" * 900, "version=1.0.0\xe9", "version=2.0.0", "x" * 900, "",
)  # fmt: skip


def random_accept(rng: random.Random) -> str:
    """Return an Accept header of words that matter, joined in ways that may mean something."""
    words = [rng.choice(ACCEPT_WORDS) for _ in range(rng.randrange(1, 6))]
    return "".join(word + rng.choice([";", "; ", ",", ", ", "", "=", " "]) for word in words).strip()
