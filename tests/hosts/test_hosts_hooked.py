"""HookedTransformer (transformer-lens 3.9) and hooked modules of one's own."""

# ruff: noqa: PT012, PT031

import importlib.util

import pytest
import torch
from hosts.capture import Capture, assert_pattern, whole
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import attnprobe as ap

N_LAYERS = 3
GREEDY = {"do_sample": False, "verbose": False, "stop_at_eos": False}
needs_hooked_transformer = pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None,
    reason="this transformer-lens has no HookedTransformer",
)
FIVE = (ap.IntrinsicTDO, ap.MeanRoutingSplit, ap.SpectralEntropyBound, ap.TransportCapacity, ap.Asymmetry)


@pytest.fixture(scope="module", params=["standard", "rotary", "grouped", "local"])
def model(request):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    changes = {
        "standard": {},
        "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 8},
        "grouped": {"positional_embedding_type": "rotary", "rotary_dim": 8, "n_key_value_heads": 2},
        "local": {
            "positional_embedding_type": "rotary",
            "rotary_dim": 8,
            "use_local_attn": True,
            "window_size": 5,
            "attn_types": ["global", "local", "global"],
        },
    }[request.param]
    config = HookedTransformerConfig(
        n_layers=N_LAYERS,
        d_model=32,
        d_head=8,
        n_heads=4,
        d_mlp=48,
        n_ctx=64,
        d_vocab=97,
        act_fn="gelu",
        init_weights=True,
        seed=3,
        initializer_range=0.3,
        device="cpu",
        **changes,
    )
    return HookedTransformer(config).eval()


def cached_generate_is_right(model):
    # transformer-lens 3.9.0 adds the position offset to tokens that already have their positions: its cached generate
    # gives other tokens than the one without a cache when positions are absolute
    return model.cfg.positional_embedding_type == "rotary"


def own(model, tokens):
    """[layer][head, n, n] of one sequence from run_with_cache."""
    _, cache = model.run_with_cache(tokens[None].clone())
    return [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(N_LAYERS)]


def ids(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def padded(sequences, side):
    width = max(map(len, sequences))
    tokens, mask = torch.zeros(len(sequences), width).long(), torch.zeros(len(sequences), width).long()
    for i, sequence in enumerate(sequences):
        where = slice(width - len(sequence), None) if side == "left" else slice(len(sequence))
        tokens[i, where], mask[i, where] = sequence, 1
    return tokens, mask


def check(model, capture, sequences, call=0):
    for layer, chunks in enumerate(capture.sites(call, N_LAYERS)):
        found = whole(chunks)
        for i, sequence in enumerate(sequences):
            assert_pattern(found[i], own(model, sequence)[layer])


@needs_hooked_transformer
def test_forward(model):
    sequences = ids(20, 20)
    probe = ap.Probe([capture := Capture()])
    with probe.attach(model):
        model(torch.stack(sequences))
    probe.results()
    check(model, capture, sequences)


@needs_hooked_transformer
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_generate(model, use_cache, batch):
    if use_cache and not cached_generate_is_right(model):
        pytest.skip("the host's cached generate is wrong with absolute positions")
    prompts = ids(*[9] * batch)
    probe = ap.Probe([capture := Capture()])
    with probe.attach(model):
        output = model.generate(torch.stack(prompts), max_new_tokens=9, use_past_kv_cache=use_cache, **GREEDY)
    probe.results()
    assert output.shape == (batch, 18)
    check(model, capture, [row[:-1] for row in output])


@needs_hooked_transformer
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_with_a_mask(model, side):
    sequences = ids(12, 4, 9)
    tokens, mask = padded(sequences, side)
    probe = ap.Probe([capture := Capture()])
    with probe.attach(model):
        model(tokens, attention_mask=mask, padding_side=side)
    probe.results()
    check(model, capture, sequences)


@needs_hooked_transformer
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_analyzer_gives_a_batch_the_numbers_of_its_sequences(model, side):
    sequences = ids(12, 4, 9)
    tokens, mask = padded(sequences, side)
    probe = ap.Probe([kind() for kind in FIVE])
    with probe.attach(model):
        model(tokens, attention_mask=mask, padding_side=side)
        for sequence in sequences:
            model(sequence[None])
    ds = probe.results()
    assert ds.sizes["sequence"] == 6
    for name in ds.data_vars:
        torch.testing.assert_close(
            torch.tensor(ds[name].values[:3]), torch.tensor(ds[name].values[3:]), rtol=1e-4, atol=1e-5
        )


@needs_hooked_transformer
def test_cached_generation_gives_the_numbers_of_the_finished_text(model):
    (prompt,) = ids(9)
    probe = ap.Probe([ap.IntrinsicTDO(trace=True), ap.Asymmetry(trace=True), ap.TransportCapacity(trace=True)])
    with probe.attach(model):
        cached = cached_generate_is_right(model)
        output = model.generate(prompt[None], max_new_tokens=6, use_past_kv_cache=cached, **GREEDY)
        model.generate(prompt[None], max_new_tokens=6, use_past_kv_cache=False, **GREEDY)
    with probe.attach(model, prompt_lengths=9):
        model(output[:, :-1].clone())
    ds = probe.results()
    assert ds.sizes["sequence"] == 3
    assert ds.sizes["step"] == 6
    for name in ds.data_vars:
        values = torch.tensor(ds[name].values)
        assert not values.isnan().any()
        torch.testing.assert_close(values[:2], values[2:].expand_as(values[:2]), rtol=1e-4, atol=1e-5)


@needs_hooked_transformer
def test_a_prompt_in_cached_chunks(model):
    from transformer_lens import TransformerLensKeyValueCache

    (tokens,) = ids(14)
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, 1)
    probe = ap.Probe([capture := Capture()])
    with probe.attach(model):
        for low, high in ((0, 5), (5, 9), (9, 14)):
            mask = torch.ones(1, high - low).long()  # this host wants one where it has no tokenizer
            model(tokens[None, low:high], past_kv_cache=cache, attention_mask=mask)
    ds = probe.results()
    assert ds.length.values.tolist() == [14]
    check(model, capture, [tokens])


@needs_hooked_transformer
def test_a_padded_batch_decoded_by_hand(model):
    from transformer_lens import TransformerLensKeyValueCache

    sequences = ids(12, 7)
    tokens, mask = padded([sequence[:-3] for sequence in sequences], "left")
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, 2)
    probe = ap.Probe([capture := Capture()])
    with probe.attach(model):
        model(tokens, attention_mask=mask, past_kv_cache=cache)
        for back in (3, 2, 1):
            token = torch.stack([sequence[-back] for sequence in sequences])[:, None]
            model(token, past_kv_cache=cache, attention_mask=torch.ones_like(token))
    probe.results()
    check(model, capture, sequences)


@needs_hooked_transformer
def test_token_probabilities(model):
    (prompt,) = ids(6)
    probe = ap.Probe([ap.SelfAttention()], logits=True)
    with probe.attach(model):
        cached = cached_generate_is_right(model)
        output = model.generate(prompt[None], max_new_tokens=5, use_past_kv_cache=cached, **GREEDY)
    ds = probe.results()
    log_probability = model(output.clone()).log_softmax(-1)[0, 5:-1]
    expected = log_probability.gather(-1, output.clone()[0, 6:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ds.token_log_probability.values[0]), expected, rtol=1e-4, atol=1e-4)
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    torch.testing.assert_close(torch.tensor(ds.token_entropy.values[0]), entropy, rtol=1e-4, atol=1e-4)


@needs_hooked_transformer
def test_the_probe_survives_reset_hooks_contexts_and_run_with_cache(model):
    (tokens,) = ids(8)
    probe = ap.Probe([ap.IntrinsicTDO()])
    with probe.attach(model):
        model.reset_hooks()
        model(tokens[None])
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: None)]):
            model(tokens[None])
        model.run_with_cache(tokens[None])
        model.run_with_hooks(tokens[None], fwd_hooks=[("blocks.1.attn.hook_z", lambda value, hook: None)])
    ds = probe.results()
    assert ds.sizes["sequence"] == 4
    values = torch.tensor(ds.participation_ratio.values)
    torch.testing.assert_close(values, values[:1].expand_as(values))
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@needs_hooked_transformer
def test_nothing_is_left_on_the_model(model):
    def handles():
        return [
            (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(set(vars(m)) - {"training"}))
            for m in model.modules()
        ]

    before = handles()
    (tokens,) = ids(8)
    probe = ap.Probe([kind() for kind in FIVE], logits=True)
    with probe.attach(model):
        assert handles() != before
        model.generate(tokens[None], max_new_tokens=2, **GREEDY)
    assert handles() == before


@needs_hooked_transformer
def test_a_forward_that_stops_early_says_so(model):
    (tokens,) = ids(8)
    probe = ap.Probe([ap.IntrinsicTDO()])
    with pytest.warns(UserWarning, match="dropped from the results"), probe.attach(model):
        model(tokens[None], stop_at_layer=2)
        model(tokens[None])
    assert probe.results().sizes["sequence"] == 1


# -- a hooked module of one's own --------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook_pattern = HookPoint()
        self.hook_v = HookPoint()
        self.hook_z = HookPoint()

    def forward(self, x, mask):
        n = x.shape[1]
        allowed = torch.ones(n, n, dtype=torch.bool).tril()
        if mask is not None:
            allowed = allowed & mask[:, None, :].bool()
        scores = (x @ x.mT).masked_fill(~allowed, -1e9)
        pattern = self.hook_pattern(scores.softmax(-1).unsqueeze(1))
        v = self.hook_v(x.unsqueeze(2))
        return self.hook_z((pattern @ v.transpose(1, 2)).transpose(1, 2))[:, :, 0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x, mask):
        return x + self.attn(x, mask)


class Own(HookedRootModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.setup()

    def forward(self, tokens, attention_mask=None):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, attention_mask)
        return x


def test_a_module_with_nothing_but_the_hooks():
    model = Own()
    (tokens,) = (torch.arange(7),)
    probe = ap.Probe([capture := Capture(), *(kind() for kind in FIVE)])
    with probe.attach(model), torch.no_grad():
        model(tokens[None])
    ds = probe.results()
    _, cache = model.run_with_cache(tokens[None])
    for layer, found in enumerate(capture.patterns(2)):
        expected = cache[f"blocks.{layer}.attn.hook_pattern"][0].detach()
        assert_pattern(found[0], expected)
        ratio = ap.functional.participation_ratio(expected.double())
        assert float(ds.participation_ratio.sel(layer=layer)[0, 0]) == pytest.approx(float(ratio), rel=1e-5)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_the_mask_of_a_module_is_read_where_it_is_given():
    model = Own()
    sequences = [torch.arange(7), torch.arange(5, 9)]
    tokens, mask = padded(sequences, "left")
    probe = ap.Probe([kind() for kind in FIVE])
    with probe.attach(model), torch.no_grad():
        model(tokens, attention_mask=mask)
        for sequence in sequences:
            model(sequence[None])
    ds = probe.results()
    assert ds.length.values.tolist() == [7, 4, 7, 4]
    for name in ds.data_vars:
        torch.testing.assert_close(
            torch.tensor(ds[name].values[:2]), torch.tensor(ds[name].values[2:]), rtol=1e-5, atol=1e-5
        )


def test_a_model_without_hooks_is_refused():
    with pytest.raises(TypeError, match=r"hook_dict.*Linear is neither"):
        ap.Probe([ap.IntrinsicTDO()]).attach(nn.Linear(2, 2))


def test_a_hooked_module_without_attention_is_refused():
    class Plain(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.hook_out = HookPoint()
            self.setup()

    with pytest.raises(ValueError, match="no attention pattern hook"):
        ap.Probe([ap.IntrinsicTDO()]).attach(Plain())


class Renamed(Own):
    """A hook_z that is not the pattern times the values, or a pattern of the wrong shape."""

    def __init__(self, change):
        super().__init__()
        for block in self.blocks:
            block.attn.change = change
            block.attn.forward = lambda x, mask, attn=block.attn: self._changed(attn, x)

    @staticmethod
    def _changed(attn, x):
        pattern = torch.ones(len(x), 1, x.shape[1], x.shape[1]).tril()
        pattern = pattern / pattern.sum(-1, keepdim=True)
        v = x.unsqueeze(2)
        z = (pattern @ v.transpose(1, 2)).transpose(1, 2)
        if attn.change == "gate":
            z = z * 3
        if attn.change == "shape":
            pattern = pattern[:, 0]
        if attn.change == "heads":
            z = z.transpose(1, 2)
        attn.hook_pattern(pattern)
        attn.hook_v(v)
        return attn.hook_z(z).reshape(x.shape)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("gate", "the output z of blocks.0.attn is not the pattern times the values"),
        ("shape", r"blocks.0.attn gives a pattern of shape \(1, 6, 6\)"),
        ("heads", r"hook of z at blocks.0.attn gives shape \(1, 1, 6, 4\), not \[1, 6, 1, d\]"),
    ],
)
def test_a_hook_that_is_not_what_its_name_says(change, sentence):
    model = Renamed(change)
    probe = ap.Probe([ap.MeanRoutingSplit()])
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        try:
            probe.attach(model)
            model(torch.arange(6)[None])
        finally:
            with pytest.warns(UserWarning, match="dropped") if probe._streams else nothing():
                probe.detach()
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def nothing():
    import contextlib

    return contextlib.nullcontext()
