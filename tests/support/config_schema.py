"""The config file's JSON Schema, which `make docs` writes to schemas/config.schema.json."""

from typing import Any

from worker.config.settings import ProfileSetting, Settings
from worker.core.scoring import PROFILES


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config file."""
    made = Settings.model_json_schema()
    properties = {name: _property(made["properties"][name]) for name in Settings.model_fields}
    properties["profiles"] = {
        "description": "profiles to add or change, by domain",
        "type": "object",
        "properties": {domain: {"$ref": "#/$defs/profile"} for domain in PROFILES},
        "additionalProperties": {"$ref": "#/$defs/profile"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:knowledgepulse:kp-worker:config",
        "title": "Config file of kp-worker",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"profile": _profile()},
    }


def _property(made: dict[str, Any]) -> dict[str, Any]:
    """Return pydantic's schema of a field without null, which TOML cannot say, and without its own titles."""
    kinds = [dict(kind) for kind in made.get("anyOf", []) if kind != {"type": "null"}]
    result = {key: value for key, value in made.items() if key not in ("title", "anyOf", "default")}
    if len(kinds) == 1:
        result |= kinds[0]
    elif kinds:
        result["anyOf"] = kinds
    if made.get("default") is not None:
        result["default"] = made["default"]
    return result


def _profile() -> dict[str, Any]:
    made = ProfileSetting.model_json_schema()["properties"]
    names = list(made["weights"]["anyOf"][0]["propertyNames"]["enum"])
    weight = {"type": "number", "minimum": 0, "maximum": 1}
    return {
        "type": "object",
        "properties": {
            "threshold": _property(made["threshold"]),
            "weights": {
                "description": made["weights"]["description"],
                "type": "object",
                "properties": dict.fromkeys(names, weight),
                "required": names,
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    }
