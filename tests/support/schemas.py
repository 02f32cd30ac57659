"""The JSON Schemas of schemas/, and their validators."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support.surroundings import SCHEMAS

NAMES = ("reasoning-trace", "scored-trace", "dead-letter-headers", "verdict", "judged")


def load(path: str) -> Any:
    return json.loads((SCHEMAS / path).read_text("utf-8"))


ALL = {name: load(f"{name}.schema.json") for name in NAMES}
REGISTRY: Registry[Any] = Registry().with_resources(
    (schema["$id"], Resource.from_contents(schema)) for schema in ALL.values()
)
VALIDATORS = {name: Draft202012Validator(schema, registry=REGISTRY) for name, schema in ALL.items()}
