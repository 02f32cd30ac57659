"""Accepted documents with each kind of secret in each free string, and a search for what is left of them."""

from typing import Any

from tests.support.contribute import accepted_document

SECRETS = {
    "connection string": "postgres://user:Zq7secretA@db/x",
    "bearer token": "Bearer Zq7secretBabcdefghijklmnop",
    "OpenAI": "sk-Zq7secretCabcdefghijklmnop",
    "GitHub": "ghp_Zq7secretDabcdefghijklmnopqrstuvwxyz0123456789",
    "AWS": "AKIAZQ7SECRETEABCDEF",
    "KP": "kp_7777777aaaaaaabbbbbbb",
    "Slack": "xoxb-Zq7secretG-1",
    "password": "password=Zq7secretH",
    "e-mail": "zq7secreti@example.com",
    "US telephone": "415-555-7731",
    "telephone": "+4930777731555",
    "IPv4": "10.77.31.55",
    "path": "/home/zq7secretm/x",
    "Windows path": r"C:\Users\zq7secretn\x",
}
LEAKS = (
    "zq7secret", "kp_7777777aaaaaaabbbbbbb", "415-555-7731", "4930777731555", "10.77.31.55",
)  # fmt: skip


def leaks(text: str) -> list[str]:
    """Return the parts of SECRETS that a text holds, in any case."""
    return [each for each in LEAKS if each in text.lower()]


def seeded(number: int, place: str, secret: str) -> dict[str, Any]:
    """Return an accepted document with the secret in one free string."""
    document = accepted_document(f"kp:trace:{place}:{number}")
    text = f"see {secret} please"
    step = document["steps"][1]
    match place:
        case "objective":
            document["task"]["objective"] = text
        case "input_schema":
            document["task"]["input_schema"] = {"properties": {"x": {"default": [text]}}}
        case "content":
            step["content"] = text
        case "output_summary":
            step["output_summary"] = text
        case "input":
            step["input"] = {"a": [{"b": [text]}]}
        case "input key":
            step["input"] = {"a": {text: 1}}
        case "password member":
            step["input"] = {"deep": [{"db_password": {"value": "zq7secretO"}}]}
        case "tool":
            step["tool"] = {"name": text, "mcp_server": text}
        case "result":
            document["outcome"]["result_summary"] = text
        case "graph":
            document["knowledge_graph_delta"] = {
                "entities": [{"name": text, "type": text}],
                "relationships": [{"fact": text, "valid_from": text}],
            }
        case "metadata":
            document["metadata"] |= {"agent_id": text, "framework": text, "task_domain": text, "validated_by": [text]}
        case "source_skill":
            document["source_skill"] = text
        case "unknown":
            document["extra"] = {"note": text}
    return document


PLACES = (
    "objective", "input_schema", "content", "output_summary", "input", "input key", "password member", "tool",
    "result", "graph", "metadata", "source_skill", "unknown",
)  # fmt: skip
