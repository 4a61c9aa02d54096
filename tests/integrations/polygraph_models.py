"""A tiny random-weight model in LM-Polygraph's wrapping, with a word tokenizer."""

from __future__ import annotations

from typing import Any

import transformers
from tiny import VOCAB, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

# unequal lengths, so that a batch of them is padded
PROMPTS = ["w5 w6 w7 w8 w9 w11 w12", "w20 w21 w22", "w30 w31 w32 w33 w34"]
MAX_NEW_TOKENS = 6
END, OTHER_END, PAD = 2, 96, 0


def words(padding_side: str = "left") -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose token i is the word `w<i>`; 0 pads and 2 ends."""
    # transformers' stop strings try "abcdef" on every tokenizer, and want it back
    vocabulary = {("abcdef" if i == 3 else f"w{i}"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{END}", padding_side=padding_side
    )


def whitebox(
    attention: str = "sdpa",
    *,
    ends: list[int] | None = None,
    stop: list[str] | None = None,
    model_type: str = "CausalLM",
    padding_side: str = "left",
    n_layers: int = 6,
) -> Any:
    """LM-Polygraph's WhiteboxModel.

    Args:
        ends: what generation stops at, nothing by default. LM-Polygraph takes an end token, where there is one, out of
            the first two distributions.
    """
    from lm_polygraph.utils.generation_parameters import GenerationParameters
    from lm_polygraph.utils.model import WhiteboxModel

    model = tiny_model("llama", attention=attention, num_hidden_layers=n_layers)
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = PAD
    parameters = GenerationParameters(max_new_tokens=MAX_NEW_TOKENS, stop_strings=stop)
    return WhiteboxModel(model, words(padding_side), "tiny", model_type, parameters)
