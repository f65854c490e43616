"""Which tier a request starts at, and what may move it: a pure function of what it asks for and of
the family.
"""

from dataclasses import dataclass
from math import isfinite

from mfs_trt.errors import InvalidRequestError
from mfs_trt.family.spec import FamilySpec
from mfs_trt.request import PromptRequest

EXPLICIT, DEADLINE, LOAD, CASCADE = "explicit", "deadline", "load", "cascade"
TIER_POLICIES = (EXPLICIT, DEADLINE, LOAD, CASCADE)
CASCADE_THRESHOLD = -1.0  # unless a request has its own
DRAFT_PART = 3  # a tier of less than a third of the layers drafts well and answers badly


@dataclass(frozen=True)
class TierPolicy:
    """What moves a request, and between which tiers (indices)."""

    name: str  # of TIER_POLICIES
    start: int
    low: int
    high: int
    cascade_threshold: float = CASCADE_THRESHOLD  # mean natural log-probability of a token


def choose_policy(
    request: PromptRequest, family: FamilySpec, default: str = EXPLICIT
) -> TierPolicy:
    """The request's policy and bounds, and the tier that it starts at.

    That is the named tier; else the lowest under `cascade`, the highest under the others. Without
    `min_tier` a policy that moves goes no lower than the tiers that are deep enough to answer.
    `default` holds for requests that name neither policy nor tier, and is `explicit` to one that
    lacks the deadline which it needs. Raises `FamilyError` for an unknown tier and
    `InvalidRequestError` for what cannot be served.
    """
    name = _policy_name(request, default)
    high = family.tier_index(request.max_tier) if request.max_tier else len(family.tiers) - 1
    named = family.tier_index(request.tier) if request.tier else None
    if request.min_tier:
        low = family.tier_index(request.min_tier)
    else:
        shallowest = 0 if name == EXPLICIT else _shallowest_answering(family)
        low = min(shallowest, high, high if named is None else named)
    if low > high:
        raise InvalidRequestError(
            f"min_tier: expected at most max_tier {request.max_tier!r}, got {request.min_tier!r}"
        )
    start = named if named is not None else low if name == CASCADE else high
    if not low <= start <= high:
        raise InvalidRequestError(
            f"tier: expected one between {family.tiers[low].name!r} and "
            f"{family.tiers[high].name!r}, got {request.tier!r}"
        )
    return TierPolicy(name, start, low, high, _cascade_threshold(request, name))


def _policy_name(request: PromptRequest, default: str) -> str:
    name = request.tier_policy
    if name is None:
        is_moved = request.tier is None and (default != DEADLINE or request.deadline_s is not None)
        return default if is_moved else EXPLICIT
    if name not in TIER_POLICIES:
        raise InvalidRequestError(
            f"tier_policy: expected one of {', '.join(TIER_POLICIES)}, got {name!r}"
        )
    if name == DEADLINE and request.deadline_s is None:
        raise InvalidRequestError("deadline: expected one with tier_policy 'deadline', got none")
    return name


def _shallowest_answering(family: FamilySpec) -> int:
    num_layers = family.model.num_layers
    return next(i for i, t in enumerate(family.tiers) if t.exit_layer * DRAFT_PART >= num_layers)


def _cascade_threshold(request: PromptRequest, policy: str) -> float:
    threshold = request.cascade_threshold
    if threshold is None:
        return CASCADE_THRESHOLD
    if policy != CASCADE:
        raise InvalidRequestError(
            f"cascade_threshold: expected tier_policy 'cascade' with it, got {policy!r}"
        )
    if not isfinite(threshold) or threshold > 0:
        raise InvalidRequestError(
            "cascade_threshold: expected a mean log-probability, finite and at most 0, "
            f"got {threshold}"
        )
    return threshold


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
