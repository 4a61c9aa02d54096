"""Tiny random-weight models of many architectures, built without a network."""

from __future__ import annotations

import torch
import transformers

import attnprobe as ap

VOCAB = 97
_COMMON = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_LLAMA = dict(
    _COMMON,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**_COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=128),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(**_LLAMA, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA),
    "neox": lambda: transformers.GPTNeoXConfig(
        **_COMMON,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_LLAMA,
        head_dim=8,
        sliding_window=6,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    ),
}
_CLASSES = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def tiny_model(name: str, *, attention: str = "eager", **changes: object):
    """A tiny random-weight transformers model with attention that is far from uniform."""
    config = CONFIGS[name]()
    config.initializer_range = 0.3
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(name, "AutoModelForCausalLM")).from_config(
        config, attn_implementation=attention
    )
    model.config.architectures = [type(model).__name__]
    return model.eval()


def tiny_bridge(name: str, **kwargs: object):
    """The same as a TransformerBridge, without a tokenizer: token ids in, token ids out."""
    return ap.load_model(tiny_model(name, **kwargs))
