"""A JSON Schema of policies, by which editors complete keys and underline what is wrong.

What contradicts another setting, or the layers of a model, is not in it: the package checks more.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import TypeAdapter

from tba_offload.config.options import BudgetConfig, OffloadConfig, StatesConfig, StoreConfig, WeightsConfig
from tba_offload.config.policy import Rule
from tba_offload.config.store import kinds

Schema = dict[str, Any]

URL = "https://raw.githubusercontent.com/tba-offload/tba-offload/main/docs/policy.schema.json"
"""Address of the schema of the latest version."""

_KINDS = (OffloadConfig, BudgetConfig, StoreConfig, StatesConfig, WeightsConfig, Rule)
_NOT_IN_FILES = ("file", "line", "lines")


def policy_schema() -> Schema:
    """Return the schema of a policy file, with the placements and the kinds of stores that are known now."""
    whole = TypeAdapter(OffloadConfig).json_schema()
    parts: dict[str, Schema] = {**whole["$defs"], "OffloadConfig": whole}
    parts["Rule"]["properties"]["match"] = {"type": ["string", "integer"], "minimum": 0}
    parts["StoreConfig"]["properties"]["kind"] = {"enum": list(kinds())}
    for kind in _KINDS:
        _describe(kind, parts[kind.__name__])
    own = parts.pop("OffloadConfig")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": URL}
    return {**head, **own, "title": "tba-offload policy", "$defs": parts}


def _describe(kind: type, part: Schema) -> None:
    """Leaves out what no file says and what is long to repeat, and adds what the docstring tells."""
    told = _attributes_of(kind)
    part["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
    part["additionalProperties"] = False
    for name in _NOT_IN_FILES:
        part["properties"].pop(name, None)
    for name, setting in part["properties"].items():
        for key in ("title", "default"):
            setting.pop(key, None)
        setting["description"] = told[name]


def _attributes_of(kind: type) -> dict[str, str]:
    """Return the text of each attribute in a docstring, without markup."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(re.sub(r":\w+:`~?([\w.]+)`|``", r"\1", text).split()) for name, text in found}
