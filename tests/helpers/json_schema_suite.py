"""Counts what guides take and allow of the JSON-Schema-Test-Suite, draft 2020-12.

    python tests/helpers/json_schema_suite.py FOLDER

FOLDER: the suite's `tests/draft2020-12`. `make test-schemas` takes it from jsonschema's sources. A
valid answer of a schema that is refused counts as not allowed.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from guided import COMPILER, accepts

from megatron_hybrid.text.guide import Guide

OTHERS = {
    *("vocabulary", "dynamicRef", "refRemote", "anchor", "content", "defs", "id"),
    *("infinite-loop-detection", "unknownKeyword"),
}
"""Files about other schemas than the one that is given, or about nothing that an answer shows."""
MOST_INVALID = 5
LEAST_VALID = 0.94
"""Of the valid answers of schemas that are taken."""


def in_order(value, schema):
    """Return a value with its declared properties first, in the order of the schema."""
    if isinstance(value, list):
        return [in_order(each, {}) for each in value]
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return value
    names = [*schema.get("properties", {}), *schema.get("required", ())]
    place = {name: index for index, name in reversed([*enumerate(names)]) for name in [name]}
    return {name: value[name] for name in sorted(value, key=lambda n: place.get(n, len(names)))}


def main(folder: Path) -> int:
    counts, wrong, refused = Counter(), [], Counter()
    for file in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        if file.stem in OTHERS:
            continue
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {key: value for key, value in schema.items() if key != "$schema"}
            kinds = Counter("valid" if test["valid"] else "invalid" for test in group["tests"])
            counts.update({f"{kind} answers": count for kind, count in kinds.items()})
            try:
                guide = Guide.json_schema(schema)
                COMPILER.compile(guide)
            except ValueError as error:
                counts["schemas refused"] += 1
                refused[str(error).removeprefix("bad JSON schema: ")[:70]] += 1
                continue
            counts["schemas taken"] += 1
            counts.update({f"{kind} answers of schemas taken": n for kind, n in kinds.items()})
            for test in group["tests"]:
                text = json.dumps(in_order(test["data"], schema), ensure_ascii=False)
                kind = "valid" if test["valid"] else "invalid"
                if accepts(guide, text):
                    counts[f"{kind} answers allowed"] += 1
                if accepts(guide, text) != test["valid"]:
                    name = f"{file.stem}: {group['description']}: {test['description']}"
                    wrong.append((kind, name, text[:60]))
    if "-v" in sys.argv:
        for row in [*wrong, *refused.most_common()]:
            print(*row, sep=" | ")
    for name in sorted(counts):
        print(f"{counts[name]:6} {name}")
    share = counts["valid answers allowed"] / counts["valid answers of schemas taken"]
    print(f"{share:6.1%} of the valid answers of schemas taken are allowed")
    return int(share < LEAST_VALID or counts["invalid answers allowed"] > MOST_INVALID)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
