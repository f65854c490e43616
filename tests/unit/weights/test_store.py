import json

import pytest
import safetensors.torch
import torch

from mfs_trt.checkpoint.hf import HfCheckpoint
from mfs_trt.errors import FamilyError
from mfs_trt.family.tiers import parse_tiers
from mfs_trt.weights.convert import convert_checkpoint
from mfs_trt.weights.store import WeightStore


@pytest.fixture
def folder(hf_folder, tmp_path):
    reader = HfCheckpoint(hf_folder("llama", num_hidden_layers=2))
    convert_checkpoint(reader, parse_tiers("1,2", 2), tmp_path / "family")
    return tmp_path / "family"


def edit_weights(folder, change):
    path = folder / "base.safetensors"
    tensors = {name: t.clone() for name, t in safetensors.torch.load_file(path).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def test_names_are_those_of_the_spec(folder):
    store = WeightStore(folder)
    assert set(store.names()) == set(store.spec.tensor_shapes())
    assert store.shape("layers.1.mlp.down_proj.weight") == (48, 80)


def test_untouched_family_is_verified(folder):
    WeightStore(folder).verify()


def test_changed_weight_is_found(folder):
    edit_weights(folder, lambda tensors: tensors["exits.1.norm.weight"].add_(1))
    with pytest.raises(FamilyError, match="expected revision"):
        WeightStore(folder).verify()


def test_changed_manifest_is_found(folder):
    path = folder / "family.json"
    data = json.loads(path.read_text())
    data["model"]["rms_norm_eps"] = 0.1
    path.write_text(json.dumps(data))
    with pytest.raises(FamilyError, match="expected revision"):
        WeightStore(folder).verify()


def test_unknown_name_is_refused_by_name(folder):
    with pytest.raises(FamilyError, match=r"layers\.9"):
        WeightStore(folder).get("layers.9")


def test_missing_tensor_is_refused_when_opened(folder):
    edit_weights(folder, lambda tensors: tensors.pop("exits.1.norm.weight"))
    with pytest.raises(FamilyError, match=r"exits\.1\.norm\.weight: expected \[48\] float32"):
        WeightStore(folder)


def test_tensor_of_another_dtype_is_refused_when_opened(folder):
    name = "exits.1.norm.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].half()}))
    with pytest.raises(FamilyError, match=r"exits\.1\.norm\.weight.*float16"):
        WeightStore(folder)


def test_unknown_tensor_is_refused_when_opened(folder):
    edit_weights(folder, lambda tensors: tensors.update({"extra": torch.zeros(1)}))
    with pytest.raises(FamilyError, match="extra"):
        WeightStore(folder)


def test_truncated_weights_are_refused_by_file_name(folder):
    path = folder / "base.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FamilyError, match=r"base\.safetensors"):
        WeightStore(folder)


def test_missing_weights_are_refused_by_file_name(folder):
    (folder / "base.safetensors").unlink()
    with pytest.raises(FamilyError, match=r"base\.safetensors"):
        WeightStore(folder)
