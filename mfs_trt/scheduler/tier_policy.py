"""Which tier a request runs at: a pure function of what it asks for and of the family."""

from mfs_trt.errors import InvalidRequestError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.request import PromptRequest


def choose_tier(request: PromptRequest, family: FamilySpec) -> int:
    """Index of the tier: the named one, else the highest within `[min_tier, max_tier]`.

    Raises `FamilyError` for an unknown name and `InvalidRequestError` for bounds that exclude the
    choice.
    """
    low = family.tier_index(request.min_tier) if request.min_tier else 0
    high = family.tier_index(request.max_tier) if request.max_tier else len(family.tiers) - 1
    if low > high:
        raise InvalidRequestError(
            f"min_tier: expected at most max_tier {request.max_tier!r}, got {request.min_tier!r}"
        )
    if request.tier is None:
        return high
    tier = family.tier_index(request.tier)
    if not low <= tier <= high:
        raise InvalidRequestError(
            f"tier: expected one between {family.tiers[low].name!r} and "
            f"{family.tiers[high].name!r}, got {request.tier!r}"
        )
    return tier


def choose_draft_levels(request: PromptRequest, family: FamilySpec, tier: int) -> tuple[int, ...]:
    """Indices of the tiers that draft for `tier`, ascending.

    Raises `FamilyError` for an unknown name and `InvalidRequestError` for one that cannot draft.
    """
    wanted = request.num_speculative_tokens
    if wanted is not None and wanted < 0:
        raise InvalidRequestError(f"num_speculative_tokens: expected at least 0, got {wanted}")
    levels = tuple(family.tier_index(name) for name in request.draft_tiers)
    if list(levels) != sorted(set(levels)) or (levels and levels[-1] >= tier):
        raise InvalidRequestError(
            f"draft_tier: expected tiers below {family.tiers[tier].name!r}, from low to high, "
            f"got {', '.join(request.draft_tiers)}"
        )
    return levels
