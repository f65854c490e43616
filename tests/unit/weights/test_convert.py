import threading
import time
import weakref
from math import prod

import pytest
import torch

from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.errors import CheckpointError, ConfigError
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.tensor_names import tensor_shapes
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore


def convert(reader, folder, tiers="3", **options):
    specs = parse_tiers(tiers, reader.config.num_layers, options.pop("own_heads", False))
    convert_checkpoint(reader, specs, folder, **options)
    return WeightStore(folder)


def test_every_exit_norm_starts_as_the_final_norm(hf_folder, tmp_path):
    reader = HfCheckpoint(hf_folder("llama"))
    store = convert(reader, tmp_path / "f")
    for tier in range(3):
        assert torch.equal(store.get(store.norm_name(tier)), reader.load("norm.weight"))


@pytest.mark.parametrize("tied", [False, True])
def test_own_heads_start_as_the_head_of_the_checkpoint(hf_folder, tmp_path, tied):
    reader = HfCheckpoint(hf_folder("llama", tie_word_embeddings=tied))
    store = convert(reader, tmp_path / "f", own_heads=True)
    head = reader.load("embed_tokens.weight" if tied else "lm_head.weight")
    assert store.head_name(0) == "exits.2.lm_head.weight"
    assert all(torch.equal(store.get(store.head_name(tier)), head) for tier in range(3))


def test_dtype_of_the_checkpoint_is_kept_unless_another_is_asked_for(hf_folder, tmp_path):
    reader = HfCheckpoint(hf_folder("llama"))
    assert convert(reader, tmp_path / "a").spec.dtype == "float32"
    store = convert(reader, tmp_path / "b", dtype="bfloat16")
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(store.get(name), reader.load(name).bfloat16())


def test_unknown_dtype_is_refused_by_name(hf_folder, tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        convert(HfCheckpoint(hf_folder("llama")), tmp_path / "f", dtype="int8")


def test_value_beyond_float16_is_refused_by_tensor_name(hf_folder, tmp_path):
    reader = HfCheckpoint(hf_folder("llama"))
    plain = reader.load

    def load(name):
        return plain(name) * 1e9 if name == "norm.weight" else plain(name)

    reader.load = load
    with pytest.raises(CheckpointError, match=r"norm\.weight.*float16"):
        convert(reader, tmp_path / "f", dtype="float16")


def test_only_one_tensor_is_alive_at_a_time(hf_folder, tmp_path):
    reader = HfCheckpoint(hf_folder("llama"))
    plain, alive = reader.load, weakref.WeakSet()

    def load(name):
        assert not alive, f"{name} is loaded while another tensor is held"
        tensor = plain(name).clone()
        alive.add(tensor)
        return tensor

    reader.load = load
    convert(reader, tmp_path / "f")


def anonymous_nbytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_peak_memory_is_about_one_tensor(hf_folder, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128}
    folder = hf_folder("llama", num_hidden_layers=10, vocab_size=4000, **sizes)
    reader = HfCheckpoint(folder)
    shapes = tensor_shapes(reader.config).values()
    total, largest = 8 * sum(map(prod, shapes)), 8 * max(map(prod, shapes))
    before, peak, done = anonymous_nbytes(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_nbytes() - before)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    convert(reader, tmp_path / "f", tiers="2", dtype="float64")  # every tensor is cast, so copied
    done.set()
    watcher.join()
    assert peak[0] < 3 * largest < total / 4
