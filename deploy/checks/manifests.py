"""Validate rendered manifests: python manifests.py --crds DIR --kubernetes 1.30,1.36 FILE...

Kubernetes' own kinds go through kubernetes-validate (strict: unknown fields are errors), others through the schema of
their CustomResourceDefinition, made strict in the same way. Exit code 1 and a line for each error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

Schemas = dict[tuple[str, str], dict[str, Any]]


def strict(schema: Any) -> Any:
    """Return an OpenAPI v3 schema as JSON schema in which an unknown field is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        result["type"] = [schema["type"], "null"]
    return result


def crd_schemas(directory: Path) -> Schemas:
    """Return (apiVersion, kind) -> schema for every CustomResourceDefinition in the directory."""
    schemas = {}
    for path in sorted(directory.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text("utf-8"))["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return schemas


def errors(document: dict[str, Any], schemas: Schemas, versions: list[str]) -> Iterator[str]:
    """Yield what is wrong with one object."""
    schema = schemas.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
            yield f"{error.json_path}: {error.message}"
        return
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"Kubernetes {version}: no schema of this kind, and no CustomResourceDefinition: {error}"


def main() -> int:
    """Validate the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crds", type=Path, required=True, help="directory of CustomResourceDefinitions")
    parser.add_argument("--kubernetes", required=True, help="versions, separated by commas")
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    schemas = crd_schemas(arguments.crds)
    versions = arguments.kubernetes.split(",")
    failed = False
    for path in arguments.files:
        documents = [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document]
        found = [
            f"{path.name}: {document['kind']} {document['metadata']['name']}: {error}"
            for document in documents
            for error in errors(document, schemas, versions)
        ]
        print("\n".join(found) or f"ok  {path.stem}: {', '.join(document['kind'] for document in documents)}")
        failed = failed or bool(found) or not documents
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
