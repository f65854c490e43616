"""`--tiers` text → tiers: a count, exit layers or fractions of the depth, with names or without."""

import re

from mfs_trt.errors import ConfigError
from mfs_trt.family.spec import TierSpec

_DEFAULT_NAMES = {2: ("small", "large"), 3: ("small", "medium", "large")}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_tiers(text: str, num_layers: int, own_heads: bool = False) -> tuple[TierSpec, ...]:
    """Read `3`, `10,20,30`, `0.33,0.66,1.0` or `small=10,medium=20,large=30`.

    One whole number is a count. With a decimal point anywhere all numbers are fractions. With
    `own_heads` every tier below the top gets an LM head of its own. Raises `ConfigError` unless
    exits ascend and the last is the whole depth.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(f"tiers: expected numbers separated by commas, got {text!r}")
    if len(items) == 1 and items[0].isdecimal():
        exits = even_exits(int(items[0]), num_layers)
        names = default_names(len(exits))
    else:
        names, numbers = _split_names(items)
        exits = _exits(numbers, num_layers)
    if any(a >= b for a, b in zip((0, *exits), exits, strict=False)):
        raise ConfigError(f"tiers: expected ascending exit layers from 1, got {list(exits)}")
    if exits[-1] != num_layers:
        raise ConfigError(
            f"tiers: expected the last exit after layer {num_layers}, the model's depth, "
            f"got {exits[-1]}"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"tiers: expected distinct names, got {', '.join(names)}")
    return tuple(
        TierSpec(name, exit_layer, own_head=own_heads and exit_layer < num_layers)
        for name, exit_layer in zip(names, exits, strict=True)
    )


def default_names(count: int) -> tuple[str, ...]:
    return _DEFAULT_NAMES.get(count) or tuple(f"tier{i}" for i in range(count))


def even_exits(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` exits, evenly spaced up to `num_layers`, in the largest layer group that allows it.

    A segment's block takes one KV frame per layer group, so large groups mean few frames. An exit
    may move by a quarter of an even segment for the sake of a larger group.
    """
    if not 1 <= count <= num_layers:
        raise ConfigError(f"tiers: expected a count between 1 and {num_layers}, got {count}")
    for group in range(num_layers // count, 1, -1):
        if num_layers % group:
            continue
        exits = _rounded(count, num_layers, group)
        moved = max(abs(e - (i + 1) * num_layers / count) for i, e in enumerate(exits))
        if moved <= num_layers / count / 4:
            return exits
    return _rounded(count, num_layers, 1)


def _rounded(count: int, num_layers: int, group: int) -> tuple[int, ...]:
    """Even exits moved to the nearest multiple of `group`, a divisor of `num_layers`."""
    units = num_layers // group
    return tuple(group * ((2 * i * units + count) // (2 * count)) for i in range(1, count + 1))


def _split_names(items: list[str]) -> tuple[tuple[str, ...], list[str]]:
    pairs = [item.partition("=") for item in items]
    if all(sign for _, sign, _ in pairs):
        names = tuple(name.strip() for name, _, _ in pairs)
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"tiers: expected a name of letters, digits, '_', '.', '-', got {name!r}"
                )
        return names, [number.strip() for _, _, number in pairs]
    if any(sign for _, sign, _ in pairs):
        raise ConfigError(f"tiers: expected a name for every tier or for none, got {items}")
    return default_names(len(items)), items


def _exits(numbers: list[str], num_layers: int) -> tuple[int, ...]:
    if not any("." in number for number in numbers):
        for number in numbers:
            if not number.isdecimal():
                raise ConfigError(f"tiers: expected an exit layer, got {number!r}")
        return tuple(int(number) for number in numbers)
    exits = []
    for number in numbers:
        try:
            fraction = float(number)
        except ValueError:
            raise ConfigError(f"tiers: expected a fraction, got {number!r}") from None
        if not 0 < fraction <= 1:
            raise ConfigError(f"tiers: expected fractions above 0 and up to 1, got {number}")
        exits.append(int(fraction * num_layers + 0.5))
    return tuple(exits)
