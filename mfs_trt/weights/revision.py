"""The content hash of a family: equal for equal weights, config and tiers, whatever the source."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256

from mfs_trt.family.spec import TierSpec
from mfs_trt.model_config import ModelConfig


def family_revision(
    model: ModelConfig, tiers: Sequence[TierSpec], dtype: str, tensor_digests: Mapping[str, str]
) -> str:
    """Hash over config, tiers, dtype and each tensor's SHA-256 (hex), whatever the file order."""
    content = {
        "model": model.to_json(),
        "tiers": [asdict(tier) for tier in tiers],
        "dtype": dtype,
        "tensors": dict(tensor_digests),
    }
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
