"""Tiny Hugging Face models of the architectures that the backend builds, with norms away from 1 so that they show."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from sdpo_core.backends.megatron.shape import ModelShape, model_shape

VOCAB = 250


def qwen3_config(**changes: Any) -> Qwen3Config:
    """3 layers x 64, 4 heads in 2 groups; heads of 32 are wider than hidden / heads, as in Qwen3-0.6B."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**(settings | changes))


def llama_config(**changes: Any) -> LlamaConfig:
    """SmolLM2-135M's 9 heads in 3 groups, and its ties."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(settings | changes))


def tiny_model(config: PretrainedConfig, *, seed: int = 7) -> PreTrainedModel:
    """A random float32 model of a configuration."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.nn.Module.train(model, mode=False)
    return model


def tiny_shape(**changes: Any) -> ModelShape:
    return model_shape(qwen3_config(**changes))
