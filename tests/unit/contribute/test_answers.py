"""What each answer of the registry means, and of whatever else may answer in its place."""

import itertools
import json
from typing import Any

import pytest

from worker.contribute.registry import (
    Absent,
    Created,
    Denied,
    Doubtful,
    HttpAnswer,
    Limited,
    Present,
    Rate,
    Rejected,
    judge_look_up,
    judge_post,
    stated_rate,
)

ID = "kp:trace:1"
TIME = "2026-04-14T08:00:00.000Z"
ENTRY = {"data": {"id": ID, "unit": {"id": ID}, "created_at": TIME}}
KEY = "kp_0123456789abcdef"


def answer(status: int, body: Any = b"", **headers: str) -> HttpAnswer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw, KEY)


def own(status: int, body: Any, **headers: str) -> HttpAnswer:
    """An answer with the header that the registry gives all its answers."""
    return answer(status, body, kp_schema_version="v1", **headers)


def test_a_stored_unit() -> None:
    assert judge_post(answer(201, ENTRY), ID) == Created(TIME, False)
    assert judge_post(answer(201, {"data": {"id": ID}}), ID) == Created("", False)
    assert judge_post(answer(201, ENTRY, idempotency_replayed="true"), ID) == Created(TIME, True)
    assert judge_look_up(answer(200, ENTRY), ID) == Present({"id": ID}, TIME)
    assert judge_look_up(own(404, {"error": "Knowledge unit not found"}), ID) == Absent()


@pytest.mark.parametrize(
    "body",
    [
        b"<!doctype html><title>Sign in</title>", b"", b'{"data": {"id": "kp:tra', b"null", b"[]", b"1", b"\xff",
        {"data": {"id": "kp:trace:2"}}, {"data": None}, {"id": ID}, b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_success_without_the_unit_is_no_success(body: Any) -> None:
    assert isinstance(judge_post(answer(201, body), ID), Doubtful)
    assert isinstance(judge_look_up(answer(200, body), ID), Doubtful)
    assert isinstance(judge_post(answer(200, ENTRY), ID), Doubtful)


NOT_OWN: list[tuple[Any, dict[str, str]]] = [
    (b"\n <html>", {"content_type": "text/html; charset=utf-8"}),
    ({"message": "Forbidden"}, {}),
    (b"Forbidden", {"content_type": "text/plain"}),
    ({"error": "Knowledge unit not found"}, {}),  # the registry's form without its header
    ({"error": "Bad Request", "status": 400, "path": "/v1/knowledge"}, {}),
    (b"<html>Sign in</html>", {"kp_schema_version": "v1", "content_type": "application/json"}),
    ({"message": "Forbidden"}, {"kp_schema_version": "v1"}),
    ({"error": {"code": 403}}, {"kp_schema_version": "v1"}),
    ({"error": "x"}, {"kp_schema_version": ""}),
    (b'{"error": "Write scope req', {"kp_schema_version": "v1"}),
    (["error"], {"kp_schema_version": "v1"}),
]


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ((500, 502, 503, 504, 520), "server_error"),  # may pass, so it is no definite answer
        ((301, 302, 307), "redirect"),
        ((0, 204, 400, 401, 403, 404, 405, 407, 409, 411, 413, 414, 415, 421, 422, 431, 451, 999), "unexpected_answer"),
    ],
)
def test_what_is_not_provably_the_registrys_is_no_verdict(statuses: tuple[int, ...], cause: str) -> None:
    definite = cause != "server_error"
    for status, (body, headers), judge in itertools.product(statuses, NOT_OWN, (judge_post, judge_look_up)):
        verdict = judge(answer(status, body, retry_after="7", **headers), ID)
        assert verdict == Doubtful(cause, verdict.words, 7.0, unsent=False, status=status if definite else None)
    assert "not HTTP" in judge_post(answer(0), ID).words  # type: ignore[union-attr]


def test_a_refused_unit_has_its_issues_without_secrets() -> None:
    issues = [{"path": "steps.0", "message": f"received 'password=hunter2' from {KEY}"}]
    verdict = judge_post(own(400, {"error": "Invalid KnowledgeUnit", "issues": issues}), ID)
    assert (verdict.reason, verdict.status, verdict.replayed) == ("invalid_unit", 400, False)
    assert json.loads(verdict.issues)[0]["path"] == "steps.0"
    assert "hunter2" not in verdict.issues
    assert KEY not in verdict.issues
    long = judge_post(own(400, {"error": "Invalid", "issues": ["x" * 100_000]}), ID)
    assert len(long.issues) <= 2000
    assert judge_post(own(413, {"error": "too large"}), ID) == Rejected("too_large", 413, '"too large"', False)


def test_a_key_that_is_not_accepted() -> None:
    gone = answer(429, {"error": "Rate limit exceeded"}, x_ratelimit_limit="0", x_ratelimit_remaining="0")
    assert isinstance(judge_post(gone, ID), Denied)
    words = {"error": f"no {KEY}, Authorization: Bearer abcdefghijklmnopqrstuvwxyz"}
    for status in (401, 403):
        verdict = judge_post(own(status, words, idempotency_replayed="true"), ID)
        assert verdict.replayed
        assert KEY not in verdict.words
        assert "abcdefghij" not in verdict.words


def test_too_many_requests() -> None:
    limited = answer(429, {}, x_ratelimit_limit="30", x_ratelimit_remaining="0", retry_after="2")
    assert judge_post(limited, ID) == judge_look_up(limited, ID) == Limited(own=True)
    assert judge_post(answer(429), ID) == Limited(own=False)


@pytest.mark.parametrize(
    ("limit", "remaining", "rate"),
    [("30", "29", Rate(30, 29)), ("0", "0", Rate(0, 0)), ("x", "1", None), ("", "1", None), ("1", "-1", None),
     ("1" * 30, "1", None), ("\u0663", "1", None)],
)  # fmt: skip
def test_the_limit_that_an_answer_states(limit: str, remaining: str, rate: Rate | None) -> None:
    assert stated_rate(answer(200, x_ratelimit_limit=limit, x_ratelimit_remaining=remaining)) == rate


def test_only_a_time_is_taken_over_as_the_registrys_time() -> None:
    for created_at in ("password=hunter2", "x" * 40, 5, None, "2026\n-04-14T08:00"):
        entry = {"data": {"id": ID, "created_at": created_at}}
        assert judge_post(answer(201, entry), ID) == Created("", False)
