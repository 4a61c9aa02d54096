"""Head diagnostics: however rows come, the numbers are those of loops over the whole pattern."""

from __future__ import annotations

import functools
import importlib.util
import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from probe.support import FREE, bridge, fake_tokenizer, padded
from stream.dense import Attention, feed, random_attention, traced
from stream.heads import DIAGNOSTICS, dense, look_back
from tiny import VOCAB, tiny_bridge, tiny_model

import attnprobe as ap
import attnprobe.rows

NAMES = list(DIAGNOSTICS)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
CLOSE = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}


def repetitive(n, seed=0, **options):
    """Attention on a text of six words, so that tokens come again."""
    attention = random_attention(n, seed, heads=4, kv_heads=2, **options)
    attention.tokens = attention.tokens % 6
    return attention


def definition(name, attention):
    """Name of each result -> (mean over rows, every row), by loops."""
    norms = attention.v_by_head.norm(dim=-1)
    return {
        result: dense(of, attention.pattern, attention.tokens, norms) for result, of in DIAGNOSTICS[name][1].items()
    }


def as_doubles(attention):
    """The numbers of the attention in float64, each row a distribution to its precision."""
    pattern = attention.pattern.double()
    return Attention(pattern / pattern.sum(-1, keepdim=True), attention.v.double(), attention.tokens)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 24), seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 24), max_size=8))
def test_any_chunking_equals_loops_over_the_whole(name, dtype, n, seed, cuts):
    attention = repetitive(n, seed, dtype=dtype)
    found = feed(DIAGNOSTICS[name][0](), attention.chunks(cuts))
    expected = definition(name, as_doubles(attention))
    assert set(found) == set(expected)
    for result, value in found.items():
        assert value.dtype == dtype
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
        torch.testing.assert_close(value.double(), expected[result][0], **close)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [[], [1, 2], list(range(17))])
def test_a_trace_is_the_value_of_each_row(name, cuts):
    attention = repetitive(17, 3)
    found = traced(DIAGNOSTICS[name][0](trace=True), attention.chunks(cuts))
    for result, (_, rows) in definition(name, attention).items():
        if result == "previous_token_attention":
            rows = rows.nan_to_num(0.0)  # the first row of this one is 0, which recurrent scores build on
        torch.testing.assert_close(found[result], rows, **CLOSE)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("value")])
@pytest.mark.parametrize("swap", [False, True])
def test_halves_merge(name, swap):
    attention, make = repetitive(15, 2), DIAGNOSTICS[name][0]
    first, second = make(), make()
    first.update(attention.rows(0, 6))
    second.update(attention.rows(6, 15))
    if swap:
        first, second = second, first
    first.merge(second)
    first.merge(make())
    for result, value in first.compute().items():
        torch.testing.assert_close(value, definition(name, attention)[result][0], **CLOSE)
    first.reset()
    for result, value in feed(first, attention.prefix(4).chunks([2])).items():
        torch.testing.assert_close(value, definition(name, attention.prefix(4))[result][0], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_are_none(name, side):
    """Two sequences of other lengths in one batch, fed in chunks, have the numbers that each has alone."""
    lengths, width = (13, 8), 16
    texts = [repetitive(length, seed, batch=1) for seed, length in enumerate(lengths)]
    slots = [range(width - m, width) if side == "left" else range(2 * (side == "both"), width)[:m] for m in lengths]
    analyzer = DIAGNOSTICS[name][0]()
    for low, high in itertools.pairwise((0, 1, 4, 9, 10, width)):
        parts = [chunk_of(text, where, low, high, max(lengths)) for text, where in zip(texts, slots, strict=True)]
        fields = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        analyzer.update(ap.Rows(first=low, kv_head=torch.tensor([0, 0, 1, 1]), **fields))
    for result, value in analyzer.compute().items():
        expected = torch.cat([definition(name, text)[result][0] for text in texts])
        torch.testing.assert_close(value, expected, **CLOSE)


def chunk_of(text, slots, low, high, n_key):
    """Slots low to high of a batch that holds this text at some slots: rows of padding are zeros, their values NaN."""
    position = torch.tensor([[slots.index(slot) if slot in slots else -1 for slot in range(low, high)]])
    pattern = torch.zeros(1, 4, high - low, n_key, dtype=torch.float64)
    v = torch.full((1, high - low, 2, text.v.shape[-1]), torch.nan, dtype=torch.float64)
    for row, i in enumerate(position[0].tolist()):
        if i >= 0:
            pattern[0, :, row, : text.n] = text.pattern[0, :, i]
            v[0, row] = text.v[0, i]
    seen = max([-1, *(slots.index(slot) for slot in range(high) if slot in slots)]) + 1
    tokens = torch.full((1, n_key), -1)
    tokens[0, :seen] = text.tokens[0, :seen]
    return {"position": position, "key_position": position, "pattern": pattern, "v": v, "tokens": tokens}


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_order_of_a_bidirectional_site(name):
    attention = repetitive(9, 4, causal=False)
    found = feed(DIAGNOSTICS[name][0](), attention.chunks([]))
    for result, (expected, _) in definition(name, attention).items():
        torch.testing.assert_close(found[result], expected, **CLOSE)


# -- closed forms, and rows that do not count ---------------------------------------------------------------


def copying(n):
    return ap.Rows.from_pattern(torch.eye(n, dtype=torch.float64)[None, None], tokens=torch.arange(n)[None])


def sinking(n):
    pattern = torch.zeros(1, 1, n, n, dtype=torch.float64)
    pattern[..., 0] = 1
    return ap.Rows.from_pattern(pattern, tokens=torch.zeros(1, n).long())


def test_a_head_that_gives_all_to_the_first_token():
    n = 7
    assert feed(ap.SinkScore(), [sinking(n)])["sink_score"].item() == 1.0
    assert feed(ap.SinkScore([3]), [sinking(n)])["sink_score_keys_3"].item() == 0.0
    assert feed(ap.RowEntropy(), [sinking(n)])["row_entropy"].item() == 0.0
    assert feed(ap.MeanLookBack(), [sinking(n)])["mean_look_back"].item() == (n - 1) / 2
    for analyzer in (ap.RowEntropy, ap.MeanLookBack, ap.SelfAttention, ap.PreviousTokenAttention):
        (value,) = feed(analyzer(exclude_sink=True), [sinking(n)]).values()
        assert value.isnan().all()  # nothing is left of any row


def test_a_head_that_copies():
    n = 7
    assert feed(ap.SinkScore(), [copying(n)])["sink_score"].item() == pytest.approx(1 / n)
    assert feed(ap.RowEntropy(exclude_sink=True), [copying(n)])["row_entropy_without_sink"].item() == 0.0
    assert feed(ap.MeanLookBack(), [copying(n)])["mean_look_back"].item() == 0.0
    assert feed(ap.SelfAttention(exclude_sink=True), [copying(n)])["self_attention_without_sink"].item() == 1.0
    for analyzer in (ap.DuplicateTokenScore(), ap.InductionScore()):
        (value,) = feed(analyzer, [copying(n)]).values()
        assert value.isnan().all()  # no token comes again


def test_a_head_of_induction_on_a_text_read_twice():
    m = 5
    pattern = torch.eye(2 * m, dtype=torch.float64)
    for i in range(m, 2 * m):
        pattern[i] = 0
        pattern[i, i - m + 1] = 1
    rows = ap.Rows.from_pattern(pattern[None, None], tokens=torch.arange(m).repeat(2)[None])
    assert feed(ap.InductionScore(), [rows])["induction_score"].item() == 1.0
    assert feed(ap.DuplicateTokenScore(), [rows])["duplicate_token_score"].item() == 0.0


def test_one_sequence_of_a_batch_may_have_no_repeat():
    attention = repetitive(6)
    attention.tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 1, 3, 3, 3]])
    (value,) = feed(ap.InductionScore(), attention.chunks([2, 4])).values()
    assert value[0].isnan().all()
    assert value[1].isfinite().all()


def test_a_head_that_looks_nearby_in_a_long_text_keeps_its_distance():
    """In float32, i less the mean key would be rounding at position 40,000."""
    near = torch.tensor([1e-3, 0.5, 0.499], dtype=torch.float32)
    pattern = torch.zeros(1, 1, 1, 40_000)
    pattern[..., -3:] = near
    found = feed(ap.MeanLookBack(), [ap.Rows.from_pattern(pattern)])["mean_look_back"].item()
    assert found == pytest.approx(2 * near[0].item() + near[1].item(), rel=1e-6)


def test_little_is_left_beside_a_sink_that_takes_nearly_all():
    pattern = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1e-12, 0.0], [1.0, 1e-12, 1e-12]]).reshape(1, 1, 3, 3)
    found = feed(ap.RowEntropy(exclude_sink=True), [ap.Rows.from_pattern(pattern)])["row_entropy_without_sink"]
    assert found.item() == pytest.approx(np.log(2) / 2, rel=1e-6)  # rows 1 and 2


def test_values_of_one_norm_weigh_nothing():
    attention = repetitive(12, 5)
    attention.v = attention.v / attention.v.norm(dim=-1, keepdim=True) * 3
    found = feed(ap.ValueWeightedAttention(), attention.chunks([4]))
    plain = feed(ap.SinkScore(), attention.chunks([])) | feed(ap.RowEntropy(), attention.chunks([]))
    for name, value in plain.items():
        torch.testing.assert_close(found[f"value_weighted_{name}"], value, **CLOSE)


def test_values_that_are_all_zero_have_no_share():
    attention = repetitive(5)
    attention.v = attention.v.clone()
    attention.v[0] = 0
    found = feed(ap.ValueWeightedAttention(), attention.chunks([2]))
    for value in found.values():
        assert value[0].isnan().all()
        assert value[1].isfinite().all()


def test_watched_heads_read_the_values_of_their_group():
    attention, heads = repetitive(9, 6), [1, 2]
    rows = ap.Rows.from_pattern(attention.pattern[:, heads], v=attention.v, kv_head=torch.tensor([0, 1]))
    for result, value in feed(ap.ValueWeightedAttention(), [rows]).items():
        expected = definition("value-weighted", attention)[result][0][:, heads]
        torch.testing.assert_close(value, expected, **CLOSE)


def test_weighing_beside_an_analyzer_that_shares_the_value_norms():
    attention = repetitive(11, 7)
    pool = ap.IntrinsicTDO().pool
    split, weighed = ap.MeanRoutingSplit(trace=True).start(pool), ap.ValueWeightedAttention(trace=True).start(pool)
    pieces = []
    for rows in attention.chunks([3, 4, 8]):
        pieces.append(weighed.trace_rows(rows))
        for analyzer in (split, weighed):
            analyzer.update(rows)
    for result, (expected, rows) in definition("value-weighted", attention).items():
        torch.testing.assert_close(weighed.compute()[result], expected, **CLOSE)
        torch.testing.assert_close(torch.cat([piece[result] for piece in pieces], -1), rows, **CLOSE)


# -- what is refused ------------------------------------------------------------------------------------------


def test_values_that_were_never_seen():
    attention = repetitive(8)
    late = ap.ValueWeightedAttention()
    late.update(attention.rows(5, 8))
    with pytest.raises(ValueError, match="never seen"):
        late.compute()
    first = ap.ValueWeightedAttention()
    first.update(attention.rows(0, 5))
    first.merge(late)
    with pytest.raises(ValueError, match="never seen"):
        first.compute()
    with pytest.raises(ValueError, match="hook_v"):
        ap.ValueWeightedAttention().update(ap.Rows.from_pattern(attention.pattern))


def test_sites_without_repeats_or_distances():
    cross = ap.Rows.from_pattern(torch.full((1, 1, 2, 3), 1 / 3), causal=False, self_attention=False)
    for analyzer in (ap.InductionScore(), ap.DuplicateTokenScore(), ap.MeanLookBack(), ap.SelfAttention()):
        with pytest.raises(ValueError, match="cross-attention"):
            analyzer.update(cross)
    assert feed(ap.SinkScore(), [cross])["sink_score"].item() == pytest.approx(1 / 3)
    assert feed(ap.RowEntropy(), [cross])["row_entropy"].item() == pytest.approx(np.log(3))
    for kind in (ap.InductionScore, ap.DuplicateTokenScore):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs token ids"):
            kind().update(ap.Rows.from_pattern(torch.eye(3)[None, None]))


def test_a_sink_that_is_no_token():
    attention = repetitive(6)
    sunk = Attention(attention.pattern * 0.75, attention.v, attention.tokens)
    sunk.fields = {"sink": torch.full((2, 4, 6), 0.25, dtype=torch.float64)}
    rows = sunk.rows(0, 6)
    chunks = [rows[:2], rows[2:6]]
    whole = definition("sink", attention)["sink_score"][0]
    torch.testing.assert_close(feed(ap.SinkScore(), chunks)["sink_score"], 0.75 * whole, **CLOSE)
    completed = torch.cat([sunk.fields["sink"].unsqueeze(-1), sunk.pattern], -1)
    expected = -torch.xlogy(completed, completed).sum(-1).mean(-1)
    torch.testing.assert_close(feed(ap.RowEntropy(), chunks)["row_entropy"], expected, **CLOSE)
    with pytest.raises(ValueError, match="exclude_sink=True"):
        ap.MeanLookBack().update(rows)
    for name in ("entropy without sink", "look-back without sink", "self without sink", "value-weighted"):
        for result, value in feed(DIAGNOSTICS[name][0](), chunks).items():
            torch.testing.assert_close(value, definition(name, attention)[result][0], **CLOSE)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ap.SinkScore([]), ValueError, "at least one position"),
        (lambda: ap.SinkScore([-1]), ValueError, "counted from 0"),
        (lambda: ap.SinkScore([2, 2]), ValueError, "each of them once"),
        (lambda: ap.SinkScore(3), TypeError, "a list of whole numbers"),
        (lambda: ap.SinkScore([0.0]), TypeError, "a list of whole numbers"),
        (lambda: ap.RowEntropy(exclude_sink=[1.5]), TypeError, "exclude_sink="),
        (lambda: ap.MeanLookBack(exclude_sink=[]), ValueError, "exclude_sink="),
        (lambda: ap.ValueWeightedAttention([-2]), ValueError, "counted from 0"),
        (lambda: ap.SelfAttention(final=False, exclude_sink=True), ValueError, "add trace=True"),
    ],
)
def test_settings_are_checked(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_settings_tell_analyzers_apart():
    with pytest.raises(ValueError, match="settings differ"):
        ap.RowEntropy().merge(ap.RowEntropy(exclude_sink=True))
    with pytest.raises(ValueError, match="settings differ"):
        ap.SinkScore().merge(ap.SinkScore([1]))
    with pytest.raises(TypeError, match="one class"):
        ap.SinkScore().merge(ap.RowEntropy())
    assert ap.SinkScore([3, 1]).variables["sink_score_keys_1_3"]["long_name"] == "attention to keys 1, 3"
    assert ap.RowEntropy(exclude_sink=True).variables["row_entropy_without_sink"]["units"] == "nats"
    assert ap.MeanLookBack().variables["mean_look_back"]["units"] == "tokens"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trace", [False, True])
def test_what_is_kept_does_not_grow_with_the_pattern(name, trace):
    attention = random_attention(256, batch=1, heads=2)
    analyzer = DIAGNOSTICS[name][0](trace=trace)
    for rows in attention.chunks(list(range(0, 256, 32))):
        if trace:
            analyzer.trace_rows(rows)
        analyzer.update(rows)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(analyzer)}
    kept = sum(storage.nbytes() for storage in storages.values()) // 8
    assert kept <= (2 * 256 + 16 if name.startswith("value") else 16)


def tensors_of(thing):
    """Every tensor reachable from an object."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type):
        yield from tensors_of(vars(thing))


# -- through a probe ------------------------------------------------------------------------------------------


# the entropy of one has the name that of the other has: a probe takes one of them
TOGETHER = [name for name in NAMES if name != "value-weighted, keys"]


def all_of_them(**options):
    return [DIAGNOSTICS[name][0](**options) for name in TOGETHER]


@functools.cache
def plain(name="llama"):
    return tiny_model(name, attention="sdpa")


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 12, (length,), generator=generator) for length in (14, 9, 11)]


def watched(model, call, analyzers=None, **attach):
    probe = ap.Probe(all_of_them() if analyzers is None else analyzers)
    with probe.attach(model, **attach), torch.no_grad():
        output = call(model)
    return probe.results(), output


def of_text(text, name="llama"):
    """Every diagnostic of one text by loops on what the bridge caches: result -> [layer, head], [layer, head, row]."""
    with torch.no_grad():
        _, cache = bridge(name).run_with_cache(text[None])
    found = {}
    for layer in range(3):
        a = cache[f"blocks.{layer}.attn.hook_pattern"].double()
        v = cache[f"blocks.{layer}.attn.hook_v"].double().transpose(1, 2)
        v = v.repeat_interleave(a.shape[1] // v.shape[1], 1)
        attention = Attention(a / a.sum(-1, keepdim=True), v.transpose(1, 2), text[None])
        for diagnostic in TOGETHER:
            for result, (final, rows) in definition(diagnostic, attention).items():
                found.setdefault(result, []).append((final[0], rows[0]))
    return {result: tuple(map(torch.stack, zip(*layers, strict=True))) for result, layers in found.items()}


def assert_text(ds, index, text, name="llama"):
    expected = of_text(text, name)
    for result in ds.data_vars:
        final = expected[result][0].numpy()
        np.testing.assert_allclose(ds[result].values[index], final, rtol=2e-5, atol=2e-5, err_msg=result)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("host", ["bridge", "transformers"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_padded_batch_on_both_hosts(host, name, side):
    ids, mask = padded(texts(), side)
    model = bridge(name) if host == "bridge" else plain(name)
    ds, _ = watched(model, lambda m: m(ids, attention_mask=mask))
    for i, text in enumerate(texts()):
        assert_text(ds, i, text, name)


@pytest.mark.parametrize("host", ["bridge", "transformers"])
def test_generation_and_its_traces(host):
    prompts = texts()[:2]
    ids, mask = padded(prompts, "left")
    model = bridge() if host == "bridge" else plain()
    how = FREE if host == "bridge" else {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    analyzers = all_of_them(trace=True)
    ds, output = watched(model, lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=40, **how), analyzers)
    for i, prompt in enumerate(prompts):
        text = torch.cat([prompt, output[i, ids.shape[1] : -1]])
        expected = of_text(text)
        for result, (final, rows) in expected.items():
            np.testing.assert_allclose(ds[result].values[i], final, rtol=3e-5, atol=3e-5, err_msg=result)
            steps = rows[..., len(prompt) - 1 :]
            if result == "previous_token_attention":
                steps = np.nan_to_num(steps)
            np.testing.assert_allclose(ds[f"{result}_trace"].values[i], steps, rtol=3e-5, atol=3e-5, err_msg=result)


def test_a_bidirectional_host():
    model = tiny_bridge("bert")
    ids, mask = padded(texts(), "right")
    ds, _ = watched(model, lambda m: m(ids, attention_mask=mask), all_of_them())
    for i, text in enumerate(texts()):
        alone, _ = watched(model, lambda m, text=text: m(text[None]), all_of_them())
        _, cache = model.run_with_cache(text[None])
        distance = dense(look_back(), cache["blocks.1.attn.hook_pattern"], text[None], torch.zeros(1, 4, len(text)))
        np.testing.assert_allclose(alone.mean_look_back.sel(layer=1).values, distance[0], rtol=2e-5, atol=2e-5)
        for result in ds.data_vars:
            np.testing.assert_allclose(ds[result].values[i], alone[result].values[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("host", ["bridge", "transformers"])
def test_some_heads_of_a_model(host):
    (text,) = texts()[:1]
    probe = ap.Probe(all_of_them(), heads=[3, 1], layers=[2])
    model = bridge() if host == "bridge" else plain()
    with probe.attach(model), torch.no_grad():
        model(text[None])
    ds = probe.results()
    for result, (final, _) in of_text(text).items():
        if result in ds:
            expected = final[2, [3, 1]].numpy()
            np.testing.assert_allclose(ds[result].values[0, 0], expected, rtol=2e-5, atol=2e-5, err_msg=result)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_host_whose_softmax_has_a_sink(side):
    """Weights as they are for a sink score; the sink a key like the others, or left out, for an entropy."""
    model = bridge("gpt_oss")
    ids, mask = padded(texts(), side)
    analyzers = [ap.SinkScore(), ap.RowEntropy(), ap.RowEntropy(exclude_sink=True), ap.MaximumScore()]
    probe = ap.Probe(analyzers, rows="sink")
    with probe.attach(model), torch.no_grad():
        model(ids, attention_mask=mask)
    ds = probe.results()
    for i, text in enumerate(texts()):
        _, cache = model.run_with_cache(text[None])
        for layer in range(3):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].double()
            scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0].double()
            functional = ap.functional
            expected = {
                "sink_score": functional.sink_score(pattern, rows="sink"),
                "row_entropy": functional.row_entropy(pattern, rows="sink"),
                "row_entropy_without_sink": functional.row_entropy(pattern, (0,), rows="sink"),
                "maximum_score": functional.maximum_score(scores, pattern, rows="sink"),
            }
            for result, value in expected.items():
                found = ds[result].sel(layer=layer).values[i]
                np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-5, err_msg=result)


def test_embeddings_have_no_tokens_to_repeat():
    model = plain()
    embeddings = model.get_input_embeddings()(texts()[0][None])
    with pytest.raises(ValueError, match="InductionScore needs token ids"):
        watched(model, lambda m: m(inputs_embeds=embeddings), [ap.InductionScore()])


def test_a_sink_score_needs_no_pattern_where_columns_are_summed_without(monkeypatch):
    ids, mask = padded(texts(), "left")
    two = [ap.SinkScore(), ap.SinkScore([1, 3])]
    expected, _ = watched(plain(), lambda m: m(ids, attention_mask=mask), two)
    monkeypatch.setattr(attnprobe.rows, "can_fuse", lambda factors: True)
    called, column_sums = [], attnprobe.rows.column_sums
    monkeypatch.setattr(attnprobe.rows, "column_sums", lambda factors: called.append(factors) or column_sums(factors))
    found, _ = watched(plain(), lambda m: m(ids, attention_mask=mask), two)
    assert sum(factors.q.shape[2] for factors in called) == 3 * 14  # every row of three layers, once
    for name in expected.data_vars:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-5, atol=1e-6, err_msg=name)


# -- before the softmax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1, 4], list(range(9))])
def test_the_largest_score_of_a_row(cuts):
    generator = torch.Generator().manual_seed(3)
    scores = 3 * torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    pattern = scores.softmax(-1)
    shown = scores.clamp_min(-1e30)  # as hosts write what may not be seen: a large negative number, or nothing
    shown[..., 8] = shown[..., 8].where(scores[..., 8].isfinite(), 0.0)
    analyzer = ap.MaximumScore(trace=True)
    pieces = []
    edges = sorted({0, 9, *cuts})
    for low, high in itertools.pairwise(edges):
        rows = ap.Rows.from_pattern(pattern[..., low:high, :high], start=low, scores=shown[..., low:high, :high])
        pieces.append(analyzer.trace_rows(rows)["maximum_score"])
        analyzer.update(rows)
    largest = [[[max(row[: i + 1]) for i, row in enumerate(head)] for head in one] for one in scores.tolist()]
    expected = torch.tensor(largest, dtype=torch.float64)
    torch.testing.assert_close(torch.cat(pieces, -1), expected, **CLOSE)
    torch.testing.assert_close(analyzer.compute()["maximum_score"], expected.mean(-1), **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "neox", "mistral"])
def test_hosts_that_show_true_scores(name, side):
    model = bridge(name)
    ids, mask = padded(texts(), side)
    ds, _ = watched(model, lambda m: m(ids, attention_mask=mask), [ap.MaximumScore()])
    for i, text in enumerate(texts()):
        _, cache = model.run_with_cache(text[None])
        for layer in range(3):
            scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0].double()
            expected = scores.amax(-1).mean(-1)
            np.testing.assert_allclose(ds.maximum_score.sel(layer=layer).values[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None,
    reason="this transformer-lens has no HookedTransformer",
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_hooked_transformer(side):
    """It hides keys by -inf in its scores."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2, d_model=32, d_head=8, n_heads=4, n_ctx=64, d_vocab=97, act_fn="gelu", initializer_range=0.3, seed=0
    )
    model = HookedTransformer(config).eval()
    ids, mask = padded(texts(), side)
    model.tokenizer = fake_tokenizer(bos_token_id=1, padding_side=side)
    ds, _ = watched(model, lambda m: m(ids, attention_mask=mask), [*all_of_them(), ap.MaximumScore()])
    for i, text in enumerate(texts()):
        with torch.no_grad():
            _, cache = model.run_with_cache(text[None])
        for layer in range(2):
            a, v = cache[f"blocks.{layer}.attn.hook_pattern"].double(), cache[f"blocks.{layer}.attn.hook_v"].double()
            attention = Attention(a / a.sum(-1, keepdim=True), v, text[None])
            scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0]
            expected = {"maximum_score": scores.amax(-1).mean(-1)}
            for diagnostic in TOGETHER:
                expected |= {name: final[0] for name, (final, _) in definition(diagnostic, attention).items()}
            for name in ds.data_vars:
                found = ds[name].sel(layer=layer).values[i]
                np.testing.assert_allclose(found, expected[name], rtol=3e-5, atol=3e-5, err_msg=name)


def test_a_generation_on_scores():
    (text,) = texts()[:1]
    ds, output = watched(bridge(), lambda m: m.generate(text[None], max_new_tokens=40, **FREE), [ap.MaximumScore()])
    alone, _ = watched(bridge(), lambda m: m(output[:, :-1]), [ap.MaximumScore()])
    np.testing.assert_allclose(ds.maximum_score.values, alone.maximum_score.values, rtol=1e-5, atol=1e-5)


def test_a_host_that_shows_the_pattern_in_place_of_scores():
    with pytest.raises(ValueError, match="gives the pattern itself"):
        watched(tiny_bridge("bert"), lambda m: m(texts()[0][None]), [ap.MaximumScore()])


def test_such_a_host_that_reads_one_token_first():
    """A single weight is 1 whatever the scores are: what the hook shows is told apart later, not never."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.3,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config.architectures = ["OPTForCausalLM"]
    with pytest.raises(ValueError, match="hook_attn_scores"):
        watched(
            ap.load_model(model),
            lambda m: m.generate(torch.tensor([[5]]), max_new_tokens=6, **FREE),
            [ap.MaximumScore()],
        )


def test_a_plain_model_has_no_scores():
    with pytest.raises(ValueError, match=r"an analyzer needs scores.*TransformerBridge"):
        watched(plain(), lambda m: m(texts()[0][None]), [ap.MaximumScore()])


def test_scores_that_are_none():
    pattern = torch.tensor([[1.0, 0.0], [0.9, 0.1]]).reshape(1, 1, 2, 2)
    analyzer = ap.MaximumScore()
    with pytest.raises(ValueError, match="carry none"):
        analyzer.update(ap.Rows.from_pattern(pattern))
    analyzer.update(ap.Rows.from_pattern(pattern, scores=pattern))
    with pytest.raises(ValueError, match="not the softmax"):
        analyzer.compute()
