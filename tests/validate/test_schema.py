"""The JSON of a validation, against its published schema."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit import KIMI_MINI, flip

import kconvert.validate
from kconvert.convert import convert

SCHEMA = Path(kconvert.validate.__file__).with_name("schema") / "1.json"
RANK0 = "rank-00000-of-00002/layer-00001.safetensors"


def conforms(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """As far as this schema goes; a key that it does not know is a fault."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
             "boolean": bool, "null": type(None)}  # fmt: skip
    if "const" in schema:
        assert value == schema["const"], where
    elif "enum" in schema:
        assert value in schema["enum"], where
    else:
        allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(isinstance(value, kinds[kind]) for kind in allowed), where
    if isinstance(value, dict) and "properties" in schema:
        assert value.keys() == schema["properties"].keys() == set(schema["required"]), where
        for key, part in value.items():
            conforms(part, schema["properties"][key], f"{where}/{key}")
    elif isinstance(value, dict):
        for key, part in value.items():
            conforms(part, schema["additionalProperties"], f"{where}/{key}")
    elif isinstance(value, list):
        for part in value:
            conforms(part, schema["items"], f"{where}[]")


@pytest.mark.parametrize("options", [(), ("--source", KIMI_MINI), ("--sample", 2)])
def test_json_is_what_the_schema_says(output: Path, kconvert, options) -> None:
    table = json.loads(kconvert("validate", output, *options, "--json").out)
    conforms(table, json.loads(SCHEMA.read_text()))


def test_json_of_a_damaged_output(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "out")
    (tmp_path / "out/config.json").unlink()
    outcome = kconvert("validate", tmp_path / "out", "--json")
    table = json.loads(outcome.out)
    conforms(table, json.loads(SCHEMA.read_text()))
    assert outcome.code == 1 and not table["ok"]
    assert {c["skipped"] for c in table["checks"] if c["id"] == "finite"} == {"not reached"}
    assert table["summary"].startswith("DIFFERENT: 1 error; ")


def test_json_says_where_codes_differ(tmp_path: Path, kconvert) -> None:
    convert(KIMI_MINI, tmp_path / "out", tp=2)
    flip(tmp_path / "out" / RANK0, "w2_weight_packed", expert=3)
    table = json.loads(kconvert("validate", tmp_path / "out", "--source", KIMI_MINI, "--json").out)
    conforms(table, json.loads(SCHEMA.read_text()))
    finding = next(finding for finding in table["findings"] if finding["check"] == "codes")
    assert finding["id"] == f"codes:{RANK0}:{finding['tensor']}:3" and finding["differing"] == 1
    (place,) = finding["places"]
    assert place["expected"] ^ place["found"] == 1
    for side in ("expected", "found"):
        assert place[f"{side}_value"] == place[side] - 8
        assert f"0x{place[side]:x} ({place[f'{side}_value']:.0f}) {side}" in finding["text"]
