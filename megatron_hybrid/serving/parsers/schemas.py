"""Parameters that a model wrote as bare text, to JSON: their types follow the tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_hybrid.serving.parsers.json_text import decoded
from megatron_hybrid.serving.parsers.python_calls import value_json
from megatron_hybrid.text.guide_schema import ROOT, target_of

Json = dict[str, Any]
ALL = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_TEXTS = {"str", "text", "char", "varchar"}
"""Names that others than JSON Schema have for `string`."""
_MAX_DEPTH = 64


class Schema:
    """The parameters of a function.

    Args:
        function: as in OpenAI's requests.
    """

    def __init__(self, function: Mapping[str, Any]):
        given = function.get("parameters")
        self._root: Json = given if isinstance(given, dict) else {}
        self._known: dict[int, frozenset[str]] = {}
        top = self._resolved(self._root)
        properties = top.get("properties")
        self.properties: Json = properties if isinstance(properties, dict) else {}
        required = top.get("required")
        self.required = set(map(str, required)) if isinstance(required, list) else set()

    def types(self, name: str) -> frozenset[str]:
        """Return the types that a parameter may have."""
        return self._types(self.properties.get(name, True))

    def value(self, name: str, text: str) -> str | None:
        """Return the JSON of a parameter, or None to leave it out: it is empty, and can be neither
        a text nor null. What fits none of its types stays as it is if it is JSON, else becomes a
        text, so that the caller sees what the model wrote."""
        types, bare = self.types(name), text.strip()
        if types == {"string"}:
            return json.dumps(text, ensure_ascii=False)
        if not bare and "string" not in types:
            return "null" if "null" in types else None
        if types != ALL:  # templates write these words as Python does
            word = _WORDS.get(bare.lower())
            kind = "null" if word == "null" else "boolean"
            if word is not None and (kind in types or (kind == "null" and "string" not in types)):
                return word
        try:
            kind = _kind(decoded(bare))
        except ValueError:
            kind = "string"
        if kind == "string" and "string" not in types and bare[:1] in ("{", "[", "("):
            try:
                return value_json(bare)
            except ValueError:
                pass
        fits = kind in types or (kind == "integer" and "number" in types)
        if kind == "string" or (not fits and "string" in types):
            return json.dumps(text, ensure_ascii=False)
        return bare

    def text_form(self, name: str, end: str) -> Json:
        """Return the format of a parameter's text in a structural tag: one of the values in its
        schema, if that lists them, else any text up to `end`."""
        given = self.properties.get(name)
        schema = self._resolved(given) if isinstance(given, dict) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        values = values if isinstance(values, list) else []
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        forms = [{"type": "const_string", "value": text} for text in texts]
        return (
            {"type": "or", "elements": forms} if forms else {"type": "any_text", "excludes": [end]}
        )

    def form(self, name: str) -> Json:
        """Return the format of a parameter's JSON in a structural tag, by its schema and the root
        schema that its `$ref`s are relative to."""
        given = self.properties.get(name)
        schema = {**(given if isinstance(given, dict) else {}), ROOT: self._root}
        return {"type": "json_schema", "json_schema": schema}

    def _types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the types of a part of the schema. Each part is examined once."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ALL
        if id(schema) not in self._known:
            self._known[id(schema)] = ALL  # inside of itself
            self._known[id(schema)] = self._types_of(self._resolved(schema), depth + 1)
        return self._known[id(schema)]

    def _types_of(self, schema: Json, depth: int) -> frozenset[str]:
        found = ALL
        if isinstance(kind := schema.get("type"), (str, list)):
            names = set(map(str, [kind] if isinstance(kind, str) else kind))
            names |= {"string"} if names & _TEXTS else set()
            found = ALL & names or ALL
            found |= {"integer"} if "number" in found else set()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            found &= {_kind(value) for value in values}
        for name in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(name), list) and several:
                found &= frozenset().union(*(self._types(each, depth) for each in several))
        if isinstance(several := schema.get("allOf"), list):
            for each in several:
                found &= self._types(each, depth)
        return found | {"null"} if schema.get("nullable") is True else found

    def _resolved(self, schema: Json) -> Json:
        for _ in range(_MAX_DEPTH):
            if "$ref" not in schema:
                return schema
            try:
                place = target_of(self._root, schema["$ref"])
            except ValueError:
                return {}
            if not isinstance(place, dict):
                return {}
            schema = {**place, **{k: v for k, v in schema.items() if k != "$ref"}}
        return {}


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds[type(value)]
