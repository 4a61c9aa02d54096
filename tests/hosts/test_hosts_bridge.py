"""What a probe sees on a TransformerBridge is what transformers itself computes."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from hosts.capture import Capture, assert_pattern, whole
from tiny import VOCAB, tiny_bridge, tiny_model

import attnprobe as ap

DECODERS = ["gpt2", "llama", "mistral", "gemma2", "qwen2", "neox"]
N_LAYERS = 3
GREEDY = {"do_sample": False, "verbose": False, "stop_at_eos": False}
_models = {}


def dropped():
    """Leaving a probe after a forward that raised part way says that its sequences are gone."""
    return pytest.warns(UserWarning, match="dropped from the results")


def pair(name):
    """The bridge and transformers' own model of the same weights."""
    if name not in _models:
        _models[name] = tiny_bridge(name), tiny_model(name)
    return _models[name]


def tokens(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def padded(sequences, side):
    width = max(map(len, sequences))
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.int64), torch.zeros(len(sequences), width).long()
    for i, sequence in enumerate(sequences):
        where = slice(width - len(sequence), None) if side == "left" else slice(len(sequence))
        ids[i, where], mask[i, where] = sequence, 1
    return ids, mask


def own_attentions(name, sequence):
    """[layer][head, n, n] of one sequence, by transformers' eager attention."""
    with torch.no_grad():
        attentions = pair(name)[1](sequence[None], output_attentions=True).attentions
    assert len(attentions) == N_LAYERS
    return [a[0] for a in attentions]


def watch(name, rows="error", call=None, needs=()):
    bridge, _ = pair(name)
    capture = Capture(*needs)
    probe = ap.Probe([capture], rows=rows)
    with probe.attach(bridge), torch.no_grad():
        output = call(bridge)
    probe.results()
    return capture, output


@pytest.mark.parametrize("name", DECODERS)
def test_a_plain_forward(name):
    sequences = torch.stack(tokens(24, 24))
    capture, _ = watch(name, call=lambda m: m(sequences))
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        for i, sequence in enumerate(sequences):
            assert_pattern(found[i], own_attentions(name, sequence)[layer])


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_the_sliding_window_is_there_at_all(name):
    (sequence,) = tokens(24)
    attentions = own_attentions(name, sequence)
    windowed = [a for a in attentions if (a[:, 23, :19] == 0).all()]
    assert windowed, "no layer of this model slides"
    if name == "gemma2":
        assert len(windowed) < N_LAYERS


@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_a_cache(name):
    (prompt,) = tokens(9)
    capture, output = watch(name, call=lambda m: m.generate(prompt[None], max_new_tokens=16, **GREEDY))
    assert output.shape == (1, 25)
    expected = own_attentions(name, output[0, :-1])
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0], expected[layer])


@pytest.mark.parametrize("name", DECODERS)
def test_generate_token_by_token_from_a_single_token(name):
    (prompt,) = tokens(1)
    capture, output = watch(name, call=lambda m: m.generate(prompt[None], max_new_tokens=12, **GREEDY))
    expected = own_attentions(name, output[0, :-1])
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0], expected[layer])


@pytest.mark.parametrize("name", DECODERS)
def test_generate_without_a_cache(name):
    (prompt,) = tokens(9)
    capture, output = watch(
        name, call=lambda m: m.generate(prompt[None], max_new_tokens=6, use_past_kv_cache=False, **GREEDY)
    )
    expected = own_attentions(name, output[0, :-1])
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0], expected[layer])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_forward(name, side):
    sequences = tokens(21, 4, 12)
    ids, mask = padded(sequences, side)
    # absolute positions are the caller's business under left padding
    extra = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if side == "left" else {}
    capture, _ = watch(name, call=lambda m: m(ids, attention_mask=mask, **extra))
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        for i, sequence in enumerate(sequences):
            assert_pattern(found[i], own_attentions(name, sequence)[layer])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_generate(name, use_cache):
    prompts = tokens(11, 3, 7)
    ids, mask = padded(prompts, "left")
    capture, output = watch(
        name,
        call=lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=10, use_past_kv_cache=use_cache, **GREEDY),
    )
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        for i, prompt in enumerate(prompts):
            finished = torch.cat([prompt, output[i, ids.shape[1] : -1]])
            assert_pattern(found[i], own_attentions(name, finished)[layer])


@pytest.mark.parametrize("name", DECODERS)
def test_hf_generate(name, monkeypatch):
    (prompt,) = tokens(9)
    monkeypatch.setattr(pair(name)[0], "tokenizer", SimpleNamespace(eos_token_id=2, pad_token_id=0))
    capture, output = watch(
        name,
        call=lambda m: m.hf_generate(
            prompt[None], max_new_tokens=8, do_sample=False, stop_at_eos=False, return_type="tokens"
        ),
    )
    finished = getattr(output, "sequences", output)[0]
    expected = own_attentions(name, finished[:-1])
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0], expected[layer])


@pytest.mark.parametrize("name", DECODERS)
def test_outputs_are_the_pattern_times_the_values(name):
    """The parts of a row fit together: z, v by key/value head, key positions, tokens; scores give the pattern."""
    prompts = tokens(8, 5)
    ids, mask = padded(prompts, "left")
    capture, output = watch(
        name,
        needs=("z", "v", "q", "k", "scores", "tokens"),
        call=lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=5, **GREEDY),
    )
    for chunks in capture.sites(0, N_LAYERS):
        patterns = whole(chunks)
        scores = whole(chunks, "scores")
        for i, prompt in enumerate(prompts):
            n = len(prompt) + 4
            values = torch.full((n, *chunks[0].v.shape[2:]), torch.nan)
            outputs = torch.full((n, *chunks[0].z.shape[2:]), torch.nan)
            for rows in chunks:
                assert rows.q.shape == rows.z.shape
                assert rows.k.shape == rows.v.shape
                for j in range(rows.n_query):
                    if rows.position[i, j] >= 0:
                        values[rows.key_position[i, j]] = rows.v[i, j]
                        outputs[rows.position[i, j]] = rows.z[i, j]
            expanded = values[:, chunks[0].kv_head]
            torch.testing.assert_close(
                torch.einsum("hqk,khd->qhd", patterns[i, :, :n, :n], expanded), outputs, rtol=1e-4, atol=1e-5
            )
            finished = torch.cat([prompt, output[i, 8:]])
            assert chunks[-1].tokens[i, :n].tolist() == finished[:n].tolist()
            assert (chunks[-1].tokens[i, n:] == -1).all()
            allowed = patterns[i, :, :n, :n] > 0
            again = torch.where(allowed, scores[i, :, :n, :n], -torch.inf).softmax(-1)
            torch.testing.assert_close(again, patterns[i, :, :n, :n], rtol=0, atol=1e-5)


# -- a softmax with a sink ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["renormalize", "sink"])
@pytest.mark.parametrize("how", ["forward", "generate", "padded generate"])
def test_gpt_oss(rows, how):
    prompts = tokens(20, 6) if how == "padded generate" else tokens(20)
    ids, mask = padded(prompts, "left")
    new = 0 if how == "forward" else 6

    def call(model):
        if not new:
            return ids
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, **GREEDY)

    def both(model):
        return model(ids) if not new else call(model)

    capture, output = watch("gpt_oss", rows=rows, call=both)
    if not new:
        output = ids
    for layer, chunks in enumerate(capture.sites(0, N_LAYERS)):
        found = whole(chunks)
        for i, prompt in enumerate(prompts):
            generated = output[i, ids.shape[1] : -1] if new else prompt[:0]
            own = own_attentions("gpt_oss", torch.cat([prompt, generated]))[layer]
            sums = own.sum(-1, keepdim=True)
            assert float(sums.min()) < 0.95, "this model should have a sink"
            if rows == "renormalize":
                assert chunks[0].sink is None
                assert_pattern(found[i], own / sums)
                continue
            assert_pattern(found[i], own)
            for chunk in chunks:
                for j in range(chunk.n_query):
                    at = int(chunk.position[i, j])
                    if at >= 0:
                        torch.testing.assert_close(chunk.sink[i, :, j], 1 - sums[:, at, 0], rtol=0, atol=1e-5)


def test_gpt_oss_without_a_policy_is_an_error_that_names_them():
    (prompt,) = tokens(12)
    bridge, _ = pair("gpt_oss")
    probe = ap.Probe([ap.IntrinsicTDO()])
    with (
        dropped(),
        probe.attach(bridge),
        pytest.raises(ValueError, match=r"blocks.0.attn, head \d.*rows='renormalize'"),
    ):
        bridge(prompt[None])


def test_gpt_oss_with_every_analyzer():
    (prompt,) = tokens(16)
    bridge, _model = pair("gpt_oss")
    probe = ap.Probe(
        [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound(), ap.TransportCapacity(), ap.Asymmetry()],
        rows="renormalize",
    )
    with probe.attach(bridge), torch.no_grad():
        bridge(prompt[None])
    ds = probe.results()
    for layer, own in enumerate(own_attentions("gpt_oss", prompt)):
        own = own.double()
        expected = ap.functional.participation_ratio(own, rows="renormalize")
        torch.testing.assert_close(
            torch.tensor(ds.participation_ratio.values[0, layer]).double(), expected, rtol=0, atol=1e-5
        )
        expected = ap.functional.asymmetry(own, rows="renormalize")
        torch.testing.assert_close(torch.tensor(ds.asymmetry.values[0, layer]).double(), expected, rtol=0, atol=1e-5)


# -- encoders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert(side):
    sequences = tokens(14, 14) if side == "none" else tokens(14, 5, 9)
    ids, mask = padded(sequences, "left" if side == "left" else "right")
    given = {} if side == "none" else {"attention_mask": mask}
    if side == "left":
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    capture, _ = watch("bert", call=lambda m: m(ids, **given))
    for layer, chunks in enumerate(capture.sites(0, N_LAYERS)):
        assert not chunks[0].causal
        assert chunks[0].self_attention
        for i, sequence in enumerate(sequences):
            expected = own_attentions("bert", sequence)[layer]
            assert float(expected.triu(1).sum()) > 1
            assert_pattern(whole(chunks)[i], expected)


def test_bert_with_every_analyzer_in_a_padded_batch():
    sequences = tokens(14, 5, 9)
    ids, mask = padded(sequences, "right")
    bridge, _ = pair("bert")
    probe = ap.Probe(
        [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound(), ap.TransportCapacity(), ap.Asymmetry()]
    )
    with probe.attach(bridge), torch.no_grad():
        bridge(ids, attention_mask=mask)
        for sequence in sequences:
            bridge(sequence[None])
    ds = probe.results()
    assert ds.sizes["sequence"] == 6
    for name in ds.data_vars:
        torch.testing.assert_close(
            torch.tensor(ds[name].values[:3]), torch.tensor(ds[name].values[3:]), rtol=1e-5, atol=1e-5
        )
    for i, sequence in enumerate(sequences):
        for layer, own in enumerate(own_attentions("bert", sequence)):
            phi = ap.functional.prefix_capacity(own.double()).phi
            torch.testing.assert_close(torch.tensor(ds.phi.values[i, layer]).double(), phi, rtol=0, atol=1e-5)
            split = ap.functional.hodge_split(own.double())
            torch.testing.assert_close(
                torch.tensor(ds.asymmetry_curl.values[i, layer]).double(), split.curl, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("kind", [ap.IntrinsicTDO, ap.TransportCapacity, ap.Asymmetry])
def test_bert_with_a_trace_gives_final_values_all_the_same(kind):
    """An encoder takes no steps; asking for a trace must not break what can be had."""
    sequences = tokens(14, 5)
    ids, mask = padded(sequences, "right")
    bridge, _ = pair("bert")
    datasets = []
    for trace in (False, True):
        probe = ap.Probe([kind(trace=trace), ap.Asymmetry() if kind is not ap.Asymmetry else ap.IntrinsicTDO()])
        with probe.attach(bridge), torch.no_grad():
            bridge(ids, attention_mask=mask)
        datasets.append(probe.results())
    for name in datasets[0].data_vars:
        torch.testing.assert_close(
            torch.tensor(datasets[1][name].values), torch.tensor(datasets[0][name].values), rtol=1e-5, atol=1e-6
        )


# -- encoder and decoder -----------------------------------------------------------------------------------

needs_t5 = pytest.mark.skipif(
    version("transformer_lens").startswith("3."),
    reason="the T5 bridge of transformer-lens 3.9 cannot run under transformers 5.23 (too many values to unpack)",
)
T5 = {
    "encoder": "encoder_blocks.*.attn.hook_pattern",
    "decoder": "decoder_blocks.*.self_attn.hook_pattern",
    "cross": "decoder_blocks.*.cross_attn.hook_pattern",
}


def t5_attentions(source, target):
    with torch.no_grad():
        output = pair("t5")[1](input_ids=source[None], decoder_input_ids=target[None], output_attentions=True)
    return {
        "encoder": output.encoder_attentions,
        "decoder": output.decoder_attentions,
        "cross": output.cross_attentions,
    }


@needs_t5
@pytest.mark.parametrize("lengths", [(9, 9), (9, 5)])
@pytest.mark.parametrize("which", list(T5))
def test_t5_forward(which, lengths):
    sources, targets = tokens(*lengths), tokens(6, 6, seed=1)
    ids, mask = padded(sources, "right")
    bridge, _ = pair("t5")
    capture = Capture()
    probe = ap.Probe([capture], pattern=T5[which])
    with probe.attach(bridge), torch.no_grad():
        bridge(ids, attention_mask=mask, decoder_input_ids=torch.stack(targets))
    for layer, chunks in enumerate(capture.sites(0, 2)):
        assert chunks[0].self_attention == (which != "cross")
        assert chunks[0].causal == (which == "decoder")
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            assert_pattern(whole(chunks)[i], t5_attentions(source, target)[which][layer][0])


@needs_t5
@pytest.mark.parametrize("which", list(T5))
def test_t5_generate(which):
    (source,) = tokens(9)
    bridge, _ = pair("t5")
    capture = Capture()
    probe = ap.Probe([capture], pattern=T5[which])
    with probe.attach(bridge), torch.no_grad():
        output = bridge.generate(source[None], max_new_tokens=5, do_sample=False, verbose=False, stop_at_eos=False)
    probe.results()
    assert output.shape[1] == 6
    for layer, chunks in enumerate(capture.sites(0, 2)):
        found = whole(chunks)
        expected = t5_attentions(source, output[0, :-1])[which][layer][0]
        assert_pattern(found[0], expected)


@needs_t5
def test_t5_all_stacks_at_once_with_results_by_name():
    source, target = tokens(9)[0], tokens(4, seed=1)[0]
    bridge, _ = pair("t5")
    probe = ap.Probe([ap.IntrinsicTDO()], pattern="*.hook_pattern")
    with probe.attach(bridge), torch.no_grad():
        bridge(source[None], decoder_input_ids=target[None])
    ds = probe.results()
    own = t5_attentions(source, target)
    for which, stack in (
        ("encoder", "encoder_blocks.{}.attn"),
        ("decoder", "decoder_blocks.{}.self_attn"),
        ("cross", "decoder_blocks.{}.cross_attn"),
    ):
        for layer in range(2):
            found = ds.participation_ratio.sel(layer=stack.format(layer)).values[0]
            expected = ap.functional.participation_ratio(own[which][layer][0].double())
            torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)


@needs_t5
@pytest.mark.parametrize("kind", [ap.TransportCapacity, ap.Asymmetry])
def test_t5_cross_attention_is_refused_by_what_needs_a_square(kind):
    bridge, _ = pair("t5")
    probe = ap.Probe([kind()], pattern=T5["cross"])
    with dropped(), probe.attach(bridge), torch.no_grad(), pytest.raises(ValueError, match="cross-attention"):
        bridge(tokens(9)[0][None], decoder_input_ids=tokens(4)[0][None])


@needs_t5
def test_t5_decoder_blocks_can_be_chosen_by_a_function():
    bridge, _ = pair("t5")
    probe = ap.Probe([ap.IntrinsicTDO()], pattern=lambda name: "self_attn" in name and ".1." in name)
    with probe.attach(bridge), torch.no_grad():
        bridge(tokens(9)[0][None], decoder_input_ids=tokens(4)[0][None])
    assert probe.results().layer.values.tolist() == [1]
