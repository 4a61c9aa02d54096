"""Scores on a HookedTransformer (transformer-lens 3.9)."""

import importlib.util

import pytest

import attnprobe as ap

METHODS = [
    *("SAUQ", "SAUQ-generation", "RAUQ", "RAUQ-paper", "LapEigValRAUQ", "LogDetRAUQ", "AttentionScore"),
    *("Perplexity", "MeanTokenEntropy"),
]
PROMPTS = [[5, 9, 23, 44, 11, 60, 3], [7, 8, 9]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None,
    reason="this transformer-lens has no HookedTransformer",
)


@pytest.fixture(scope="module")
def model():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=3, d_model=32, n_ctx=128, d_head=8, n_heads=4, d_vocab=97, act_fn="gelu", seed=0, device="cpu",
        init_weights=True, initializer_range=0.3, normalization_type="LN", positional_embedding_type="rotary",
        rotary_dim=8,
    )  # fmt: skip
    return HookedTransformer(config).eval()


def test_in_a_batch_alone_and_given(model):
    batch = ap.score(model, PROMPTS, methods=METHODS, max_new_tokens=8)
    given = ap.score(model, PROMPTS, completions=[one.token_ids for one in batch], methods=METHODS)
    for prompt, together, read in zip(PROMPTS, batch, given, strict=True):
        (alone,) = ap.score(model, prompt, methods=METHODS, max_new_tokens=8)
        assert alone.token_ids == together.token_ids
        assert alone.uncertainty == pytest.approx(together.uncertainty, abs=1e-5)
        assert read.uncertainty == pytest.approx(together.uncertainty, abs=1e-5)


def test_under_a_generate_of_ones_own(model):
    import torch

    sauq = ap.SAUQ()
    probe = sauq.probe()
    with probe.attach(model):
        out = model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, stop_at_eos=False, verbose=False
        )
    (expected,) = ap.score(model, PROMPTS[0], max_new_tokens=8)
    assert out[0, len(PROMPTS[0]) :].tolist() == expected.token_ids
    assert sauq.score(probe)[0].uncertainty == pytest.approx(expected.uncertainty["SAUQ"], abs=1e-5)
