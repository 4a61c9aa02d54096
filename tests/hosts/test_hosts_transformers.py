"""What a probe sees on a plain transformers model is what the model's own eager attention computes."""

import copy
import functools
import re

import pytest
import torch
import transformers
from hosts.capture import Capture, assert_pattern, whole
from tiny import VOCAB, tiny_model

import attnprobe as ap

SDPA = ["gpt2", "llama", "mistral", "qwen2", "neox"]
BOTH = [*((name, "sdpa") for name in SDPA), ("mistral", "eager"), ("gpt2", "eager"), ("gemma2", "eager")]
N_LAYERS = 3
FREE = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def host(name, attention="sdpa"):
    return tiny_model(name, attention=attention)


@pytest.fixture(autouse=True)
def _as_found():
    """A test that leaves a model watched does not take the others with it."""
    yield
    if any("attnprobe" in host(*args).config._attn_implementation for args in (("llama",), ("mistral",))):
        host.cache_clear()


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


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def eager_of(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def own_attentions(model, sequence):
    """[layer][head, n, n] of one sequence in one forward of an eager model, which no probe watches."""
    with torch.no_grad():
        return [a[0] for a in model(sequence[None], output_attentions=True).attentions]


def watch(model, call, needs=(), **settings):
    capture = Capture(*needs)
    probe = ap.Probe([capture], **settings)
    with probe.attach(model), torch.no_grad():
        output = call(model)
    return capture, output, probe.results()


def assert_sequences(capture, reference, sequences, n_layers=N_LAYERS, tolerance=1e-5):
    """Every layer of every sequence of the first call is the reference's own attention."""
    expected = [own_attentions(reference, sequence) for sequence in sequences]
    for layer, found in enumerate(capture.patterns(n_layers)):
        assert len(found) == len(sequences)
        for i in range(len(sequences)):
            assert_pattern(found[i], expected[i][layer], tolerance)


# -- forwards and generates --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_a_plain_forward(name, attention):
    sequences = tokens(24, 24)
    capture, _, ds = watch(host(name, attention), lambda m: m(torch.stack(sequences)))
    assert_sequences(capture, host(name, "eager"), sequences)
    assert ds.length.values.tolist() == [24, 24]


def test_the_window_is_there_at_all():
    (sequence,) = tokens(24)
    capture, _, _ = watch(host("mistral"), lambda m: m(sequence[None]))
    for found in capture.patterns(N_LAYERS):
        assert (found[0, :, 23, :19] == 0).all()
        assert (found[0, :, 23, 19:] > 0).all()


@pytest.mark.parametrize("how", ["cache", "no cache", "single token", "chunked prompt"])
@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_generate(name, attention, how):
    (prompt,) = tokens(1 if how == "single token" else 9)
    extra = {"no cache": {"use_cache": False}, "chunked prompt": {"prefill_chunk_size": 4}}.get(how, {})
    capture, output, ds = watch(
        host(name, attention), lambda m: m.generate(prompt[None], max_new_tokens=14, **FREE, **extra)
    )
    assert output.shape == (1, len(prompt) + 14)
    assert_sequences(capture, host(name, "eager"), [output[0, :-1]])
    assert int(ds.prompt_length[0]) == len(prompt)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_a_padded_forward(name, attention, side):
    sequences = tokens(21, 4, 12)
    ids, mask = padded(sequences, side)
    # absolute positions are the caller's business under left padding
    extra = {"position_ids": positions(mask)} if side == "left" else {}
    capture, _, ds = watch(host(name, attention), lambda m: m(ids, attention_mask=mask, **extra))
    assert_sequences(capture, host(name, "eager"), sequences)
    assert ds.length.values.tolist() == [21, 4, 12]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_a_padded_generate(name, attention, use_cache):
    prompts = tokens(11, 3, 7)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 8, "use_cache": use_cache, **FREE}
    capture, output, ds = watch(host(name, attention), lambda m: m.generate(ids, **settings))
    finished = [torch.cat([prompt, output[i, 11:-1]]) for i, prompt in enumerate(prompts)]
    assert_sequences(capture, host(name, "eager"), finished)
    assert ds.prompt_length.values.tolist() == [11, 3, 7]


@pytest.mark.parametrize("cuts", [[3], [1, 2, 7], [13], [4, 5, 6, 7, 8, 12]])
@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "sdpa"), ("mistral", "eager")])
def test_a_text_in_cached_chunks(name, attention, cuts):
    (sequence,) = tokens(14)

    def chunked(model):
        cache = None
        for low, high in zip([0, *cuts], [*cuts, 14], strict=True):
            cache = model(sequence[None, low:high], past_key_values=cache, use_cache=True).past_key_values

    capture, _, ds = watch(host(name, attention), chunked)
    assert ds.sizes["sequence"] == 1
    assert_sequences(capture, host(name, "eager"), [sequence])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_padded_prompt_in_chunks(name):
    prompts = tokens(9, 4)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 6, "prefill_chunk_size": 4, **FREE}
    capture, output, _ = watch(host(name), lambda m: m.generate(ids, **settings))
    finished = [torch.cat([prompt, output[i, 9:-1]]) for i, prompt in enumerate(prompts)]
    assert_sequences(capture, host(name, "eager"), finished)


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "sdpa"), ("mistral", "eager")])
def test_a_prompt_that_grows_after_a_generate(name, attention):
    (prompt,), (more,) = tokens(6), tokens(4, seed=3)

    def talk(model):
        first = model.generate(prompt[None], max_new_tokens=7, return_dict_in_generate=True, **FREE)
        longer = torch.cat([first.sequences, more[None]], 1)
        return model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=6, **FREE)

    capture, output, ds = watch(host(name, attention), talk)
    assert (ds.length.values.tolist(), ds.prompt_length.values.tolist()) == ([22], [17])
    assert_sequences(capture, host(name, "eager"), [output[0, :-1]])


def test_several_samples_of_each_prompt():
    prompts = tokens(6, 4)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(0)
    capture, output, ds = watch(host("llama"), lambda m: m.generate(ids, **settings, eos_token_id=None))
    assert ds.length.values.tolist() == [10, 10, 8, 8]
    finished = [torch.cat([prompts[i // 2], output[i, 6:-1]]) for i in range(4)]
    assert len({tuple(text.tolist()) for text in finished}) == 4
    assert_sequences(capture, host("llama", "eager"), finished)


def test_long_decoding_crosses_every_buffer():
    """More decode rows than wait for one another, in a sliding and in a whole cache."""
    for name in ("llama", "mistral"):
        (prompt,) = tokens(20)
        capture, output, _ = watch(host(name), lambda m, p=prompt: m.generate(p[None], max_new_tokens=90, **FREE))
        assert_sequences(capture, host(name, "eager"), [output[0, :-1]])


def test_several_calls_are_several_sequences():
    a, b = tokens(9, 6)
    model = host("mistral")
    capture = Capture()
    probe = ap.Probe([capture])
    with probe.attach(model), torch.no_grad():
        model(a[None])
        model.generate(b[None], max_new_tokens=4, **FREE)
        model(b[None])
    assert probe.results().length.values.tolist() == [9, 9, 6]
    for layer, found in enumerate(capture.patterns(N_LAYERS, call=2)):
        assert_pattern(found[0], own_attentions(host("mistral", "eager"), b)[layer])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_outputs_are_the_pattern_times_the_values(attention):
    """The parts of a row fit together: z, v by key/value head, key positions, tokens; also past a sliding cache."""
    prompts = tokens(8, 5)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 9, **FREE}
    capture, output, _ = watch(
        host("mistral", attention), lambda m: m.generate(ids, **settings), needs=("z", "v", "tokens")
    )
    for chunks in capture.sites(0, N_LAYERS):
        patterns = whole(chunks)
        for i, prompt in enumerate(prompts):
            n = len(prompt) + 8
            values = torch.full((n, 2, 8), torch.nan)
            outputs = torch.full((n, 4, 8), torch.nan)
            for rows in chunks:
                for j in range(rows.n_query):
                    if rows.position[i, j] >= 0:
                        values[rows.key_position[i, j]] = rows.v[i, j]
                        outputs[rows.position[i, j]] = rows.z[i, j]
            expanded = values[:, chunks[0].kv_head]
            torch.testing.assert_close(
                torch.einsum("hqk,khd->qhd", patterns[i, :, :n, :n], expanded), outputs, rtol=1e-4, atol=1e-5
            )
            assert chunks[-1].tokens[i, :n].tolist() == torch.cat([prompt, output[i, 8:]])[:n].tolist()


@pytest.mark.parametrize("heads", [[0], [2], [3, 1], [0, 2], [1, 0, 3]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_are_chosen_with_the_keys_they_read(attention, heads):
    (prompt,) = tokens(9)
    capture, output, ds = watch(
        host("llama", attention),
        lambda m: m.generate(prompt[None], max_new_tokens=4, **FREE),
        needs=("z", "v"),
        heads=heads,
    )
    assert ds["head"].values.tolist() == heads
    expected = own_attentions(host("llama", "eager"), output[0, :-1])
    for layer, chunks in enumerate(capture.sites(0, N_LAYERS)):
        assert chunks[0].kv_head.tolist() == [head // 2 for head in heads]
        assert_pattern(whole(chunks)[0], expected[layer][heads])


@pytest.mark.parametrize("layers", [[1], [2, 0], "middle"])
def test_layers_are_chosen(layers):
    (prompt,) = tokens(9)
    capture, output, ds = watch(
        host("mistral"), lambda m: m.generate(prompt[None], max_new_tokens=4, **FREE), layers=layers
    )
    chosen = [1, 2] if layers == "middle" else sorted(layers)
    assert ds.layer.values.tolist() == chosen
    expected = own_attentions(host("mistral", "eager"), output[0, :-1])
    for layer, found in zip(chosen, capture.patterns(len(chosen)), strict=True):
        assert_pattern(found[0], expected[layer])


# -- caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("prompt", [3, 8])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_by_hand_is_right_or_refused(name, attention, prompt, mask):
    (sequence,) = tokens(14)
    model = host(name, attention)

    def decode(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        for low, high in [(0, prompt), *((i, i + 1) for i in range(prompt, 14))]:
            given = {"attention_mask": torch.ones(1, high).long()} if mask else {}
            model(sequence[None, low:high], past_key_values=cache, use_cache=True, **given)

    try:
        capture, _, _ = watch(model, decode, needs=("z", "v"))
    except ValueError as error:
        assert re.search("static|cache", str(error)), f"not about the cache: {error}"  # noqa: PT017
        return
    assert_sequences(capture, host(name, "eager"), [sequence])
    plain, _, _ = watch(model, lambda m: m(sequence[None]), needs=("z", "v"))
    for static, dynamic in zip(capture.sites(0, N_LAYERS), plain.sites(0, N_LAYERS), strict=True):
        v = torch.cat([rows.v for rows in static], 1)
        torch.testing.assert_close(v, dynamic[0].v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_of_generate_is_right_or_refused(name):
    (prompt,) = tokens(3)
    settings = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 9, **FREE}
    try:
        capture, output, _ = watch(host(name), lambda m: m.generate(prompt[None], **settings))
    except ValueError as error:
        assert "static cache" in str(error)  # noqa: PT017
        return
    assert_sequences(capture, host(name, "eager"), [output[0, :-1]])


@pytest.mark.parametrize("kind", ["dynamic", "hybrid", "offloaded", "quantized"])
def test_other_caches_of_generate(kind):
    (prompt,) = tokens(6)
    model = tiny_model("mistral" if kind == "hybrid" else "llama", attention="sdpa")
    settings = {"cache_implementation": kind, "max_new_tokens": 9, **FREE}
    try:
        output = model.generate(prompt[None], **settings)
    except (ImportError, AssertionError, RuntimeError) as error:
        pytest.skip(f"this cache does not run here: {type(error).__name__}")
    capture, watched, _ = watch(model, lambda m: m.generate(prompt[None], **settings))
    assert torch.equal(watched, output)
    assert_sequences(capture, eager_of(model), [output[0, :-1]], tolerance=0.1 if kind == "quantized" else 1e-5)


def test_waiting_rows_do_not_keep_old_caches_alive():
    """The value cache of every step is a new tensor: a view of each of them would hold them all."""
    import gc

    (prompt,) = tokens(60)
    model = host("llama")

    def bytes_of_tensors():
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) is torch.Tensor
        }
        return sum(storages.values())

    probe = ap.Probe([ap.MeanRoutingSplit(bound=False)])
    with probe.attach(model), torch.no_grad():
        before = bytes_of_tensors()
        output = model.generate(prompt[None], max_new_tokens=40, **FREE)
        grown = bytes_of_tensors() - before
    cache = N_LAYERS * 2 * output.shape[1] * 2 * 8 * 4
    assert grown < 6 * cache, f"{grown / cache:.0f} times the key/value cache"


# -- masks -------------------------------------------------------------------------------------------------


def causal(n, dtype):
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
    return allowed if dtype == torch.bool else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("form", ["four axes", "dict"])
def test_a_custom_mask_is_a_clear_error(attention, form):
    (sequence,) = tokens(8)
    mask = causal(8, torch.bool if attention == "sdpa" else torch.float32)
    if form == "dict":
        mask = {"full_attention": mask, "sliding_attention": mask}
    with pytest.raises(ValueError, match=r"attention mask.*pass a"):
        watch(host("mistral", attention), lambda m: m(sequence[None], attention_mask=mask))


def test_packed_sequences_are_a_clear_error():
    (sequence,) = tokens(8)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"blocks.0.attn attends by a mask that is not plain causal"):
        watch(host("llama"), lambda m: m(sequence[None], position_ids=packed, use_cache=False))
    # the host's own pattern of the two texts side by side is what eager attention shows
    capture, _, _ = watch(host("llama", "eager"), lambda m: m(sequence[None], position_ids=packed, use_cache=False))
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0, :, :4, :4], own_attentions(host("llama", "eager"), sequence[:4])[layer])
        assert (found[0, :, 4:, :4] == 0).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_decode_step_that_hides_past_tokens_is_right_or_refused(attention):
    (sequence,) = tokens(9)
    model = host("llama", attention)

    def decode(model):
        cache = model(sequence[None, :6], use_cache=True).past_key_values
        mask = torch.ones(1, 6).long()
        for i in range(6, 9):
            mask = torch.cat([mask, torch.ones(1, 1).long()], 1)
            mask[0, 2] = 0
            model(sequence[None, i : i + 1], attention_mask=mask, past_key_values=cache)

    try:
        capture, _, _ = watch(model, decode)
    except ValueError as error:
        assert "mask" in str(error)  # noqa: PT017
        return
    for found in capture.patterns(N_LAYERS):
        assert (found[0, :, 5, 2] > 0).all()
        assert (found[0, :, 6:, 2] == 0).all(), "mass on a key that the model was told not to see"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_mask_given_by_place(attention, batch):
    """`model(ids, mask)` is how the signature of transformers models orders them."""
    sequences = tokens(5, 8)[:batch]
    ids, mask = padded(sequences, "left")
    if batch == 1:
        ids, mask = torch.cat([torch.zeros(1, 3).long(), ids], 1), torch.cat([torch.zeros(1, 3).long(), mask], 1)
    capture, _, ds = watch(host("llama", attention), lambda m: m(ids, mask))
    assert ds.length.values.tolist() == [5, 8][:batch]
    assert_sequences(capture, host("llama", "eager"), sequences)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoding_after_a_right_padded_prompt_is_right_or_refused(name):
    """Padding then stands between tokens, and the host's window counts it: the eager model's own pattern is right."""
    prompts = tokens(9, 4)
    answers = torch.stack(tokens(7, 7, seed=1))
    ids, mask = padded(prompts, "right")

    def decode(model):
        seen = mask
        cache = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=True).past_key_values
        for step in range(7):
            seen = torch.cat([seen, torch.ones(2, 1).long()], 1)
            given = {"attention_mask": seen, "position_ids": positions(seen)[:, -1:], "past_key_values": cache}
            model(answers[:, step : step + 1], **given)

    try:
        capture, _, _ = watch(host(name), decode)
    except ValueError as error:
        assert "mask" in str(error)  # noqa: PT017
        return
    reference, _, _ = watch(host(name, "eager"), decode)
    for found, own in zip(capture.patterns(N_LAYERS), reference.patterns(N_LAYERS), strict=True):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-5)


def test_a_first_chunk_that_is_padding_for_all():
    prompts = tokens(6, 4)
    ids, mask = padded(prompts, "left")
    ids, mask = torch.cat([torch.zeros(2, 3).long(), ids], 1), torch.cat([torch.zeros(2, 3).long(), mask], 1)
    settings = {"attention_mask": mask, "max_new_tokens": 4, "prefill_chunk_size": 3, **FREE}
    capture, output, ds = watch(host("llama"), lambda m: m.generate(ids, **settings))
    assert ds.prompt_length.values.tolist() == [6, 4]
    finished = [torch.cat([prompt, output[i, 9:-1]]) for i, prompt in enumerate(prompts)]
    assert_sequences(capture, host("llama", "eager"), finished)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_with_holes_takes_the_tokens_out(attention):
    """Slots that the mask leaves out are padding wherever they stand, and the others are the sequence."""
    (sequence,) = tokens(7)
    keep = torch.tensor([0, 1, 3, 4, 6])
    mask = torch.zeros(1, 7).long()
    mask[0, keep] = 1
    model = host("llama", attention)
    capture, _, ds = watch(model, lambda m: m(sequence[None], attention_mask=mask, position_ids=positions(mask)))
    assert int(ds.length[0]) == 5
    assert_sequences(capture, host("llama", "eager"), [sequence[keep]])


# -- precision ---------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What the attention function of transformers was given, layer by layer, call by call."""
    from transformers.integrations import sdpa_attention

    inputs = {}
    original = sdpa_attention.sdpa_attention_forward

    def spy(module, query, key, value, attention_mask, **given):
        inputs.setdefault(module.layer_idx, []).append((query, key, given["scaling"], given.get("sliding_window")))
        return original(module, query, key, value, attention_mask, **given)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", spy)
    return inputs


def softmax_of(calls):
    """[head, n, n] of one sequence: float32 softmax of the very queries and keys of every call, within the window."""
    rows, offset = [], 0
    for query, key, scaling, window in calls:
        total = offset + query.shape[2]
        k = key[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)
        position = torch.arange(offset, total)
        slot = torch.arange(total - k.shape[1], total)
        scores = scaling * query[0].float() @ k.mT
        hidden = slot > position[:, None]
        if window is not None:
            hidden |= slot <= position[:, None] - window
        pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.nn.functional.pad(pattern, (int(slot[0]), 0)))
        offset = total
    return torch.cat([torch.nn.functional.pad(row, (0, offset - row.shape[-1])) for row in rows], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_half_precision_is_float32_softmax_of_what_was_seen(name, dtype, seen):
    model = tiny_model(name, attention="sdpa").to(dtype)
    (prompt,) = tokens(20)
    capture, output, _ = watch(
        model, lambda m: m.generate(prompt[None], max_new_tokens=9, **FREE), needs=("z", "v", "tokens")
    )
    assert output.shape == (1, 29)
    assert next(iter(seen.values()))[0][0].dtype == dtype
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert found.dtype == torch.float32
        assert_pattern(found[0], softmax_of(seen[layer]), 1e-5)


def test_float64_is_computed_in_float64():
    model = tiny_model("llama", attention="sdpa").double()
    (sequence,) = tokens(14)
    capture, _, _ = watch(model, lambda m: m(sequence[None]))
    assert capture.kept[0][0].pattern.dtype == torch.float64
    reference = own_attentions(eager_of(model), sequence)  # its softmax is a float32 one
    for chunks, expected in zip(capture.sites(0, N_LAYERS), reference, strict=True):
        torch.testing.assert_close(chunks[0].pattern[0].float(), expected.float(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_int8_linear_layers(name, seen):
    plain = tiny_model(name, attention="sdpa")
    model = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
    assert "quantized" in type(model.model.layers[0].self_attn.q_proj).__module__
    (prompt,) = tokens(12)
    capture, _, _ = watch(model, lambda m: m.generate(prompt[None], max_new_tokens=7, **FREE), needs=("z", "v"))
    for layer, found in enumerate(capture.patterns(N_LAYERS)):
        assert_pattern(found[0], softmax_of(seen[layer]), 1e-5)
    (score,) = ap.score(model, prompt.tolist(), max_new_tokens=4)
    assert score.uncertainty["SAUQ"] > 0


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated.*:DeprecationWarning")
def test_the_unembedding_of_int8_layers_is_there_or_refused():
    model = torch.ao.quantization.quantize_dynamic(host("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    (sequence,) = tokens(9)
    probe = ap.Probe([ap.TDO("unembedding")])
    try:
        with probe.attach(model), torch.no_grad():
            model(sequence[None])
    except (ValueError, TypeError) as error:
        assert "unembedding" in str(error)  # noqa: PT017
        return
    assert probe.results().participation_ratio_unembedding.notnull().all()


@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nan_in_the_weights_names_layer_head_and_row(attention, part, how):
    model = tiny_model("llama", attention=attention)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, part).weight[18 if part == "q_proj" else 9] = torch.nan
    (sequence,) = tokens(9)
    probe = ap.Probe([ap.TransportCapacity()])
    # eager attention shows patterns, and values that are NaN spoil those of the next layer only
    where = "blocks.2.attn, head 0" if (attention, part) == ("eager", "v_proj") else "blocks.1.attn, head 2"
    with (  # noqa: PT012
        pytest.raises(ValueError, match=f"{where}, sequence 0, the row of position 0 holds NaN"),
        probe.attach(model),
        torch.no_grad(),
    ):
        model(sequence[None]) if how == "forward" else model.generate(sequence[None], max_new_tokens=3, **FREE)
        probe.results()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nan_in_a_head_that_is_not_watched_spoils_nothing(attention):
    model = tiny_model("llama", attention=attention)
    (sequence,) = tokens(9)
    expected = own_attentions(host("llama", "eager"), sequence)[1][[1, 0]]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[9] = torch.nan  # heads 2 and 3 read it
    capture, _, _ = watch(model, lambda m: m(sequence[None]), heads=[1, 0], layers=[1])
    assert_pattern(capture.patterns(1)[0][0], expected)


# -- other architectures -----------------------------------------------------------------------------------

_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=N_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.3,
)
_MOE = dict(num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
ARCHITECTURES = {
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**_LLAMA, sliding_window=5),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_LLAMA, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "cohere2": lambda: transformers.Cohere2Config(
        **_LLAMA, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**_LLAMA, sliding_window=5),
    "granite": lambda: transformers.GraniteConfig(**_LLAMA, attention_multiplier=0.2),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        init_std=0.3,
        pad_token_id=1,
    ),
    # latent attention: keys of another width than values
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(
        **{**_LLAMA, "num_key_value_heads": 4},
        **_MOE,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=12,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def built(config, attention="sdpa"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name):
    model = built(ARCHITECTURES[name]())
    prompts = tokens(9, 4)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 8, **FREE}
    capture, output, _ = watch(model, lambda m: m.generate(ids, **settings), needs=("z", "v"))
    finished = [torch.cat([prompt, output[i, 9:-1]]) for i, prompt in enumerate(prompts)]
    assert_sequences(capture, eager_of(model), finished)


def test_layers_without_attention_are_passed_over():
    config = transformers.Qwen3NextConfig(
        **{**_LLAMA, "num_hidden_layers": 4},
        head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = built(config)
    (prompt,) = tokens(6)
    capture, output, ds = watch(model, lambda m: m.generate(prompt[None], max_new_tokens=5, **FREE))
    assert ds.layer.values.tolist() == [1, 3]
    assert ds.attrs["n_layers"] == 4
    expected = [a for a in own_attentions(eager_of(model), output[0, :-1]) if a is not None]
    for found, own in zip(capture.patterns(2), expected[-2:], strict=True):
        assert_pattern(found[0], own)
    with pytest.raises(ValueError, match=r"layers \[0\] have no attention pattern here; layers with one: 1, 3"):
        ap.Probe([Capture()], layers=[0]).attach(model)


UNTOLD = {
    # masks by window or chunk whose width the attention function is not told
    "llama4": lambda: transformers.Llama4TextConfig(
        **{**_LLAMA, "num_local_experts": 2},
        head_dim=8,
        intermediate_size_mlp=48,
        attention_chunk_size=5,
        layer_types=["chunked_attention"] * N_LAYERS,
    ),
    "phimoe": lambda: transformers.PhimoeConfig(**_LLAMA, **_MOE, sliding_window=5),
}


@pytest.mark.parametrize("prompt_length", [3, 9])
@pytest.mark.parametrize("name", UNTOLD)
def test_a_window_that_the_attention_function_is_not_told_is_right_or_refused(name, prompt_length):
    model = built(UNTOLD[name]())
    (prompt,) = tokens(prompt_length)
    try:
        capture, output, _ = watch(model, lambda m: m.generate(prompt[None], max_new_tokens=10, **FREE))
    except ValueError as error:
        assert "not plain causal" in str(error) or "keys" in str(error)  # noqa: PT017
        return
    assert_sequences(capture, eager_of(model), [output[0, :-1]])


def test_attention_that_is_computed_twice_is_right_or_refused():
    """DiffLlama takes the difference of two attentions, each by a call of the attention function."""
    model = built(transformers.DiffLlamaConfig(**_LLAMA))
    (sequence,) = tokens(9)
    try:
        capture, _, _ = watch(model, lambda m: m(sequence[None]))
    except ValueError as error:
        assert "blocks.0.attn" in str(error)  # noqa: PT017
        return
    for chunks in capture.sites(0, N_LAYERS):
        assert sum(rows.n_query for rows in chunks) == 9, "more rows than tokens"


@pytest.mark.parametrize("rows", ["renormalize", "sink"])
@pytest.mark.parametrize("how", ["forward", "padded generate"])
def test_gpt_oss(rows, how):
    model = host("gpt_oss", "eager")
    prompts = tokens(20, 6) if how == "padded generate" else tokens(20)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 6, **FREE}
    capture, output, _ = watch(model, lambda m: m(ids) if how == "forward" else m.generate(ids, **settings), rows=rows)
    new = output[:, 20:-1] if how != "forward" else torch.zeros(1, 0).long()
    for layer, chunks in enumerate(capture.sites(0, N_LAYERS)):
        found = whole(chunks)
        for i, prompt in enumerate(prompts):
            own = own_attentions(model, torch.cat([prompt, new[i]]))[layer]
            sums = own.sum(-1, keepdim=True)
            assert float(sums.min()) < 0.95, "this model should have a sink"
            assert_pattern(found[i], own / sums if rows == "renormalize" else own)
            for chunk in chunks if rows == "sink" else []:
                for j in (chunk.position[i] >= 0).nonzero().flatten().tolist():
                    expected = 1 - sums[:, chunk.position[i, j], 0]
                    torch.testing.assert_close(chunk.sink[i, :, j], expected, rtol=0, atol=1e-5)


def test_gpt_oss_without_a_policy_names_them():
    with pytest.raises(ValueError, match=r"blocks.0.attn, head \d.*rows='renormalize'"):
        watch(host("gpt_oss", "eager"), lambda m: m(tokens(12)[0][None]))


@pytest.mark.parametrize("softcap", [50.0, None])
def test_a_softcap_on_sdpa_is_a_clear_error(softcap):
    """transformers builds no Gemma-2 on sdpa; who forces one there learns why, and without a softcap it is right."""
    model = tiny_model("gemma2", attn_logit_softcapping=softcap)
    (prompt,) = tokens(9)
    model.config._attn_implementation_internal = "sdpa"

    def generate():
        return watch(model, lambda m: m.generate(prompt[None], max_new_tokens=6, **FREE))

    if softcap:
        with pytest.raises(ValueError, match=r"softcap.*eager"):
            generate()
        assert model.config._attn_implementation == "sdpa"
        return
    capture, output, _ = generate()
    model.config._attn_implementation_internal = "eager"
    assert_sequences(capture, model, [output[0, :-1]])


# -- encoders ----------------------------------------------------------------------------------------------


def test_an_encoder_is_refused():
    with pytest.raises(ValueError, match=r"BertForMaskedLM has no causal self-attention.*TransformerBridge"):
        watch(tiny_model("bert", attention="sdpa"), lambda m: m(tokens(6)[0][None]))


@functools.cache
def seq2seq(name):
    if name == "t5":
        return tiny_model("t5")
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        init_std=0.3,
        forced_eos_token_id=None,
        attn_implementation=name.split()[1],
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("how", ["generate", "forward", "forward, decoder ids of the model's own"])
@pytest.mark.parametrize("name", ["t5", "bart sdpa", "bart eager"])
def test_the_decoder_of_an_encoder_decoder(name, how):
    model = seq2seq(name)
    source, mask = padded(tokens(8, 5), "right")
    target = torch.stack(tokens(6, 6, seed=1))
    if how == "generate":
        capture, output, ds = watch(
            model, lambda m: m.generate(source, attention_mask=mask, max_new_tokens=6, num_beams=1, **FREE)
        )
        target = output[:, :-1]
    elif how == "forward":
        capture, _, ds = watch(model, lambda m: m(source, attention_mask=mask, decoder_input_ids=target))
    else:
        capture, _, ds = watch(model, lambda m: m(source, attention_mask=mask, labels=target))
        start = torch.full((2, 1), model.config.decoder_start_token_id)
        target = torch.cat([start, target[:, :-1]], 1)
    assert ds.length.values.tolist() == [target.shape[1]] * 2
    twin = eager_of(model)
    with torch.no_grad():
        own = twin(source, attention_mask=mask, decoder_input_ids=target, output_attentions=True).decoder_attentions
    for layer, found in enumerate(capture.patterns(2)):
        for i in range(2):
            assert_pattern(found[i], own[layer][i])


# -- architectures that do not go through the interface ----------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "gptj", "falcon"])
def test_an_architecture_of_its_own_is_refused_and_the_bridge_named(name):
    small = dict(vocab_size=VOCAB, hidden_size=32, n_head=4, n_layer=2)
    config = {
        "bloom": lambda: transformers.BloomConfig(**small),
        "gptj": lambda: transformers.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, rotary_dim=4),
        "falcon": lambda: transformers.FalconConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
    }[name]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="TransformerBridge") as raised:
        watch(model, lambda m: m(tokens(6)[0][None]))
    assert model.config._attn_implementation == before
    advised = re.search(r"set_attn_implementation\('(\w+)'\)", str(raised.value))
    if advised:
        model.set_attn_implementation(advised[1])  # what is advised must be possible
        watch(model, lambda m: m(tokens(6)[0][None]))
