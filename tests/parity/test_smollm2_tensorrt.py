"""The real SmolLM2-135M in TensorRT's networks, evaluated: the greedy text of `transformers`."""

import pytest

from mfs_trt.engine.interface import EngineLimits
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import EngineCore
from mfs_trt.tokenizer import Tokenizer
from smollm2 import MAX_TOKENS, PROMPTS, generate_greedily
from tensorrt_rig import evaluated_engine, rtx_config
from tiny import drain, submit

pytestmark = pytest.mark.slow


def test_greedy_text_of_mixed_tiers_in_one_batch_equals_generate(smollm2_family, smollm2_hf):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    engine = evaluated_engine(smollm2_family, rtx_config(memory_nbytes=256 << 20, limits=limits))
    core = EngineCore(engine, Tokenizer(smollm2_family))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for i, text in enumerate(PROMPTS[:4]):
        tier = core.family.tiers[2 - i % 2].name
        submit(core, PromptRequest(str(i), params, prompt=text, tier=tier))
    events = drain(core)
    for i, text in enumerate(PROMPTS[:4]):
        if i % 2 == 0:
            ids = core.tokenizer.encode(text)
            expected = generate_greedily(smollm2_hf, ids, core.family.end_token_ids)
            assert [t for e in events if e.request_id == str(i) for t in e.token_ids] == expected
