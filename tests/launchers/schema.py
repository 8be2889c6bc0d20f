"""The small part of JSON Schema that the two schemas beside this file are written in.

``additionalProperties`` is false everywhere: what a schema does not name is a mistake.
"""

from collections.abc import Iterator
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(value: Any, schema: dict[str, Any], where: str = "$") -> Iterator[str]:
    """What of ``value`` is not as ``schema`` says, one line each."""
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where}: {value!r} is not of type {schema['type']}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{where}: {value!r} is not among {schema['enum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(item, schema["items"], f"{where}[{number}]")
    if not isinstance(value, dict):
        return
    if "additionalProperties" in schema:  # a map from names to values of one kind
        for key, item in value.items():
            yield from problems(item, schema["additionalProperties"], f"{where}.{key}")
        return
    for key in schema.get("required", []):
        if key not in value:
            yield f"{where}.{key}: is missing"
    for key, item in value.items():
        if key in schema["properties"]:
            yield from problems(item, schema["properties"][key], f"{where}.{key}")
        else:
            yield f"{where}.{key}: is unknown"
