"""How `polygraph_eval` loads a model and its tokenizer: named in the configuration beside this file."""

from typing import Any

import transformers


def load_model(model_path: str, **settings: Any) -> Any:
    """The model, on sdpa unless the configuration says otherwise."""
    settings.setdefault("attn_implementation", "sdpa")
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, **settings).eval()


def load_tokenizer(model_path: str, **settings: Any) -> Any:
    """The tokenizer, padding on the left: generation goes on from the right end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, padding_side="left", **settings)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
