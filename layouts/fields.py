"""A config.json's fields, checked: sizes, counts and numbers, each refused by name."""

from typing import Any

from kconvert.layouts.errors import CheckpointError

CONFIG_NAME = "config.json"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a wrapper's config, or the config itself."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{CONFIG_NAME}: text_config is not an object.")
    return text


def positive(config: dict[str, Any], key: str, most: int = 1 << 31) -> int:
    """config[key], a size of 1 to `most`; CheckpointError naming the key otherwise."""
    value = config.get(key)
    if type(value) is not int or not 0 < value <= most:
        raise CheckpointError(
            f"{CONFIG_NAME}: {key} is {value!r:.60}, expected a size of 1 to {most:,}."
        )
    return value


def natural(config: dict[str, Any], key: str, default: int, most: int = 1 << 31) -> int:
    """config[key], a count of 0 to `most`, or `default` where it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    return 0 if value == 0 and type(value) is int else positive(config, key, most)


def flag(config: dict[str, Any], key: str, default: bool) -> bool:
    """config[key], true or false, or `default` where it is absent or null."""
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
    """config[key], a number of `least` to `most`, or `default` where it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or not least <= value <= most:
        raise CheckpointError(
            f"{CONFIG_NAME}: {key} is {value!r:.60}, expected a number of {least:g} to {most:g}."
        )
    return float(value)
