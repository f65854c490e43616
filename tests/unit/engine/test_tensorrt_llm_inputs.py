"""What `GPTAttention` is told: contexts first, lengths, and where its keys and values lie."""

import numpy as np
import torch

from mfs_trt.engine.interface import EngineLimits, KVCacheSpec
from mfs_trt.engine.tensorrt_arena import arena_tensors, new_arena
from mfs_trt.engine.tensorrt_llm_inputs import CONTEXT, GENERATION, GptAttentionInputs
from packed_rows import packed_rows

NUM_FRAMES = 240
KV_SPEC = KVCacheSpec(2, (2,), 2, 16, 4, 1024, NUM_FRAMES)
ITEMS = [(6, 7), (0, 5), (3, 4), (0, 1), (2, 9)]  # decode, prompt, decode, first token, chunk


def arrays_of(m: int = 1, num_blocks: int | None = None):
    inputs = GptAttentionInputs(EngineLimits(max_model_len=64), KV_SPEC)
    return inputs.segment(packed_rows(ITEMS, m=m), num_blocks)


def test_requests_of_several_rows_and_first_tokens_are_contexts_and_come_first():
    arrays = arrays_of()
    types = arrays["host_request_types"].tolist()
    assert types == [CONTEXT] * 3 + [GENERATION] * 2
    assert arrays["sequence_length"].tolist() == [5, 1, 9, 7, 4]
    assert arrays["host_past_key_value_lengths"].tolist() == [0, 0, 2, 6, 3]
    assert arrays["host_context_lengths"].tolist() == [5, 1, 7, 6, 3]
    assert arrays["context_lengths"].tolist() == [5, 1, 7, 6, 3]


def test_rows_go_in_the_order_of_their_requests_and_come_back():
    arrays = arrays_of()
    order = arrays["attention_rows"]
    assert order.tolist() == [1, 2, 3, 4, 5, 7, *range(8, 15), 0, 6]
    assert order[arrays["row_queries"]].tolist() == list(range(15))


def test_offsets_of_a_layer_are_its_group_s_frames_and_behind_all_keys_the_values():
    arrays = arrays_of(m=2)
    offsets = arrays["kv_cache_block_offsets"]
    rows = packed_rows(ITEMS, m=2)
    assert offsets.shape == (4, 5, 2, 3) and offsets.dtype == np.int32
    tables = rows.block_tables[[1, 3, 4, 0, 2]]
    for layer in range(4):
        np.testing.assert_array_equal(offsets[layer, :, 0], tables[:, :, layer // 2])
        np.testing.assert_array_equal(offsets[layer, :, 1], tables[:, :, layer // 2] + NUM_FRAMES)
    np.testing.assert_array_equal(arrays["host_kv_cache_block_offsets"], offsets)
    assert arrays["host_kv_cache_pool_mapping"].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]


def test_as_many_blocks_are_given_as_asked():
    assert arrays_of(num_blocks=2)["kv_cache_block_offsets"].shape == (2, 5, 2, 2)


def test_pool_pointers_lead_to_keys_and_by_offsets_to_values():
    like, shape = torch.zeros(1, dtype=torch.float16), (NUM_FRAMES, 2, 4, 16)
    arena = new_arena("gpt_attention", like, shape, group_size=2)
    (pointers,) = arena_tensors("gpt_attention", arena, num_groups=2).values()
    assert pointers.dtype == torch.int64 and pointers.device.type == "cpu"
    nbytes = 2 * 2 * 4 * 16  # of a frame
    for layer, (address, secondary) in enumerate(pointers.tolist()):
        keys, values = arena[layer % 2]
        assert secondary == 0
        assert keys[7].data_ptr() == address + 7 * nbytes
        assert values[7].data_ptr() == address + (NUM_FRAMES + 7) * nbytes


def test_other_plans_are_bound_to_the_tensors_themselves():
    arena = new_arena("plugin", torch.zeros(1), (3, 2, 4, 16), group_size=2)
    tensors = arena_tensors("plugin", arena, num_groups=2)
    assert len(tensors) == 16
    for group in range(2):
        for i, pair in enumerate(arena):
            for kind, tensor in zip(("key_cache", "value_cache"), pair, strict=True):
                assert tensors[f"{kind}.{group}.{i}"] is tensor
                assert tensors[f"new_{kind}.{group}.{i}"] is tensor
