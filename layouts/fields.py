"""A config.json's fields, checked: sizes, counts and numbers, each refused by name."""

import json
from typing import Any, TypeVar

from kconvert.layouts.errors import CheckpointError, UnsupportedError

CONFIG_NAME = "config.json"
D = TypeVar("D", bound=bool | None)
ANY = object()  # in a table of fields: whatever the value is


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a wrapper's config, or the config itself."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{CONFIG_NAME}: text_config is not an object.")
    return text


def positive(config: dict[str, Any], key: str, most: int = 1 << 31) -> int:
    """config[key], a size from 1 to `most`; CheckpointError naming the key otherwise."""
    value = config.get(key)
    if type(value) is not int or not 0 < value <= most:
        raise CheckpointError(
            f"{CONFIG_NAME}: {key} is {value!r:.60}, expected a size of 1 to {most:,}."
        )
    return value


def natural(config: dict[str, Any], key: str, default: int, most: int = 1 << 31) -> int:
    """config[key], a count from 0 to `most`, or `default` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    return 0 if value == 0 and type(value) is int else positive(config, key, most)


def flag(config: dict[str, Any], key: str, default: D) -> bool | D:
    """config[key], true or false, or `default` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise CheckpointError(f"{CONFIG_NAME}: {key} is {value!r:.60}, expected true or false.")
    return value


def real(
    config: dict[str, Any],
    key: str,
    default: float | None = None,
    least: float = 1e-30,
    most: float = 1e30,
) -> float:
    """config[key], a number from `least` to `most`, or `default` if it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CheckpointError(
            f"{CONFIG_NAME}: {key} is {value!r:.60}, expected a number of {least:g} to {most:g}."
        )
    return float(value)


def check_fields(where: str, table: Any, fields: dict[str, Any]) -> None:
    """Check that `table`, found in config.json at `where`, has no fields but those of `fields`,
    which maps each to the values that can be carried out, or to ANY.

    Raises CheckpointError if it is no object, UnsupportedError naming the field otherwise.
    """
    if not isinstance(table, dict):
        raise CheckpointError(f"{CONFIG_NAME}: {where} is not an object.")
    for key, value in table.items():
        if key not in fields:
            raise UnsupportedError(
                f"{CONFIG_NAME}: {where}.{key} is not a field this version knows;"
                " it will not be guessed at."
            )
        allowed = fields[key]
        if allowed is not ANY and not any(value == a and type(value) is type(a) for a in allowed):
            expected = " or ".join(json.dumps(a) for a in allowed)
            raise UnsupportedError(
                f"{CONFIG_NAME}: {where}.{key} is {json.dumps(value):.80}, only {expected} can be"
                " converted."
            )
