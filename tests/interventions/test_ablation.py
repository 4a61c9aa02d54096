"""Ablations against dense recomputation, on both hosts, cached and padded; and a model left as it was found."""

import copy
import importlib.util
from contextlib import contextmanager

import pytest
import torch
from probe.support import padded, tokens, traces_on
from tiny import CONFIGS, tiny_bridge, tiny_model
from torch import Tensor, nn

import attnprobe as ap

needs_hooked_transformer = pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None,
    reason="this transformer-lens has no HookedTransformer",
)
CHOSEN = [(0, 1), (1, 0), (1, 3), (2, 2)]
MODES = ("zero", "mean", "sink")
PLAIN = ("llama", "gpt2", "qwen2", "neox")  # full causal attention without sinks, on both hosts
HOSTS = ("bridge", "transformers")
PROJECTION = {"gpt2": "c_proj", "neox": "dense"}

_models: dict[tuple[str, str], object] = {}


def model_of(name: str, host: str):
    """One tiny model a name and host; both hosts have the same weights."""
    if (name, host) not in _models:
        made = tiny_bridge(name) if host == "bridge" else tiny_model(name, attention="sdpa")
        _models[name, host] = made
    return _models[name, host]


def logits_of(model, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    given = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        output = model(ids, **given)
    return getattr(output, "logits", output)


def reference() -> list[list[int]]:
    return [sequence.tolist() for sequence in tokens(9, 14, 5, seed=3)]


def ablated(model, heads, mode):
    return ap.ablate(model, heads, mode=mode, reference=reference() if mode == "mean" else None)


def projections(model) -> list[nn.Module]:
    name = PROJECTION.get({"gpt_neox": "neox"}.get(model.config.model_type, model.config.model_type), "o_proj")
    return [
        module
        for path, module in model.named_modules()
        if path.endswith("." + name) and ("attn" in path or "attention" in path)
    ]


def with_columns(model, ids: Tensor, value) -> Tensor:
    """Logits with value(layer, head, z of the head) in the columns of each chosen head before the projection."""
    handles = []
    d = 8
    for layer, module in enumerate(projections(model)):

        def before(_, args, layer=layer):
            columns = args[0].clone()
            for at, head in CHOSEN:
                if at == layer:
                    where = slice(head * d, head * d + d)
                    columns[..., where] = value(layer, head, args[0][..., where])
            return (columns,)

        handles.append(module.register_forward_pre_hook(before))
    try:
        return logits_of(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def dense_means(model) -> Tensor:
    """The mean columns before each projection over every token of the reference, by a loop."""
    sums, count = torch.zeros(3, 4, 8, dtype=torch.float64), 0
    for ids in reference():
        count += len(ids)
        for layer, module in enumerate(projections(model)):

            def before(_, args, layer=layer):
                for row in args[0][0]:
                    sums[layer] += row.reshape(4, 8).double()

            handle = module.register_forward_pre_hook(before)
            logits_of(model, torch.tensor([ids]))
            handle.remove()
    return sums / count


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", PLAIN)
def test_zero_is_no_columns_before_the_projection(name, host):
    (ids,) = tokens(13)
    expected = with_columns(model_of(name, "transformers"), ids[None], lambda layer, head, z: 0)
    with ap.ablate(model_of(name, host), CHOSEN, mode="zero"):
        found = logits_of(model_of(name, host), ids[None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, logits_of(model_of(name, host), ids[None]), atol=1e-2)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", PLAIN)
def test_mean_is_the_mean_over_every_token_of_the_reference(name, host):
    plain, (ids,) = model_of(name, "transformers"), tokens(13)
    means = dense_means(plain)
    torch.testing.assert_close(ap.head_means(model_of(name, host), reference()).double(), means, atol=1e-5, rtol=1e-4)
    expected = with_columns(plain, ids[None], lambda layer, head, z: means[layer, head].float())
    for given in (reference(), means):
        with ap.ablate(model_of(name, host), CHOSEN, mode="mean", reference=given):
            found = logits_of(model_of(name, host), ids[None])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def sunk_llama(model, ids: Tensor) -> Tensor:
    """Logits of a tiny Llama whose chosen heads have all mass on the first key, attention written out by hand."""
    from transformers.models.llama import modeling_llama

    def eager(module, query, key, value, attention_mask, scaling, **_):
        n, groups = query.shape[2], query.shape[1] // key.shape[1]
        output = torch.zeros_like(query)
        for head in range(query.shape[1]):
            scores = scaling * query[0, head] @ key[0, head // groups].T
            pattern = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
            if (module.layer_idx, head) in CHOSEN:
                pattern = torch.zeros(n, n)
                pattern[:, 0] = 1
            output[0, head] = pattern @ value[0, head // groups]
        return output.transpose(1, 2), None

    ours = copy.deepcopy(model)
    ours.set_attn_implementation("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", eager)
        return logits_of(ours, ids)


@pytest.mark.parametrize("host", HOSTS)
def test_sink_is_a_pattern_with_all_mass_on_the_first_key(host):
    (ids,) = tokens(13)
    expected = sunk_llama(model_of("llama", "transformers"), ids[None])
    with ap.ablate(model_of("llama", host), CHOSEN, mode="sink"):
        found = logits_of(model_of("llama", host), ids[None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*PLAIN, "gemma2"])
def test_hosts_agree(name, mode):
    kind = "eager" if name == "gemma2" else "sdpa"  # softcaps
    plain = tiny_model(name, attention=kind)
    (ids,) = tokens(13)
    found = {}
    for host, model in (("bridge", model_of(name, "bridge")), ("transformers", plain)):
        with ablated(model, CHOSEN, mode):
            found[host] = logits_of(model, ids[None])
    torch.testing.assert_close(found["bridge"], found["transformers"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_batch_is_each_sequence_alone(name, host, side, mode):
    model, sequences = model_of(name, host), tokens(11, 4, 7)
    ids, mask = padded(sequences, side)
    position = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if host == "transformers" else {}
    with ablated(model, CHOSEN, mode), torch.no_grad():
        output = model(ids, attention_mask=mask, **position)
        output = getattr(output, "logits", output)
        for i, sequence in enumerate(sequences):
            alone = logits_of(model, sequence[None])[0]
            torch.testing.assert_close(output[i][mask[i] > 0], alone, atol=1e-4, rtol=1e-4)


def generated(model, host: str, ids: Tensor, mask: Tensor, use_cache: bool) -> Tensor:
    if host == "bridge":
        settings = dict(use_past_kv_cache=use_cache, do_sample=False, verbose=False, stop_at_eos=False)
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, **settings)
    settings = dict(use_cache=use_cache, do_sample=False, eos_token_id=None)
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_cached_generate_is_uncached_generate(host, mode):
    model = model_of("llama", host)
    ids, mask = padded(tokens(9, 5), "left")
    with ablated(model, CHOSEN, mode):
        cached, whole = (generated(model, host, ids, mask, use_cache) for use_cache in (True, False))
    assert torch.equal(cached, whole)
    assert not torch.equal(cached, generated(model, host, ids, mask, True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("chunks", [(1, 1, 11), (3, 5, 5)])
def test_chunks_on_a_cache_are_one_forward(host, mode, chunks):
    model = model_of("llama", host)
    whole = getattr(model, "original_model", model)
    ids, mask = padded(tokens(13, 8), "left")  # the first token of the second comes in a later chunk
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    found, cache, start = [], None, 0
    with ablated(model, CHOSEN, mode), torch.no_grad():
        expected = whole(ids, attention_mask=mask, position_ids=position).logits
        for size in chunks:
            end = start + size
            output = whole(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=position[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache, start = output.past_key_values, end
            found.append(output.logits)
    real = mask > 0
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("host", HOSTS)
def test_a_prompt_read_before_the_ablation_is_in_the_cache(host):
    model = model_of("llama", host)
    whole = getattr(model, "original_model", model)
    (ids,) = tokens(10)
    with torch.no_grad():
        cache = whole(ids[None, :9], use_cache=True).past_key_values
        plain = whole(ids[None, 9:], past_key_values=copy.deepcopy(cache), use_cache=True).logits
        with ap.ablate(model, [(2, 1)], mode="sink"):  # the last layer: its cache is what the prompt left
            found = whole(ids[None, 9:], past_key_values=cache, use_cache=True).logits
            expected = whole(ids[None]).logits[:, -1:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sink_is_the_same_in_compatibility_mode(name):
    model, (ids,) = tiny_bridge(name), tokens(9)
    found = []
    for mode in (model.enable_compatibility_mode, lambda: None):
        with ap.ablate(model, CHOSEN, mode="sink"):
            found.append(logits_of(model, ids[None]).log_softmax(-1))
        mode()
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


# -- a HookedTransformer ---------------------------------------------------------------------------------------------


@needs_hooked_transformer
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_hooked_transformer(kv_heads):
    from transformer_lens import HookedTransformer, HookedTransformerConfig, TransformerLensKeyValueCache

    config = HookedTransformerConfig(
        n_layers=3,
        d_model=32,
        d_head=8,
        n_heads=4,
        d_mlp=48,
        n_ctx=64,
        d_vocab=97,
        act_fn="gelu",
        seed=3,
        initializer_range=0.3,
        n_key_value_heads=None if kv_heads == 4 else kv_heads,
    )
    model = HookedTransformer(config).eval()
    (ids,) = tokens(12)

    def sink(pattern, hook):
        for layer, head in CHOSEN:
            if hook.name == f"blocks.{layer}.attn.hook_pattern":
                pattern[:, head] = 0
                pattern[:, head, :, 0] = 1
        return pattern

    def zero(z, hook):
        for layer, head in CHOSEN:
            if hook.name == f"blocks.{layer}.attn.hook_z":
                z[:, :, head] = 0
        return z

    def in_chunks() -> Tensor:
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
        chunks = [ids[None, a:b] for a, b in ((0, 5), (5, 6), (6, 12))]
        return torch.cat([model(ids, past_kv_cache=cache, attention_mask=torch.ones_like(ids)) for ids in chunks], 1)

    for mode, part, change in (("sink", "hook_pattern", sink), ("zero", "hook_z", zero)):
        hooks = [(f"blocks.{layer}.attn.{part}", change) for layer in range(3)]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            expected = model(ids[None]), in_chunks()
        before = state_of(model)
        with torch.no_grad(), ap.ablate(model, CHOSEN, mode=mode):
            found = model(ids[None]), in_chunks()
        assert state_of(model) == before
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# -- as it was found -------------------------------------------------------------------------------------------------


def state_of(model) -> object:
    if hasattr(model, "hook_dict"):
        pre = {name: len(point._forward_pre_hooks) for name, point in model.hook_dict.items()}
        return traces_on(model), pre
    handles = [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]
    return handles, model.config._attn_implementation, vars(model).keys()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_nothing_stays_on_the_model(host, mode):
    model = model_of("llama", host)
    (ids,) = tokens(8)
    before, expected = state_of(model), logits_of(model, ids[None])
    with ablated(model, CHOSEN, mode):
        logits_of(model, ids[None])
    assert state_of(model) == before
    with pytest.raises(KeyError), ablated(model, CHOSEN, mode):
        raise KeyError
    assert state_of(model) == before
    assert torch.equal(logits_of(model, ids[None]), expected)


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_stays_when_entering_or_a_forward_fails(host):
    model = model_of("llama", host)
    (ids,) = tokens(8)
    before = state_of(model)
    with pytest.raises(ValueError, match="take head_means of this model"):  # noqa: SIM117 # one line would be too long
        with ap.ablate(model, [(0, 0)], mode="mean", reference=torch.zeros(3, 4, 5)):
            logits_of(model, ids[None])
    assert state_of(model) == before
    with ap.ablate(model, [(0, 0)], mode="zero"):
        found = logits_of(model, ids[None])
    with ap.ablate(model, [(0, 0)], mode="mean", reference=torch.zeros(3, 4, 8)):
        assert torch.equal(found, logits_of(model, ids[None]))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("last_first", [True, False])
def test_nested_ablations(host, last_first):
    model = model_of("llama", host)
    (ids,) = tokens(8)
    before = state_of(model)
    with ap.ablate(model, [(0, 1), (1, 2)], mode="zero"):
        both = logits_of(model, ids[None])
    with ap.ablate(model, [(0, 2)], mode="sink"):
        inner_alone = logits_of(model, ids[None])
    outer = ap.ablate(model, [(0, 1)], mode="zero")
    inner = ap.ablate(model, [(1, 2)], mode="zero")
    outer.__enter__()
    inner.__enter__()
    assert torch.equal(logits_of(model, ids[None]), both)
    for context in (inner, outer) if last_first else (outer, inner):
        context.__exit__(None, None, None)
    assert state_of(model) == before
    with ap.ablate(model, [(0, 2)], mode="zero"), ap.ablate(model, [(0, 2)], mode="sink"):
        torch.testing.assert_close(logits_of(model, ids[None]), inner_alone)
    assert state_of(model) == before


# -- together with others --------------------------------------------------------------------------------------------


def everything() -> list[ap.Analyzer]:
    return [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), ap.SpectralEntropyBound(), ap.SelfAttention()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("probe_first", [True, False])
def test_a_probe_sees_what_ablated_heads_computed(host, mode, probe_first):
    model = model_of("llama", host)
    (ids,) = tokens(12)
    last = [(2, 0), (2, 3)]  # nothing reads what the last layer says, so a probe must see no change at all
    probe, alone = ap.Probe(everything()), ap.Probe(everything())
    with alone.attach(model):
        expected = logits_of(model, ids[None])
    contexts = [attached(probe, model), ablated(model, last, mode)]
    if not probe_first:
        contexts.reverse()
    with contexts[0], contexts[1]:
        found = logits_of(model, ids[None])
    assert not torch.allclose(found, expected, atol=1e-2)
    for name, value in alone.results().data_vars.items():
        torch.testing.assert_close(torch.tensor(probe.results()[name].values), torch.tensor(value.values))


@contextmanager
def attached(probe, model):
    """Attaches when entered, not before."""
    with probe.attach(model):
        yield


@pytest.mark.parametrize("host", HOSTS)
def test_a_probe_sees_the_ablation_in_later_layers(host):
    model = model_of("llama", host)
    (ids,) = tokens(12)
    seen = []
    for heads in ([], [(0, 0), (0, 1)]):
        probe = ap.Probe([ap.IntrinsicTDO(lambda2=False)])
        with ap.ablate(model, heads, mode="zero"), probe.attach(model):
            logits_of(model, ids[None])
        seen.append(torch.tensor(probe.results().participation_ratio.values)[0])
    torch.testing.assert_close(seen[0][0], seen[1][0])
    assert not torch.allclose(seen[0][1:], seen[1][1:], atol=1e-4)


def test_users_hooks_come_before_the_replacement_and_see_what_was_computed():
    model, (ids,) = model_of("llama", "bridge"), tokens(8)
    seen = []
    with ap.ablate(model, [(0, 0)], mode="zero"):
        expected = logits_of(model, ids[None])
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: seen.append(z.clone()))]):
            assert torch.equal(logits_of(model, ids[None]), expected)
        model.reset_hooks()
        assert torch.equal(logits_of(model, ids[None]), expected)
    assert seen[0][:, :, 0].abs().amax() > 0


@pytest.mark.parametrize("host", HOSTS)
def test_score_under_an_ablation(host):
    model = model_of("llama", host)
    (ids,) = tokens(9)
    prompt, answer = ids[:5].tolist(), ids[5:].tolist()
    with ap.ablate(model, CHOSEN, mode="sink"):
        (found,) = ap.score(model, [prompt], completions=[answer], methods=("Perplexity", "SAUQ"))
        log_probability = logits_of(model, ids[None])[0].log_softmax(-1)
    expected = -sum(float(log_probability[4 + t, token]) for t, token in enumerate(answer)) / len(answer)
    assert found.uncertainty["Perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_pass_and_ablated_heads_get_none(host, mode):
    model = tiny_bridge("llama") if host == "bridge" else tiny_model("llama", attention="sdpa")
    inner = getattr(model, "original_model", model)
    (ids,) = tokens(6)
    with ablated(model, [(2, h) for h in range(4)], mode):
        inner(ids[None]).logits.square().sum().backward()
    attention = inner.model.layers[2].self_attn
    query = getattr(attention.q_proj, "original_component", attention.q_proj).weight.grad
    assert query is None or not query.any()
    embedding = inner.get_input_embeddings()
    assert getattr(embedding, "original_component", embedding).weight.grad.any()


# -- sentences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("heads", "mode", "error", "sentence"),
    [
        ([(3, 0)], "zero", ValueError, "layer 3 has no attention heads here; layers with some: 0 to 2"),
        ([(0, 4)], "zero", ValueError, "head 4 of layer 0 was named and the model has heads 0 to 3"),
        ([(0, -1)], "zero", ValueError, "head -1 of layer 0"),
        ([(-1, 0)], "zero", ValueError, "layer -1 has no attention"),
        ((0, 1), "zero", TypeError, "heads holds 0: give"),
        ([(0, 1.5)], "zero", TypeError, "pairs of whole numbers"),
        ([(0, True)], "zero", TypeError, "pairs of whole numbers"),
        ("all", "zero", TypeError, "give a list of"),
        (3, "zero", TypeError, "give a list of"),
        ([(0, 1)], "resample", ValueError, "use 'mean', 'zero' or 'sink'"),
        ([(0, 1)], "mean", ValueError, "needs reference="),
    ],
)
def test_wrong_arguments(host, heads, mode, error, sentence):
    with pytest.raises(error, match=sentence):
        ap.ablate(model_of("llama", host), heads, mode=mode)


@pytest.mark.parametrize(
    ("reference", "error", "sentence"),
    [
        ([], ValueError, "empty"),
        (["text"], ValueError, "no tokenizer"),
        ([[]], ValueError, "text 0 of the reference has no tokens"),
        ([[1.5]], TypeError, "text 0 of the reference is neither"),
        (torch.zeros(2, 4, 8), ValueError, r"not \[layer, head, d\] with 3 layers and 4 heads"),
        (torch.full((3, 4, 8), float("nan")), ValueError, "not finite"),
    ],
)
def test_wrong_references(reference, error, sentence):
    with pytest.raises(error, match=sentence):
        ap.ablate(model_of("llama", "transformers"), [(0, 0)], mode="mean", reference=reference)


def test_reference_without_mean():
    with pytest.raises(ValueError, match="mode='zero' needs none"):
        ap.ablate(model_of("llama", "transformers"), [(0, 0)], mode="zero", reference=[[1, 2]])


def test_no_heads_change_nothing():
    model, (ids,) = model_of("llama", "transformers"), tokens(8)
    with ap.ablate(model, [], mode="sink"):
        found = logits_of(model, ids[None])
    assert torch.equal(found, logits_of(model, ids[None]))


@pytest.mark.parametrize("host", HOSTS)
def test_a_window_that_dropped_the_first_token_is_told(host):
    model = tiny_bridge("mistral") if host == "bridge" else tiny_model("mistral", attention="sdpa")
    ids, mask = tokens(9)[0][None], torch.ones(1, 9, dtype=torch.int64)
    with ap.ablate(model, [(1, 1)], mode="sink"):
        logits_of(model, ids)
        with pytest.raises(ValueError, match="needs the value of the first token"):
            generated(model, host, ids, mask, True)


@pytest.mark.parametrize("host", HOSTS)
def test_a_softmax_with_a_sink_of_its_own_is_told(host):
    model = tiny_bridge("gpt_oss") if host == "bridge" else tiny_model("gpt_oss", attention="eager")
    (ids,) = tokens(6)
    heads = [(1, head) for head in range(4)]
    with ap.ablate(model, heads, mode="sink"), pytest.raises(ValueError, match="is not the value of its first"):
        logits_of(model, ids[None])
    with ap.ablate(model, heads, mode="zero"):
        assert logits_of(model, ids[None]).isfinite().all()


def test_sink_is_for_causal_attention():
    with pytest.raises(ValueError, match="mode='sink' is for causal attention"):
        ap.ablate(tiny_bridge("bert"), [(0, 0)], mode="sink")


def test_models_without_such_attention_are_told():
    with pytest.raises(TypeError, match="is neither"):
        ap.ablate(nn.Linear(2, 2), [(0, 0)], mode="zero")
    with pytest.raises(ValueError, match="matches none of the"):
        ap.ablate(tiny_bridge("t5"), [(0, 0)], mode="zero")


def test_attention_that_was_changed_meanwhile_is_told():
    model, (ids,) = tiny_model("llama", attention="sdpa"), tokens(6)
    with ap.ablate(model, [(0, 0)], mode="zero"):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="none passed in this forward"):
            logits_of(model, ids[None])
    assert model.config._attn_implementation == "eager"


def test_a_part_of_the_model_does_not_say_what_is_padding():
    model, (ids,) = model_of("llama", "transformers"), tokens(6)
    with ap.ablate(model, [(0, 0)], mode="sink"), pytest.raises(ValueError, match="outside a forward of the ablated"):
        model.model(ids[None])


def test_masks_that_say_nothing_are_told():
    model, (ids,) = model_of("llama", "transformers"), tokens(6)
    mask = torch.ones(1, 1, 6, 6).tril().bool()
    with (
        ap.ablate(model, [(0, 0)], mode="sink"),
        pytest.raises(ValueError, match="does not say which token is the first"),
    ):
        logits_of(model, ids[None], mask)


def test_every_named_architecture_takes_zero():
    (ids,) = tokens(7)
    for name in sorted(set(CONFIGS) - {"t5"}):
        model = tiny_bridge(name)
        with ap.ablate(model, [(1, 2)], mode="zero"):
            found = logits_of(model, ids[None])
        assert not torch.equal(found, logits_of(model, ids[None])), name
