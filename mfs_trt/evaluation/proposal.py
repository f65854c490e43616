"""Where a family's exits should be: wanted depths, moved for the sake of large layer groups. Pure.

A KV block takes one frame per layer group, and the group is the greatest common divisor of the
segments' layer counts, which is that of the exit layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, floor, gcd

from mfs_trt.errors import ConfigError
from mfs_trt.family.tiers import default_names

DRAFT_BAND = (0.15, 0.25)  # of the depth: where a draft tier pays most for speculation
DRAFT_NAME = "draft"
LOWEST_QUALITY = 0.5  # of the depth: below it a tier is a draft tier, whatever its name
TOLERANCE = 0.05  # of the depth: how far a wanted exit may move
_MAX_CHOICES = 200_000  # combinations looked at for one group size


@dataclass(frozen=True)
class Proposal:
    """Exit layers, ascending, the last the whole depth."""

    exits: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def group_size(self) -> int:
        """Layers in a layer group."""
        return gcd(*self.exits)

    def to_tiers(self) -> str:
        """As `--tiers` of `convert` and `precipitate` takes it."""
        return ",".join(f"{n}={e}" for n, e in zip(self.names, self.exits, strict=True))


def propose_exits(
    num_layers: int,
    wanted: Sequence[float],
    *,
    tolerance: float = TOLERANCE,
    has_draft: bool = True,
) -> Proposal:
    """Exits near the `wanted` depths (layers), a draft tier below them, and the whole depth.

    Of all choices within `tolerance` · depth of the wanted, and within `DRAFT_BAND` for the draft,
    those of the largest layer group; of these the nearest. Raises `ConfigError` when the windows
    leave no ascending choice.
    """
    depths = sorted(wanted)
    windows = [_window(num_layers, depth, tolerance) for depth in depths]
    centres = list(depths)
    if has_draft:
        windows.insert(0, _draft_window(num_layers))
        centres.insert(0, sum(DRAFT_BAND) / 2 * num_layers)
    for group in sorted(_divisors(num_layers), reverse=True):
        best = _nearest(windows, centres, group, num_layers)
        if best is not None:
            names = default_names(len(depths) + 1)
            return Proposal((*best, num_layers), (DRAFT_NAME, *names) if has_draft else names)
    raise ConfigError(
        f"exits: expected wanted depths below {num_layers} and apart from each other, "
        f"got {[round(depth, 2) for depth in depths]} within ranges {[list(w) for w in windows]}"
    )


def _window(num_layers: int, depth: float, tolerance: float) -> range:
    """Layers within the tolerance; never none, never the whole depth."""
    reach = tolerance * num_layers
    nearest = min(max(1, round(depth)), num_layers - 1)
    low, high = min(nearest, ceil(depth - reach)), max(nearest, floor(depth + reach))
    return range(max(1, low), min(num_layers - 1, high) + 1)


def _draft_window(num_layers: int) -> range:
    """Layers of the draft band; the nearest to its middle where none lies in it."""
    low, high = (ceil(DRAFT_BAND[0] * num_layers), floor(DRAFT_BAND[1] * num_layers))
    if low > high:
        low = high = max(1, round(sum(DRAFT_BAND) / 2 * num_layers))
    return range(max(1, low), high + 1)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(
    windows: Sequence[range], centres: Sequence[float], group: int, num_layers: int
) -> tuple[int, ...] | None:
    """Ascending multiples of `group`, one of each window, with the smallest sum of distances."""
    choices = [[layer for layer in window if layer % group == 0] for window in windows]
    count = 1
    for options, centre in zip(choices, centres, strict=True):
        options.sort(key=lambda layer, centre=centre: (abs(layer - centre), layer))
        count *= len(options)
    if count == 0:
        return None
    if count > _MAX_CHOICES:  # many layers, many tiers: the nearest few of each window
        few = max(2, int(_MAX_CHOICES ** (1 / len(choices))))
        choices = [options[:few] for options in choices]
    rising = (
        pick
        for pick in product(*choices)
        if all(a < b for a, b in zip(pick, (*pick[1:], num_layers), strict=True))
    )

    def distance(pick: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return sum(abs(a - b) for a, b in zip(pick, centres, strict=True)), pick

    return min(rising, key=distance, default=None)
