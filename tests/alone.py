"""The tokens that a request gets alone: from the model run over the whole text for every token."""

from collections.abc import Sequence

import numpy as np
import torch

from mfs_trt.model.sequences import boundaries
from mfs_trt.model.transformer import NestedModel
from mfs_trt.sampling.sampler import SamplingRow, sample
from mfs_trt.sampling_params import SamplingParams


def logits_alone(model: NestedModel, token_ids: Sequence[int], tier: str) -> np.ndarray:
    """Logits [1, vocab_size] of the token that follows, at a tier."""
    index = model.family.tier_index(tier)
    with torch.no_grad():
        hidden = boundaries(model, torch.tensor([list(token_ids)]), index)[-1]
        return model.exit_logits(index, hidden[0, -1:]).numpy()


def tokens_alone(
    model: NestedModel, prompt: Sequence[int], params: SamplingParams, tiers: Sequence[str]
) -> list[int]:
    """The tokens that follow `prompt`, the i-th one sampled at the i-th of `tiers`."""
    output: list[int] = []
    for tier in tiers:
        row = SamplingRow(params, params.seed or 0, prompt, output)
        logits = logits_alone(model, [*prompt, *output], tier)
        output.append(sample(logits, [row])[0].token_id)
        if output[-1] == params.end_id:
            break
    return output
