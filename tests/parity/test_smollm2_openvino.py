"""The real SmolLM2-135M on the compiled engine: greedy text equals that of `transformers`."""

import pytest

from mfs_trt.builder.build import build_engine
from mfs_trt.builder.config import BuildConfig
from mfs_trt.engine.interface import EngineLimits
from mfs_trt.request import PromptRequest
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core
from smollm2 import MAX_TOKENS, PROMPTS, generate_greedily
from tiny import drain, submit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core(smollm2_family, tmp_path_factory):
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    config = BuildConfig(target="openvino", memory_nbytes=256 << 20, limits=limits)
    return load_core(build_engine(smollm2_family, tmp_path_factory.mktemp("engine") / "e", config))


def test_greedy_text_of_ten_prompts_in_one_batch_equals_generate(core, smollm2_hf):
    assert len(PROMPTS) == 10
    for i, text in enumerate(PROMPTS):
        submit(core, PromptRequest(str(i), SamplingParams(max_tokens=MAX_TOKENS), prompt=text))
    events = drain(core)
    for i, text in enumerate(PROMPTS):
        ids = core.tokenizer.encode(text)
        expected = generate_greedily(smollm2_hf, ids, core.family.end_token_ids)
        mine = [e for e in events if e.request_id == str(i)]
        assert [t for e in mine for t in e.token_ids] == expected
        assert "".join(e.text for e in mine) == core.tokenizer.decode(expected)


def test_lower_tiers_beside_the_top_tier_change_none_of_its_tokens(core, smollm2_hf):
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for i, text in enumerate(PROMPTS):
        tier = core.family.tiers[i % 3].name
        submit(core, PromptRequest(str(i), params, prompt=text, tier=tier))
    events = drain(core)
    for i, text in enumerate(PROMPTS):
        if i % 3 == 2:
            ids = core.tokenizer.encode(text)
            expected = generate_greedily(smollm2_hf, ids, core.family.end_token_ids)
            mine = [t for e in events if e.request_id == str(i) for t in e.token_ids]
            assert mine == expected
