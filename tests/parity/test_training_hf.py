"""A training step of the top tier against transformers' own model and torch's own loss."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mfs_trt.model.transformer import NestedModel
from mfs_trt.precipitation.packing import IGNORED
from mfs_trt.precipitation.trainer import Trainer
from tiny import tiny_family
from trainings import ALONE, random_tokens, training_config


def _same_models() -> tuple[NestedModel, LlamaForCausalLM]:
    model = NestedModel(tiny_family(exits=(4,)), 64)
    c = model.family.model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        initializer_range=0.2,
    )
    peer = LlamaForCausalLM(config)
    state = {k.removeprefix("model."): v for k, v in peer.state_dict().items()}
    state["exits.4.norm.weight"] = state.pop("norm.weight")
    state["exits.4.lm_head.weight"] = state["lm_head.weight"]
    model.load_state_dict(state)
    return model, peer


def test_loss_gradient_norm_and_updated_weights_equal_those_of_transformers():
    model, peer = _same_models()
    config = training_config(schedule="joint", weight_decay=0.0)
    data = random_tokens()
    trainer = Trainer(model, data, config, ALONE)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=config.learning_rate, weight_decay=0.0)
    input_ids, labels = data.batch(0, config.batch_size)
    logits = peer(input_ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), config.max_grad_norm)
    optimizer.step()

    report = trainer.step()

    torch.testing.assert_close(report.losses["t0"], float(loss.detach()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(report.grad_norm, float(norm), rtol=1e-4, atol=1e-5)
    weight = peer.model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(model.layers[1].mlp.up_proj.weight, weight, rtol=1e-3, atol=1e-5)
