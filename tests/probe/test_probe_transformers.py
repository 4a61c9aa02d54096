"""A probe on a plain transformers model: the numbers of the TransformerBridge, and a model left as it was found."""

# The probe is left inside `pytest.raises`, as it is in use: several statements there are the point.
# ruff: noqa: PT012, SIM117

import contextlib
import copy
import functools
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
import transformers
from hosts.capture import Capture
from probe.support import alone, assert_sequence, bridge, everything, padded, tokens
from tiny import VOCAB, tiny_bridge, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

import attnprobe as ap
from attnprobe.uncertainty import method_names

PLAIN = [
    ("llama", "sdpa"),
    ("gpt2", "sdpa"),
    ("mistral", "sdpa"),
    ("qwen2", "sdpa"),
    ("neox", "sdpa"),
    ("gemma2", "eager"),
    ("llama", "eager"),
]
FREE = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GREEDY = {"do_sample": False, "pad_token_id": 0}


@functools.cache
def plain(name="llama", attention="sdpa"):
    """No tiny model here has a stop token of its own: tests that need one give it."""
    model = tiny_model(name, attention=attention)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def reference(name, text, prompt_length, of=everything):
    """The text alone in one forward of the TransformerBridge."""
    return alone(bridge(name), torch.tensor(text), prompt_length, of())


def assert_is(ds, index, name, text, prompt_length, tolerance=2e-5, of=everything):
    assert_sequence(ds, index, reference(name, tuple(text.tolist()), prompt_length, of), tolerance)


def small():
    return [ap.IntrinsicTDO(lambda2=False, trace=True), ap.TransportCapacity()]


def cheap():
    """Traces that cost little at every step."""
    return [
        ap.TransportCapacity(trace=True),
        ap.MeanRoutingSplit(bound=False, trace=True),
        ap.IntrinsicTDO(lambda2=False),
    ]


def traced():
    """The tensors of a row, all of them, without the costly traces."""
    return [*small(), ap.MeanRoutingSplit(bound=False, trace=True), ap.IntrinsicTDO(scope="generation", trace=True)]


def run(model, call, analyzers=None, *, prompt_lengths=None, **settings):
    probe = ap.Probe(everything() if analyzers is None else analyzers, **settings)
    with probe.attach(model, prompt_lengths=prompt_lengths), torch.no_grad():
        output = call(model)
    return probe.results(), output


def traces_on(model):
    """Everything that a probe might leave."""
    modules = dict(model.named_modules())
    return {
        "names": {name: m.config._attn_implementation for name, m in modules.items() if hasattr(m, "config")},
        "hooks": {
            name: (list(m._forward_hooks), list(m._forward_pre_hooks), dict(m._forward_hooks_with_kwargs))
            for name, m in modules.items()
        },
        "own": sorted(vars(model)),
        "forwards": sorted(name for name, m in modules.items() if "forward" in vars(m)),
    }


@pytest.fixture
def model():
    model = plain()
    before = traces_on(model)
    yield model
    after = traces_on(model)
    if after != before:
        plain.cache_clear()  # do not take the other tests down
    assert after == before


# -- the numbers of the bridge -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), PLAIN)
def test_a_text_that_is_read(name, attention):
    (sequence,) = tokens(14)
    ds, _ = run(plain(name, attention), lambda m: m(sequence[None]), prompt_lengths=9)
    assert ds.sizes["step"] == 6
    assert_is(ds, 0, name, sequence, 9)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("name", "attention"), PLAIN)
def test_generate(name, attention, use_cache):
    (prompt,) = tokens(9)
    settings = {"max_new_tokens": 9, "use_cache": use_cache, **FREE}
    ds, output = run(plain(name, attention), lambda m: m.generate(prompt[None], **settings))
    assert_is(ds, 0, name, output[0, :-1], 9)
    assert torch.equal(output, plain(name, attention).generate(prompt[None], **settings))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gpt2", "sdpa")])
def test_a_padded_batch_generates(name, attention, use_cache):
    prompts = tokens(9, 3, 6)
    ids, mask = padded(prompts, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 7, "use_cache": use_cache, **FREE}
    ds, output = run(plain(name, attention), lambda m: m.generate(ids, **settings))
    for i, prompt in enumerate(prompts):
        assert_is(ds, i, name, torch.cat([prompt, output[i, 9:-1]]), len(prompt))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_padded_batch_in_one_forward(name, side):
    sequences, prompts = tokens(14, 9, 11), [10, 4, 11]
    ids, mask = padded(sequences, side)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    of = everything if name == "mistral" else traced
    ds, _ = run(plain(name), lambda m: m(ids, **given), of(), prompt_lengths=prompts)
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert_is(ds, i, name, sequence, prompt, of=of)


@pytest.mark.parametrize(("name", "attention"), [("mistral", "sdpa"), ("gpt2", "sdpa"), ("llama", "eager")])
def test_a_sequence_alone_is_the_same_in_a_batch(name, attention):
    model = plain(name, attention)
    prompts = tokens(8, 5)
    ids, mask = padded(prompts, "left")
    ds, output = run(model, lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=6, **FREE), traced())
    for i, prompt in enumerate(prompts):
        one, text = run(model, lambda m, p=prompt: m.generate(p[None], max_new_tokens=6, **FREE), traced())
        assert torch.equal(text[0, len(prompt) :], output[i, 8:])
        assert_sequence(ds, i, one, 2e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("how", ["by hand", "prefill_chunk_size"])
def test_a_prompt_in_chunks(name, how):
    (prompt,) = tokens(9)

    def chunked(model):
        cache = None
        for low, high in ((0, 4), (4, 5), (5, 9)):
            cache = model(prompt[None, low:high], past_key_values=cache, use_cache=True).past_key_values
        return prompt[None]

    if how == "by hand":
        ds, output = run(plain(name), chunked)
        assert_is(ds, 0, name, output[0], 9)
    else:
        settings = {"max_new_tokens": 4, "prefill_chunk_size": 4, **FREE}
        ds, output = run(plain(name), lambda m: m.generate(prompt[None], **settings))
        assert_is(ds, 0, name, output[0, :-1], 9)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_that_grows_after_a_generate(name):
    (prompt,), (more,) = tokens(6), tokens(4, seed=3)

    def talk(model):
        first = model.generate(prompt[None], max_new_tokens=5, return_dict_in_generate=True, **FREE)
        longer = torch.cat([first.sequences, more[None]], 1)
        return model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=5, **FREE)

    ds, output = run(plain(name), talk)
    assert_is(ds, 0, name, output[0, :-1], 15)


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("prompt_length", [1, 2])
def test_one_and_two_new_tokens(model, new, prompt_length):
    (prompt,) = tokens(prompt_length)
    ds, output = run(model, lambda m: m.generate(prompt[None], max_new_tokens=new, **FREE))
    assert ds.sizes["step"] == new
    assert_is(ds, 0, "llama", output[0, :-1], prompt_length)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_long_generation_crosses_every_buffer(name):
    (prompt,) = tokens(20)
    ds, output = run(plain(name), lambda m: m.generate(prompt[None], max_new_tokens=75, **FREE), cheap())
    assert ds.sizes["step"] == 75
    assert_is(ds, 0, name, output[0, :-1], 20, 1e-4, cheap)


def test_results_may_be_read_in_the_middle(model):
    (prompt,) = tokens(9)
    probe = ap.Probe(traced())
    with probe.attach(model), torch.no_grad():
        cache = model(prompt[None, :6], use_cache=True).past_key_values
        assert_is(probe.results(), 0, "llama", prompt[:6], 6, of=traced)
        for i in range(6, 9):
            model(prompt[None, i : i + 1], past_key_values=cache, use_cache=True)
            assert_is(probe.results(), 0, "llama", prompt[: i + 1], 6, of=traced)


@pytest.mark.parametrize("settings", [{"heads": [2]}, {"heads": [3, 1]}, {"layers": [2, 0]}, {"layers": "middle"}])
def test_heads_and_layers_are_chosen(model, settings):
    (prompt,) = tokens(9)
    ds, output = run(model, lambda m: m.generate(prompt[None], max_new_tokens=4, **FREE), **settings)
    whole = reference("llama", tuple(output[0, :-1].tolist()), 9)
    chosen = {"heads": "head", "layers": "layer"}
    for name, numbers in settings.items():
        numbers = [1, 2] if numbers == "middle" else sorted(numbers) if name == "layers" else numbers
        whole = whole.sel({chosen[name]: numbers})
    assert_sequence(ds, 0, whole, 2e-5)


@pytest.mark.parametrize("rows", ["renormalize", "sink"])
def test_gpt_oss(rows):
    (prompt,) = tokens(9)
    analyzers = [ap.IntrinsicTDO(trace=True), ap.MeanRoutingSplit(trace=True), ap.SpectralEntropyBound(trace=True)]
    analyzers += [ap.TransportCapacity(trace=True), ap.Asymmetry(trace=True)] if rows == "renormalize" else []
    settings = {"max_new_tokens": 5, **FREE}
    ds, output = run(plain("gpt_oss", "eager"), lambda m: m.generate(prompt[None], **settings), analyzers, rows=rows)
    assert_sequence(ds, 0, alone(bridge("gpt_oss"), output[0, :-1], 9, analyzers, rows=rows), 2e-5)


def test_generate_from_embeddings(model):
    (prompt,) = tokens(6)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(prompt[None])
    ds, output = run(model, lambda m: m.generate(inputs_embeds=embeddings, max_new_tokens=5, **FREE))
    assert_is(ds, 0, "llama", torch.cat([prompt, output[0, :-1]]), 6)
    with pytest.raises(ValueError, match="token ids"):
        run(model, lambda m: m.generate(inputs_embeds=embeddings, max_new_tokens=2, **FREE), logits=True)


def test_a_model_without_a_head(model):
    """The trunk alone may be watched, whoever calls it."""
    (prompt,) = tokens(6)
    probe = ap.Probe(everything())
    with probe.attach(model.model), torch.no_grad():
        model.model(prompt[None])
        output = model.generate(prompt[None], max_new_tokens=4, **FREE)
    ds = probe.results()
    assert_is(ds, 0, "llama", prompt, 6)
    assert_is(ds, 1, "llama", output[0, :-1], 6)


# -- where sequences end -----------------------------------------------------------------------------------


@functools.cache
def ragged(name="llama"):
    """Prompts and a stop token that ends them at different steps, one of them not at all or last."""
    model = plain(name)
    for seed in range(200):
        prompts = tokens(7, 3, 5, seed=seed)
        ids, mask = padded(prompts, "left")
        output = model.generate(ids, attention_mask=mask, max_new_tokens=9, **FREE)[:, 7:]
        for stop in output.unique().tolist():
            first = [row.tolist().index(stop) if stop in row.tolist() else 9 for row in output]
            if len(set(first)) == 3 and min(first) < 3 and 0 < sorted(first)[1] < 9 and stop:
                return prompts, ids, mask, stop
    raise AssertionError("no prompts found that end at different steps")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("given_by", ["argument", "generation config", "config argument", "list"])
def test_sequences_that_end_at_different_steps(model, use_cache, given_by):
    prompts, ids, mask, stop = ragged()
    settings = {"attention_mask": mask, "max_new_tokens": 9, "use_cache": use_cache, **GREEDY}
    how = {
        "argument": {"eos_token_id": stop},
        "list": {"eos_token_id": [96, stop]},
        "config argument": {"generation_config": transformers.GenerationConfig(eos_token_id=stop)},
    }.get(given_by, {})
    with pytest.MonkeyPatch.context() as patch:
        if given_by == "generation config":
            patch.setattr(model.generation_config, "eos_token_id", stop)
        of = everything if given_by == "argument" else traced
        ds, output = run(model, lambda m: m.generate(ids, **settings, **how), of())
    lengths = set()
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        answer = answer[: answer.index(stop) + 1] if stop in answer else answer
        lengths.add(len(answer))
        assert_is(ds, i, "llama", torch.cat([prompt, torch.tensor(answer[:-1]).long()]), len(prompt), of=of)
    assert len(lengths) > 1


@pytest.mark.parametrize("how", ["argument", "generation config"])
def test_no_stop_token_stops_nothing(model, monkeypatch, how):
    """`eos_token_id=None` overrides the model's own; None in a GenerationConfig of the call is filled from it."""
    prompts, ids, mask, stop = ragged()
    monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
    given = {"eos_token_id": None}
    if how == "generation config":
        given = {"generation_config": transformers.GenerationConfig(eos_token_id=None)}
    settings = {"attention_mask": mask, "max_new_tokens": 9, **GREEDY, **given}
    ds, output = run(model, lambda m: m.generate(ids, **settings), small())
    expected = []
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        ends = how == "generation config" and stop in answer
        expected.append(len(prompt) + (answer.index(stop) if ends else 8))
    assert ds.length.values.tolist() == expected
    assert (len({n - len(p) for n, p in zip(expected, prompts, strict=True)}) == 1) == (how == "argument")


def test_sampling_is_the_same_with_and_without_a_probe(model):
    prompts, ids, mask, stop = ragged()
    settings = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": True, "top_k": 20, "temperature": 1.3}
    settings |= {"eos_token_id": stop, "pad_token_id": 0}
    torch.manual_seed(3)
    bare = model.generate(ids, **settings)
    torch.manual_seed(3)
    ds, output = run(model, lambda m: m.generate(ids, **settings), traced())
    assert torch.equal(output, bare)
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        answer = answer[: answer.index(stop) + 1] if stop in answer else answer
        assert_is(ds, i, "llama", torch.cat([prompt, torch.tensor(answer[:-1]).long()]), len(prompt), of=traced)


def test_criteria_of_ones_own_in_a_batch_are_refused(model):
    never = transformers.StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])
    with pytest.raises(ValueError, match="generate one at a time"):
        run(model, lambda m: m.generate(torch.stack(tokens(6, 6)), max_new_tokens=3, stopping_criteria=never, **FREE))


@pytest.mark.parametrize("use_cache", [True, False])
def test_token_probabilities_and_entropies(model, use_cache):
    prompts, ids, mask, stop = ragged()
    settings = {"attention_mask": mask, "max_new_tokens": 9, "use_cache": use_cache, "eos_token_id": stop, **GREEDY}
    ds, output = run(model, lambda m: m.generate(ids, **settings), [ap.SelfAttention()], logits=True)
    for i, prompt in enumerate(prompts):
        answer = output[i, 7:].tolist()
        answer = answer[: answer.index(stop) + 1] if stop in answer else answer
        with torch.no_grad():
            logits = model(torch.cat([prompt, torch.tensor(answer)])[None]).logits[0]
        n, table = len(answer), logits.double().log_softmax(-1)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(
            ds.token_log_probability.values[i, :n], table[torch.arange(n), answer], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(ds.token_entropy.values[i, :n], -(table.exp() * table).sum(-1), rtol=1e-4, atol=1e-4)
        assert np.isnan(ds.token_entropy.values[i, n:]).all()


# -- decoding that guesses ahead ---------------------------------------------------------------------------


def guessed(model, prompt, new, **settings):
    """Right or refused: rows of the tokens that were kept, and steps from the end of the prompt."""
    try:
        ds, output = run(model, lambda m: m.generate(prompt[None], max_new_tokens=new, **{**FREE, **settings}), small())
    except ValueError:
        return
    kept = output.shape[1] - 1
    assert (int(ds.length[0]), int(ds.prompt_length[0])) == (kept, len(prompt))
    expected = alone(bridge("llama"), output[0, :-1], len(prompt), small())
    assert_sequence(ds, 0, expected, 2e-5)


@pytest.mark.parametrize("new", [1, 2, 3, 8])
def test_prompt_lookup_is_right_or_refused(model, new):
    (part,) = tokens(5)
    guessed(model, torch.cat([part, part, part]), new, prompt_lookup_num_tokens=3)


def test_prompt_lookup_that_ends_in_its_first_round_is_right_or_refused(model):
    """The candidates behind the stop token were read and rejected, and no later forward shows it."""
    (part,) = tokens(5)
    prompt = torch.cat([part, part, part])
    stop = int(model.generate(prompt[None], max_new_tokens=1, **FREE)[0, -1])
    guessed(model, prompt, 8, prompt_lookup_num_tokens=3, eos_token_id=stop)


@pytest.mark.parametrize("new", [2, 8])
@pytest.mark.parametrize("assistant", ["the model itself", "another"])
def test_an_assistant_is_right_or_refused(model, assistant, new):
    helper = copy.deepcopy(model)
    if assistant == "another":
        with torch.no_grad():
            helper.lm_head.weight.mul_(-1)
    guessed(model, tokens(5)[0], new, assistant_model=helper)


@pytest.mark.parametrize("where", ["argument", "generation config", "model"])
def test_beams_are_refused(model, monkeypatch, where):
    (prompt,) = tokens(5)
    given = {"num_beams": 2} if where == "argument" else {}
    if where == "generation config":
        given["generation_config"] = transformers.GenerationConfig(num_beams=2)
    if where == "model":
        monkeypatch.setattr(model.generation_config, "num_beams", 2)
    with pytest.raises(ValueError, match=r"beam search \(num_beams=2\)"):
        run(model, lambda m: m.generate(prompt[None], max_new_tokens=2, **given))


# -- left as found -----------------------------------------------------------------------------------------


def test_the_model_computes_the_same_with_and_without_us(model):
    (a,) = tokens(9)
    with torch.no_grad():
        bare = model(a[None]).logits
        with ap.Probe(everything(), logits=True).attach(model):
            assert torch.equal(model(a[None]).logits, bare)
    assert torch.equal(model(a[None]).logits, bare)


def test_reordered_attention_of_gpt2_computes_the_same_or_is_refused():
    """This model looks at the name of its attention to choose its arithmetic."""
    model = tiny_model("gpt2", reorder_and_upcast_attn=True).to(torch.bfloat16)
    (a,) = tokens(9)
    with torch.no_grad():
        bare = model(a[None]).logits
        try:
            with ap.Probe(small()).attach(model):
                assert torch.equal(model(a[None]).logits, bare)
        except ValueError as error:
            assert "reorder_and_upcast_attn" in str(error)  # noqa: PT017
    assert model.config._attn_implementation == "eager"


def test_attentions_asked_for_are_there(model):
    eager = plain("llama", "eager")
    (a,) = tokens(9)
    bare = eager(a[None], output_attentions=True).attentions
    with ap.Probe(small()).attach(eager):
        watched = eager(a[None], output_attentions=True).attentions
    assert len(watched) == 3
    assert all(torch.equal(x, y) for x, y in zip(bare, watched, strict=True))


def test_nothing_is_left(model):
    before = traces_on(model)
    with ap.Probe(small()).attach(model):
        inside = traces_on(model)
        model.generate(tokens(5)[0][None], max_new_tokens=2, **FREE)
    assert inside != before
    assert traces_on(model) == before


class Boom(RuntimeError):
    pass


class Explosive(ap.Analyzer):
    def update(self, rows):
        self.accumulate(rows=rows.count[:, None])
        if int(self.total["rows"].max()) > 8:
            raise Boom("analyzer")

    def compute(self):
        return {"rows": self.total["rows"].float().expand(-1, 4)}


@contextlib.contextmanager
def raising(module, error, after):
    count = []

    def hook(*_):
        count.append(1)
        if len(count) > after:
            raise error

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [Boom("hook"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("where", ["model.layers.1.mlp", "model.embed_tokens", "lm_head"])
def test_an_exception_in_the_model(model, error, after, where):
    a, b = tokens(6, 7)
    before = traces_on(model)
    probe = ap.Probe(traced(), logits=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(type(error)))
        stack.enter_context(raising(model.get_submodule(where), error, after))
        stack.enter_context(probe.attach(model))
        model.generate(a[None], max_new_tokens=6, **FREE)
    assert traces_on(model) == before
    with pytest.raises(ValueError, match="nothing has been collected"):
        probe.results()
    with probe.attach(model), torch.no_grad():
        model(b[None])
    assert_is(probe.results().drop_vars(["token_log_probability", "token_entropy"]), 0, "llama", b, 7, of=traced)


def test_an_exception_in_an_analyzer(model):
    (a,) = tokens(6)
    before = traces_on(model)
    probe = ap.Probe([Explosive()])
    with pytest.raises(Boom, match="analyzer"), probe.attach(model):
        model.generate(torch.cat([a, a, a])[None], max_new_tokens=3, **FREE)
    assert traces_on(model) == before
    with probe.attach(model), torch.no_grad():
        model(a[None])
    assert probe.results()["rows"].values.tolist() == [[[6.0] * 4] * 3]


def test_an_attach_that_fails_leaves_nothing(model):
    before = traces_on(model)
    for settings in ({"pattern": "nothing.*"}, {"layers": [17]}, {"heads": [4]}):
        with pytest.raises(ValueError, match=r"matches no attention|layers \[17\]|heads 0 to 3"):
            ap.Probe(small(), **settings).attach(model)
    with pytest.raises(ValueError, match="prompt_lengths=0"):
        ap.Probe(small()).attach(model, prompt_lengths=0)
    assert traces_on(model) == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_probes_leave_in_any_order(model, first):
    a, b, c = tokens(5, 8, 6)
    before = traces_on(model)
    probes = [ap.Probe(small()), ap.Probe(everything(), layers=[1])]
    with torch.no_grad():
        probes[0].attach(model)
        model(a[None])
        probes[1].attach(model)
        output = model.generate(b[None], max_new_tokens=3, **FREE)
        probes[first].detach()
        model(c[None])
        probes[1 - first].detach()
    assert traces_on(model) == before
    finished = output[0, :-1]
    seen = [[5, 10, 6], [10]] if first == 1 else [[5, 10], [10, 6]]
    for probe, lengths in zip(probes, seen, strict=True):
        assert probe.results().length.values.tolist() == lengths
    whole = reference("llama", tuple(finished.tolist()), 8).sel(layer=[1])
    assert_sequence(probes[1].results(), 0, whole, 2e-5)


def test_attach_and_detach_twice(model):
    a, b, c = tokens(5, 8, 6)
    before = traces_on(model)
    probe = ap.Probe(traced())
    with torch.no_grad():
        with probe.attach(model):
            model(a[None])
            with probe.attach(model):
                model(b[None])
            assert traces_on(model) != before
            model(c[None])
        assert traces_on(model) == before
        probe.detach()  # once too often does no harm
        model(c[None])
        with probe.attach(model):
            model(a[None])
    assert traces_on(model) == before
    ds = probe.results()
    assert ds.length.values.tolist() == [5, 8, 6, 5]
    for i, sequence in enumerate((a, b, c, a)):
        assert_is(ds, i, "llama", sequence, len(sequence), of=traced)


def test_a_second_model_that_shares_the_configuration():
    first = tiny_model("llama", attention="sdpa")
    torch.manual_seed(5)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    (a,) = tokens(7)
    bare = second(a[None]).logits
    before = traces_on(first), traces_on(second)
    probe, other = ap.Probe(everything()), ap.Probe(everything())
    with torch.no_grad():
        with probe.attach(first):
            assert torch.equal(second(a[None]).logits, bare)
            first(a[None])
            with other.attach(second):
                second(a[None])
            first(a[None])
            assert torch.equal(second(a[None]).logits, bare)
    assert (traces_on(first), traces_on(second)) == before
    assert probe.results().length.values.tolist() == [7, 7]
    assert_is(probe.results(), 1, "llama", a, 7)
    ds = other.results()
    assert ds.length.values.tolist() == [7]
    assert float(abs(ds.phi.values - probe.results().phi.values[:1]).max()) > 1e-3


def test_two_probes_on_models_that_share_the_configuration_leave_in_the_wrong_order():
    first = tiny_model("llama", attention="sdpa")
    second = type(first)(first.config).eval()
    before = traces_on(first), traces_on(second)
    probe, other = ap.Probe(small()), ap.Probe(small())
    probe.attach(first)
    other.attach(second)
    probe.detach()
    with torch.no_grad():
        second(tokens(5)[0][None])
        first(tokens(6)[0][None])
    other.detach()
    assert (traces_on(first), traces_on(second)) == before
    assert other.results().length.values.tolist() == [5]


@pytest.mark.parametrize("other", [False, True], ids=["one probe", "a second probe after it"])
@pytest.mark.parametrize(("first", "then"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_an_implementation_that_the_user_sets_in_between_stays(first, then, other):
    model = tiny_model("llama", attention=first)
    (a,) = tokens(7)
    with ap.Probe(small()).attach(model):
        model.set_attn_implementation(then)
        assert model.config._attn_implementation == then
        if other:
            inner = ap.Probe(everything())
            with inner.attach(model), torch.no_grad():
                model(a[None])
            assert_is(inner.results(), 0, "llama", a, 7)
            assert model.config._attn_implementation.removeprefix("attnprobe_") == then
    assert model.config._attn_implementation == then
    ds, _ = run(model, lambda m: m(a[None]))
    assert_is(ds, 0, "llama", a, 7)


@pytest.mark.parametrize("then", ["sdpa", "eager"])
def test_a_forward_after_the_implementation_was_set_is_right_or_says_so(then):
    model = tiny_model("llama", attention="sdpa")
    (a,) = tokens(7)
    probe = ap.Probe(everything())
    try:
        with probe.attach(model), torch.no_grad():
            model.set_attn_implementation(then)
            model(a[None])
    except ValueError as error:
        assert "implementation" in str(error), f"not about what happened: {error}"  # noqa: PT017
    else:
        assert_is(probe.results(), 0, "llama", a, 7)
    assert model.config._attn_implementation == then


def test_a_generate_of_the_users_own_is_called_and_not_replaced(model):
    (a,) = tokens(5)
    calls = []
    original = type(model).generate

    def generate(*args, **kwargs):
        calls.append(kwargs)
        return original(model, *args, **kwargs)

    vars(model)["generate"] = generate
    try:
        probe = ap.Probe(small())
        with probe.attach(model):
            assert model.generate is generate
            model.generate(a[None], max_new_tokens=3, **FREE)
        assert model.generate is generate
        assert len(calls) == 1
        assert probe.results().length.values.tolist() == [7]
    finally:
        del vars(model)["generate"]


# -- copies of a watched model -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["attached", "detached"])
def test_a_copy_of_a_watched_model_is_a_model_of_its_own(when):
    model = tiny_model("llama", attention="sdpa")
    (a,) = tokens(6)
    probe = ap.Probe(everything())
    with contextlib.ExitStack() as stack:
        stack.enter_context(probe.attach(model))
        twin = copy.deepcopy(model)
        if when == "detached":
            stack.close()
        with torch.no_grad():
            twin.lm_head.weight.mul_(-1)
            for parameter in twin.model.layers.parameters():
                parameter.mul_(0.5)
            own = twin(a[None]).logits[0, -1].argmax()
            output = twin.generate(a[None], max_new_tokens=1, **FREE)
        assert int(output[0, -1]) == int(own), "generate of the copy runs another model"
        if when == "attached":
            with torch.no_grad():
                model(a[None])
    if when == "attached":
        ds = probe.results()
        assert ds.length.values.tolist() == [6], "the probe of the original listens to the copy"
        assert_is(ds, 0, "llama", a, 6)


def test_a_probe_on_a_copy_of_a_watched_model():
    model = tiny_model("llama", attention="sdpa")
    (a,) = tokens(6)
    with ap.Probe(small()).attach(model):
        twin = copy.deepcopy(model)
    assert "attnprobe" not in twin.config._attn_implementation or twin.config is model.config
    ds, output = run(twin, lambda m: m.generate(a[None], max_new_tokens=3, **FREE))
    assert_is(ds, 0, "llama", output[0, :-1], 6)


def test_saving_while_attached(model, tmp_path):
    (a,) = tokens(6)
    with ap.Probe(small()).attach(model):
        model.save_pretrained(tmp_path)
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
    assert "attnprobe" not in (tmp_path / "config.json").read_text()
    assert "attnprobe" not in (tmp_path / "generation_config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert torch.equal(again(a[None]).logits, model(a[None]).logits)
    assert b"attnprobe" not in weights.getvalue()


def test_pickling(model):
    """Afterwards as before; while attached it works and gives a model without us, or it fails."""
    (a,) = tokens(6)
    with ap.Probe(small()).attach(model):
        try:
            watched = pickle.dumps(model)
        except Exception:
            watched = None
    for stored in filter(None, (watched, pickle.dumps(model))):
        again = pickle.loads(stored)
        assert again.config._attn_implementation == "sdpa"
        assert not again._forward_hooks
        assert "generate" not in vars(again)
        assert torch.equal(again(a[None]).logits, model(a[None]).logits)


# -- gradients ---------------------------------------------------------------------------------------------


class Mark(torch.autograd.Function):
    """Does nothing; its node in the graph can be watched."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_forward_with_gradients_works_and_its_graph_is_not_held(attention):
    model = tiny_model("llama", attention=attention)
    (a,) = tokens(8)
    nodes = []

    def mark(module, args, output):
        marked = Mark.apply(output)
        nodes.append(weakref.ref(marked.grad_fn))
        return marked

    model.model.embed_tokens.register_forward_hook(mark)
    probe = ap.Probe(traced(), logits=True)
    with probe.attach(model, prompt_lengths=5):
        output = model(a[None])
        assert output.logits.requires_grad
        assert nodes[0]() is not None
        del output
        gc.collect()
        assert nodes[0]() is None, "the probe holds the graph of the forward"
    ds = probe.results().drop_vars(["token_log_probability", "token_entropy"])
    assert_is(ds, 0, "llama", a, 5, of=traced)


def test_gradients_are_those_without_a_probe(model):
    (a,) = tokens(8)
    parameters = [model.model.layers[0].self_attn.q_proj.weight, model.model.embed_tokens.weight]
    bare = torch.autograd.grad(model(a[None]).logits.square().mean(), parameters)
    with ap.Probe(small()).attach(model):
        watched = torch.autograd.grad(model(a[None]).logits.square().mean(), parameters)
    for one, other in zip(bare, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.abs().sum() > 0


def test_gradient_checkpointing_runs_attention_twice_and_counts_once():
    model = tiny_model("llama", attention="sdpa")
    model.train()
    model.gradient_checkpointing_enable()
    a, b = tokens(8, 6)
    probe = ap.Probe(everything())
    with probe.attach(model):
        for sequence in (a, b):
            model(sequence[None], use_cache=False).logits.square().mean().backward()
    ds = probe.results()
    assert ds.length.values.tolist() == [8, 6]
    for i, sequence in enumerate((a, b)):
        assert_is(ds, i, "llama", sequence, len(sequence))


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_of_train_mode(attention):
    model = tiny_model("llama", attention=attention, attention_dropout=0.5)
    model.train()
    before = traces_on(model)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"blocks.0.attn.*(train mode|dropout)"):
        run(model, lambda m: m(tokens(16)[0][None]))
    assert traces_on(model) == before
    model.eval()
    assert run(model, lambda m: m(tokens(16)[0][None]))[0].length.values.tolist() == [16]


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|sdpa", "my_attention"])
def test_other_implementations_are_refused(name):
    model = tiny_model("llama", attention="sdpa")
    model.config._attn_implementation_internal = name
    with pytest.raises(ValueError, match=r"attention by '.*set_attn_implementation\('sdpa'\)"):
        ap.Probe(small()).attach(model)
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("part", ["q", "k", "scores"])
def test_parts_that_only_hooks_show(model, part):
    with pytest.raises(ValueError, match=f"needs {part}, and a plain transformers model.*TransformerBridge"):
        ap.Probe([Capture(part)]).attach(model)


def test_a_head_that_is_not_there(model):
    with pytest.raises(ValueError, match="head 4 was asked for and the model has heads 0 to 3"):
        ap.Probe(small(), heads=[1, 4]).attach(model)


@pytest.mark.parametrize("pattern", ["nothing", "blocks.*.attn.hook_patern"])
def test_a_pattern_that_matches_nothing_lists_near_misses(model, pattern):
    with pytest.raises(
        ValueError, match=r"matches no attention of this model; near it: blocks\.\d\.attn\.hook_pattern"
    ):
        ap.Probe(small(), pattern=pattern).attach(model)


def test_layers_by_a_predicate(model):
    ds, _ = run(model, lambda m: m(tokens(6)[0][None]), small(), pattern=lambda name: ".2." in name)
    assert ds.layer.values.tolist() == [2]


def test_a_module_that_is_no_model():
    with pytest.raises(TypeError, match=r"a transformers model, or .*hook.*Linear is neither"):
        ap.Probe(small()).attach(torch.nn.Linear(2, 2))


def test_attaching_in_the_middle_of_a_cache(model):
    (a,) = tokens(8)
    with torch.no_grad():
        cache = model(a[None, :6], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"cache holds 6 tokens and the probe has seen 0"):
            with ap.Probe(small()).attach(model):
                model(a[None, 6:7], past_key_values=cache, use_cache=True)


def test_another_cache_of_the_same_length(model):
    a, b = tokens(6, 6)
    with ap.Probe(small()).attach(model), torch.no_grad():
        first = model(a[None], use_cache=True)
        model(b[None], use_cache=True)
        with pytest.raises(ValueError, match="cache is not the one"):
            model(torch.tensor([[7]]), past_key_values=first.past_key_values, use_cache=True)


def test_a_mask_that_is_lost_midway(model):
    ids, mask = padded(tokens(6, 4), "left")
    with pytest.raises(ValueError, match=r"came with an attention mask and this forward without"):
        with ap.Probe(small()).attach(model), torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_a_padded_batch_without_its_mask(model, how):
    """`generate` sees the padding by itself, a forward does not."""
    prompts = tokens(9, 5)
    ids, _ = padded(prompts, "left")
    if how == "forward":
        with pytest.raises(ValueError, match="looks padded with token 0 and no attention_mask"):
            run(model, lambda m: m(ids))
        return
    ds, output = run(model, lambda m: m.generate(ids, max_new_tokens=4, **FREE))
    for i, prompt in enumerate(prompts):
        assert_is(ds, i, "llama", torch.cat([prompt, output[i, 9:-1]]), len(prompt))


def test_the_model_inside_a_bridge_is_refused_in_favour_of_the_bridge():
    """load_model wraps a model in place: its attention is the bridge's from then on."""
    given = tiny_model("llama", attention="sdpa")
    ap.load_model(given)
    with pytest.raises(ValueError, match="TransformerBridge"):
        run(given, lambda m: m(tokens(6)[0][None]), small())


def test_the_forward_of_the_trunk_alone_is_not_the_forward_of_the_model(model):
    """The probe listens to the model that it is attached to: what else runs in it gives no half results."""
    (a,) = tokens(6)
    probe = ap.Probe(everything())
    with probe.attach(model), torch.no_grad():
        model(a[None])
        with pytest.raises(ValueError, match="outside a forward of the model that the probe is attached to"):
            model.model(a[None])
        assert probe.results().length.values.tolist() == [6]
        model(a[None])
    ds = probe.results()
    assert ds.length.values.tolist() == [6, 6]
    assert_is(ds, 1, "llama", a, 6)


# -- scores ------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 23, 44, 8, 61, 12, 17, 33, 70, 21], [11, 6, 15, 9], [31, 90, 4, 4, 52, 77, 3]]
ANSWERS = [[7, 80, 22], [19], [40, 41, 42, 43, 44]]
SCORED = [("llama", "sdpa"), ("gpt2", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]


def words():
    """A tokenizer whose token i is the word `w<i>`; 2 is the special token </s>."""
    vocabulary = {("</s>" if i == 2 else f"w{i}"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def assert_same_score(one, other, tolerance=1e-4):
    assert one.token_ids == other.token_ids
    assert (one.finish, one.text, one.prompt_ids) == (other.finish, other.text, other.prompt_ids)
    assert one.uncertainty.keys() == other.uncertainty.keys()
    for name, value in other.uncertainty.items():
        assert one.uncertainty[name] == pytest.approx(value, abs=tolerance), name
        ours, theirs = one.assessments[name].layers, other.assessments[name].layers
        assert [(t.layer, t.head) for t in ours] == [(t.layer, t.head) for t in theirs], name
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a.signal[1:], b.signal[1:], atol=tolerance, rtol=0, err_msg=name)
    for column in ("probability", "entropy"):
        np.testing.assert_allclose(one.tokens[column], other.tokens[column], atol=tolerance, rtol=0)


@functools.cache
def of_the_bridge(name, given):
    settings = {"completions": ANSWERS} if given else {"max_new_tokens": 6}
    rows = "renormalize" if name == "gpt_oss" else "error"
    return [
        ap.score(
            bridge(name),
            prompt,
            methods=method_names(sampled=False),
            rows=rows,
            **({"completions": [ANSWERS[i]]} if given else settings),
        )[0]
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("given", [False, True], ids=["generated", "completions"])
@pytest.mark.parametrize(("name", "attention"), SCORED)
def test_scores_are_those_of_the_bridge_in_a_batch_and_alone(name, attention, given):
    model = plain(name, attention)
    settings = {"methods": method_names(sampled=False), "rows": "renormalize" if name == "gpt_oss" else "error"}
    how = {"completions": ANSWERS} if given else {"max_new_tokens": 6}
    together = ap.score(model, PROMPTS, **settings, **how)
    how = {"completions": [ANSWERS[1]]} if given else how
    (one,) = ap.score(model, PROMPTS[1], **settings, **how)
    for score, expected in zip(
        [*together, one], [*of_the_bridge(name, given), of_the_bridge(name, given)[1]], strict=True
    ):
        assert_same_score(score, expected)


@pytest.mark.parametrize(
    "method",
    [
        ap.SAUQ(measure="unembedding"),
        ap.SAUQ(measure="zipf", layers="all"),
        ap.SAUQ(measure="positional", scope="generation", layers=[0, 2]),
        ap.RAUQ(layers="all"),
    ],
    ids=str,
)
def test_methods_with_settings(model, method):
    ours = ap.score(model, PROMPTS, methods=method, max_new_tokens=6)
    theirs = ap.score(bridge(), PROMPTS, methods=method, max_new_tokens=6)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_score(one, other)


def test_text_in_and_stop_strings(model):
    tokenizer = words()
    text = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
    free = ap.score(bridge(), text, max_new_tokens=8, tokenizer=tokenizer)
    mark = f"w{free[0].token_ids[3]}"
    for settings in ({"stop": mark}, {}, {"completions": [" ".join(f"w{i}" for i in answer) for answer in ANSWERS]}):
        ours = ap.score(model, text, methods=["SAUQ", "RAUQ"], max_new_tokens=8, tokenizer=tokenizer, **settings)
        theirs = ap.score(bridge(), text, methods=["SAUQ", "RAUQ"], max_new_tokens=8, tokenizer=tokenizer, **settings)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_score(one, other)
            assert one.prompt == other.prompt
        if "stop" in settings:
            assert ours[0].finish == "stop"
            assert mark not in ours[0].text


def test_stop_tokens_and_sampling(model, monkeypatch):
    free = ap.score(model, PROMPTS[0], max_new_tokens=6)[0].token_ids
    assert free[2] not in free[:2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", free[2])
    (score,) = ap.score(model, PROMPTS[0], max_new_tokens=6)
    assert (score.finish, score.token_ids) == ("eos", free[:3])
    draws = [ap.score(m, PROMPTS[1:], max_new_tokens=5, do_sample=True, seed=4, top_p=0.9) for m in (model, model)]
    for one, other in zip(*draws, strict=True):
        assert_same_score(one, other)


def test_a_probe_of_the_method_under_a_generate_of_ones_own(model):
    sauq = ap.SAUQ()
    probe = sauq.probe()
    with probe.attach(model):
        out = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, **FREE)
    (expected,) = ap.score(model, PROMPTS[0], max_new_tokens=8)
    assert out[0, len(PROMPTS[0]) :].tolist() == expected.token_ids
    assert sauq.score(probe)[0].uncertainty == pytest.approx(expected.uncertainty["SAUQ"], abs=1e-5)


def test_scoring_an_encoder_or_an_encoder_decoder_is_refused():
    with pytest.raises(TypeError, match="decoder-only"):
        ap.score(tiny_model("t5"), [[5, 6, 7]], max_new_tokens=2)
    with pytest.raises(ValueError, match="no causal self-attention"):
        ap.score(tiny_model("bert", attention="sdpa"), [[5, 6, 7]], max_new_tokens=2)


def test_a_failure_in_scoring_leaves_nothing(model):
    before = traces_on(model)
    with pytest.raises(Boom), raising(model.model.layers[1].mlp, Boom("mlp"), 1):
        ap.score(model, PROMPTS, max_new_tokens=4)
    assert traces_on(model) == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_load_model_gives_the_plain_model(attention):
    given = tiny_model("llama", attention=attention)
    tokenizer = words()
    model = ap.load_model(given, host="transformers", tokenizer=tokenizer)
    assert model is given
    assert model.config._attn_implementation == attention
    (ours,) = ap.score(model, "w5 w9 w23", max_new_tokens=4)
    (theirs,) = ap.score(tiny_bridge("llama"), "w5 w9 w23", max_new_tokens=4, tokenizer=tokenizer)
    assert_same_score(ours, theirs)


def test_load_model_from_a_folder_is_on_sdpa(tmp_path):
    plain().save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    model = ap.load_model(tmp_path, host="transformers")
    assert model.config._attn_implementation == "sdpa"
    (score,) = ap.score(model, "w5 w9 w23", max_new_tokens=4)
    assert score.token_ids == ap.score(plain(), [[5, 9, 23]], max_new_tokens=4)[0].token_ids
    assert score.text == " ".join(f"w{i}" for i in score.token_ids)
