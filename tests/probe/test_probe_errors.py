"""What cannot be measured is refused in one clear sentence, and the model is left as it was."""

# The probe is left inside `pytest.raises`, as it is in use: several statements there are the point.
# ruff: noqa: PT012, SIM117

import pytest
import torch
import transformers
from probe.support import FREE, GREEDY, alone, bridge, dropped, fake_tokenizer, padded, scrap, tokens, traces_on
from tiny import tiny_bridge
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import attnprobe as ap


@pytest.fixture
def model():
    model = bridge("llama")
    before = traces_on(model)
    yield model
    after = traces_on(model)
    if after != before:
        scrap()
    assert after == before


def probe(**settings):
    return ap.Probe([ap.IntrinsicTDO(), ap.TransportCapacity()], **settings)


# -- what to watch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["blocks.*.attn.hook_patern", "blocks.*.self_attn.hook_pattern", "encoder_blocks.*.hook_pattern", "nope"]
)
def test_a_pattern_that_matches_nothing_lists_near_misses(model, pattern):
    with pytest.raises(ValueError, match=r"matches none of the 3 pattern hooks.*near it: blocks\.\d\.attn\.hook_pat"):
        probe(pattern=pattern).attach(model)


def test_a_predicate_that_matches_nothing(model):
    with pytest.raises(ValueError, match=r"given predicate matches none.*blocks\.0\.attn\.hook_pattern"):
        probe(pattern=lambda name: False).attach(model)


@pytest.mark.parametrize(("layers", "expected"), [("all", [0, 1, 2]), ("middle", [1, 2]), ([2, 0], [0, 2]), (1, [1])])
def test_layers_are_chosen(model, layers, expected):
    (a,) = tokens(6)
    chosen = probe(layers=layers)
    with chosen.attach(model), torch.no_grad():
        model(a[None])
    ds = chosen.results()
    assert ds.layer.values.tolist() == expected
    whole = alone(model, a, 6, [ap.IntrinsicTDO(), ap.TransportCapacity()])
    torch.testing.assert_close(torch.tensor(ds.phi.values), torch.tensor(whole.phi.sel(layer=expected).values))


@pytest.mark.parametrize("heads", [[0], [3, 1], 2])
def test_heads_are_chosen_with_the_values_they_read(model, heads):
    (a,) = tokens(8)
    numbers = [heads] if isinstance(heads, int) else heads
    analyzers = [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound()]
    chosen = ap.Probe(analyzers, heads=heads)
    with chosen.attach(model), torch.no_grad():
        model.generate(a[None], max_new_tokens=4, **FREE)
    whole = ap.Probe(analyzers)
    with whole.attach(model), torch.no_grad():
        model.generate(a[None], max_new_tokens=4, **FREE)
    ds, all_heads = chosen.results(), whole.results()
    assert ds["head"].values.tolist() == numbers
    for name in ds.data_vars:
        torch.testing.assert_close(
            torch.tensor(ds[name].values), torch.tensor(all_heads[name].sel(head=numbers).values), rtol=1e-5, atol=1e-6
        )


def test_layers_that_are_not_there(model):
    with pytest.raises(ValueError, match=r"layers \[3, 9\] have no attention pattern here.*0 to 2"):
        probe(layers=[1, 3, 9]).attach(model)


def test_heads_that_are_not_there(model):
    chosen = probe(heads=[1, 4])
    with pytest.raises(ValueError, match=r"head 4 was asked for and the model has heads 0 to 3"):
        with chosen.attach(model), torch.no_grad():
            model(tokens(5)[0][None])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layers": "outer"}, "use 'all', 'middle', 'center' or a list"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [-1]}, "counted from 0"),
        ({"heads": "middle"}, "use 'all' or a list"),
        ({"heads": [1, 1]}, "different head numbers"),
        ({"heads": []}, "different head numbers"),
        ({"rows": "ignore"}, "not a row policy.*renormalize"),
    ],
)
def test_wrong_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        probe(**settings)


@pytest.mark.parametrize(
    ("analyzers", "error", "sentence"),
    [
        ([], ValueError, "at least one analyzer"),
        (ap.Asymmetry(), TypeError, r"write Probe\(\[analyzer\]\)"),
        ([ap.Asymmetry], TypeError, r"Asymmetry is a class: write Asymmetry\(\)"),
        (["SAUQ"], TypeError, "no analyzer"),
    ],
)
def test_wrong_analyzers(analyzers, error, sentence):
    with pytest.raises(error, match=sentence):
        ap.Probe(analyzers)


def test_an_analyzer_that_needs_what_no_host_has():
    class Odd(ap.Analyzer):
        needs = ("pattern", "weather")

    with pytest.raises(ValueError, match=r"needs \['weather'\]"):
        ap.Probe([Odd()])


def test_two_analyzers_of_one_name(model):
    twice = ap.Probe([ap.IntrinsicTDO(), ap.TDO("intrinsic")])
    with twice.attach(model), torch.no_grad():
        model(tokens(5)[0][None])
    with pytest.raises(ValueError, match="two analyzers both report 'participation_ratio'"):
        twice.results()


def test_nothing_collected():
    with pytest.raises(ValueError, match="nothing has been collected"):
        probe().results()


def test_prompt_lengths_that_do_not_fit_the_batch(model):
    with pytest.raises(ValueError, match="prompt_lengths has 3 entries and the batch 2"):
        with probe().attach(model, prompt_lengths=[1, 2, 3]), torch.no_grad():
            model(torch.stack(tokens(5, 5)))


# -- the model is used in a way that cannot be followed ----------------------------------------------------


def test_attaching_in_the_middle_of_a_cache(model):
    (a,) = tokens(8)
    with torch.no_grad():
        _, cache = model(a[None, :6], return_type="logits_and_cache", use_cache=True)
        with (
            pytest.raises(
                ValueError, match=r"cache holds 6 tokens and the probe has seen 0.*before the prompt is read"
            ),
            probe().attach(model),
        ):
            model(a[None, 6:7], past_key_values=cache, use_cache=True)


def test_a_cache_that_was_cropped(model):
    (a,) = tokens(8)
    with torch.no_grad(), pytest.raises(ValueError, match="cache holds 4 tokens and the probe has seen 6"):
        with probe().attach(model):
            _, cache = model(a[None, :6], return_type="logits_and_cache", use_cache=True)
            cache.crop(-2)  # not a positive number: gone from transformers
            model(a[None, 4:5], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_a_left_padded_batch_without_its_mask(model, monkeypatch, how):
    monkeypatch.setattr(model, "tokenizer", fake_tokenizer())
    ids, _ = padded(tokens(9, 5), "left")
    with pytest.raises(ValueError, match="looks padded with token 0 and no attention_mask"):
        with probe().attach(model), torch.no_grad():
            model(ids) if how == "forward" else model.generate(ids, max_new_tokens=2, **FREE)


def test_a_right_padded_batch_without_its_mask(model, monkeypatch):
    monkeypatch.setattr(model, "tokenizer", fake_tokenizer())
    ids, _ = padded(tokens(9, 5), "right")
    with pytest.raises(ValueError, match="looks padded with token 0 and no attention_mask"):
        with probe().attach(model), torch.no_grad():
            model(ids)


def test_a_batch_that_shares_its_last_token_is_no_padded_batch(model, monkeypatch):
    """SmolLM's padding id also ends chat turns: one of them at the end is text."""
    monkeypatch.setattr(model, "tokenizer", fake_tokenizer(pad_token_id=7))
    a, b = tokens(6, 6)
    a[-1] = b[-1] = a[2] = 7
    watched = probe()
    with watched.attach(model), torch.no_grad():
        model(torch.stack([a, b]))
    assert watched.results().length.values.tolist() == [6, 6]


def test_a_mask_that_is_lost_midway(model):
    ids, mask = padded(tokens(6, 4), "left")
    with pytest.raises(ValueError, match=r"came with an attention mask and this forward without.*past ones included"):
        with probe().attach(model), torch.no_grad():
            _, cache = model(ids, attention_mask=mask, return_type="logits_and_cache", use_cache=True)
            model(ids[:, :1], past_key_values=cache, use_cache=True)


def test_a_mask_of_another_shape(model):
    (a,) = tokens(6)
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
    with pytest.raises(ValueError, match=r"mask of shape \(1, 1, 6, 6\) does not say which tokens are padding"):
        with probe().attach(model), torch.no_grad():
            model(a[None], attention_mask=mask)


def test_a_mask_that_leaves_nothing(model):
    (a,) = tokens(6)
    with pytest.raises(ValueError, match="no token at all"), probe().attach(model), torch.no_grad():
        model(a[None], attention_mask=torch.zeros(1, 6).long())


@pytest.mark.parametrize("how", ["generate", "hf_generate"])
def test_beams_are_refused(model, monkeypatch, how):
    monkeypatch.setattr(model, "tokenizer", fake_tokenizer())
    with pytest.raises(ValueError, match=r"beam search .*reorders.*num_beams=1"):
        with probe().attach(model), torch.no_grad():
            getattr(model, how)(tokens(5)[0][None], max_new_tokens=2, num_beams=2, do_sample=False)


def test_embeddings_instead_of_tokens(model):
    """Patterns need no tokens; probabilities of tokens and measures over tokens do."""
    (a,) = tokens(6)
    with torch.no_grad():
        embeddings = model.original_model.get_input_embeddings()(a[None])
        whole = alone(model, a, 6, [ap.IntrinsicTDO()])
        watched = ap.Probe([ap.IntrinsicTDO()])
        with watched.attach(model):
            model.original_model(inputs_embeds=embeddings)
        torch.testing.assert_close(
            torch.tensor(watched.results().participation_ratio.values), torch.tensor(whole.participation_ratio.values)
        )
        with pytest.raises(ValueError, match="token ids"), ap.Probe([ap.TDO("zipf")]).attach(model):
            model.original_model(inputs_embeds=embeddings)
        with pytest.raises(ValueError, match="token ids"):
            with ap.Probe([ap.IntrinsicTDO()], logits=True).attach(model):
                model.original_model(inputs_embeds=embeddings)


# -- hooks that do not fire --------------------------------------------------------------------------------


def test_a_delegated_architecture_switched_to_sdpa():
    bert = tiny_bridge("bert")
    (a,) = tokens(6)
    watched = probe()
    with watched.attach(bert), torch.no_grad():
        bert(a[None])
    before = traces_on(bert)
    bert.original_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"3 of 3 watched sites did not report.*blocks.0.attn.*sdpa.*eager"):
        with watched.attach(bert), torch.no_grad():
            bert(a[None])
    assert traces_on(bert) == before
    bert.original_model.set_attn_implementation("eager")
    with watched.attach(bert), torch.no_grad():
        bert(a[None])
    assert watched.results().length.values.tolist() == [6, 6]


def test_hooks_that_are_taken_from_under_us(model):
    (a,) = tokens(6)
    watched = probe()
    with torch.no_grad(), pytest.raises(ValueError, match="3 of 3 watched sites did not report"):
        with watched.attach(model):
            model(a[None])
            model.reset_hooks(including_permanent=True)
            model(a[None])
    with watched.attach(model), torch.no_grad():
        model(a[None])
    assert watched.results().length.values[-1] == 6


def test_one_hook_of_several_is_named(model):
    (a,) = tokens(6)
    with torch.no_grad(), pytest.raises(ValueError, match=r"1 of 3 watched sites.*blocks.1.attn \(missing: z\)"):
        with ap.Probe([ap.SpectralEntropyBound()]).attach(model):
            model.hook_dict["blocks.1.attn.hook_z"].remove_hooks("fwd", including_permanent=True)
            model(a[None])


# -- rows that are no distributions ------------------------------------------------------------------------


def test_dropout_of_train_mode():
    model = tiny_bridge("gpt2", attn_pdrop=0.5)
    (a,) = tokens(16)
    model.train()
    before = traces_on(model)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"blocks.0.attn, head \d, sequence 0, the row of position \d+.*dropout"):
        with probe().attach(model), torch.no_grad():
            model(a[None])
    assert traces_on(model) == before
    model.eval()
    watched = probe()
    with watched.attach(model), torch.no_grad():
        model(a[None])
    assert watched.results().length.values.tolist() == [16]


@pytest.mark.parametrize("value", [float("nan"), -0.5], ids=["NaN", "negative"])
@pytest.mark.parametrize("rows", ["error", "renormalize", "sink"])
def test_a_row_that_holds_no_numbers_names_its_head_and_place(model, value, rows):
    a, b = tokens(7, 5)
    ids, mask = padded([a, b], "left")

    def spoil(pattern, hook):
        pattern = pattern.clone()
        pattern[1, 2, 5, 3] = value  # sequence 1 is padded by two: slot 5 is position 3
        return pattern

    with pytest.raises(ValueError, match=r"blocks.1.attn, head 2, sequence 1, the row of position 3 holds NaN, a neg"):
        watched = ap.Probe([ap.IntrinsicTDO()], rows=rows)
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", spoil)]), watched.attach(model), torch.no_grad():
            model(ids, attention_mask=mask)


def test_the_head_of_the_sentence_is_that_of_the_model(model):
    (a,) = tokens(7)

    def spoil(pattern, hook):
        pattern = pattern.clone()
        pattern[0, 3, 4] *= 0.5
        return pattern

    with pytest.raises(ValueError, match=r"head 3, sequence 0, the row of position 4 does not sum to 1 \(off by 0.5\)"):
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", spoil)]):
            with probe(heads=[1, 3]).attach(model), torch.no_grad():
                model(a[None])


def test_padding_may_hold_anything(model):
    a, b = tokens(7, 5)
    ids, mask = padded([a, b], "left")

    def spoil(pattern, hook):
        pattern = pattern.clone()
        pattern[1, :, :2] = float("nan")
        return pattern

    watched = probe()
    with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", spoil)]), watched.attach(model):
        model(ids, attention_mask=mask)
    ds = watched.results()
    expected = alone(model, b, 5, [ap.IntrinsicTDO(), ap.TransportCapacity()])
    torch.testing.assert_close(torch.tensor(ds.phi.values[1:]), torch.tensor(expected.phi.values), rtol=1e-5, atol=1e-5)


def test_a_wrong_row_of_a_decode_step_is_found_too(model):
    (a,) = tokens(5)
    count = []

    def spoil(pattern, hook):
        count.append(1)
        return pattern * 0.5 if len(count) == 3 else None

    with pytest.raises(ValueError, match="row of position 6 does not sum to 1"):
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", spoil)]):
            watched = probe()
            with watched.attach(model):
                model.generate(a[None], max_new_tokens=5, **FREE)
            watched.results()


# -- the cache that stays empty (transformers 5.24) --------------------------------------------------------

VERSIONS = r"decode step sees one key only.*transformers 5\.24.*transformer-lens.*'transformers>=5\.9,<5\.24'"


class Forgetful(HookedRootModule):
    """Decodes token by token and forgets everything before each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"hook_pattern": HookPoint()})})])
        self.setup()

    def forward(self, tokens, attention_mask=None):
        n = tokens.shape[1]
        pattern = torch.ones(len(tokens), 1, n, n).tril()
        self.blocks[0]["attn"]["hook_pattern"](pattern / pattern.sum(-1, keepdim=True))
        return torch.zeros(len(tokens), n, 9)

    def generate(self, tokens, max_new_tokens=3):
        for step in range(max_new_tokens):
            self(tokens if step == 0 else tokens[:, -1:])
            tokens = torch.cat([tokens, tokens[:, -1:] + 1], 1)
        return tokens


@pytest.mark.parametrize("prompt", [1, 5])
def test_a_stub_whose_cache_stays_empty(prompt):
    model = Forgetful()
    with pytest.raises(ValueError, match=VERSIONS), probe().attach(model):
        model.generate(torch.arange(prompt)[None])
    assert not model.hook_dict["blocks.0.attn.hook_pattern"].fwd_hooks
    assert "generate" not in vars(model)


@pytest.fixture
def empty_cache(monkeypatch):
    def update(self, key_states, value_states, layer_idx=0, *args, **kwargs):
        return key_states, value_states

    monkeypatch.setattr(transformers.DynamicCache, "update", update)


@pytest.mark.parametrize("padding", [False, True])
def test_a_bridge_whose_cache_stays_empty(model, empty_cache, padding):
    ids, mask = padded(tokens(6, 4) if padding else tokens(6), "left")
    with pytest.raises(ValueError, match=VERSIONS), probe().attach(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, **FREE)


def test_a_bridge_decoded_by_hand_whose_cache_stays_empty(model, empty_cache):
    (a,) = tokens(6)
    with torch.no_grad(), pytest.raises(ValueError, match=VERSIONS), probe().attach(model):
        _, cache = model(a[None, :5], return_type="logits_and_cache", use_cache=True)
        model(a[None, 5:], attention_mask=torch.ones(1, 6).long(), past_key_values=cache, use_cache=True)


def test_a_single_token_is_no_empty_cache(model):
    """One token on one key is right where nothing came before."""
    watched = probe()
    with watched.attach(model), torch.no_grad():
        for _ in range(2):
            model(torch.tensor([[5]]), attention_mask=torch.ones(1, 1).long())
        model.generate(torch.tensor([[5]]), max_new_tokens=1, eos_token_id=2, **GREEDY)
    ds = watched.results()
    assert ds.length.values.tolist() == [1, 1, 1]
    assert (ds.participation_ratio == 1).all()
    assert ds.phi.isnull().all()


def test_dropping_is_said(model):
    """A forward that raised while the probe stays: its sequences are gone, in words."""
    (a,) = tokens(6)

    def boom(value, hook):
        raise RuntimeError("boom")

    watched = probe()
    with torch.no_grad(), watched.attach(model):
        with pytest.raises(RuntimeError), model.hooks(fwd_hooks=[("blocks.2.attn.hook_z", boom)]):
            model(a[None])
        with dropped():
            model(a[None])
    assert watched.results().length.values.tolist() == [6]


def test_a_sequence_of_padding_alone_is_named(model):
    tokens = torch.randint(3, 97, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    probe = ap.Probe([ap.TransportCapacity()])
    with probe.attach(model):
        model(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match="sequence 1 of the batch without a token"):
        probe.results()
