"""A strided trace: the exact value at every k-th step of each sequence, from its first one on, and held between."""

import functools

import numpy as np
import pytest
import torch
from hosts.capture import Capture, whole
from probe.support import FREE, alone, assert_sequence, bridge, everything, padded, tokens
from tiny import tiny_model

import attnprobe as ap

HF_FREE = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def plain(name="llama", attention="sdpa"):
    model = tiny_model(name, attention=attention)
    model.generation_config.eos_token_id = None
    return model


HOSTS = {
    "bridge": bridge,
    "sdpa": plain,
    "eager": lambda: plain("llama", "eager"),
    "mistral": lambda: plain("mistral"),
}


def strided(analyzers, strides):
    """The analyzers with these strides, one for all or in turn."""
    strides = [strides] if isinstance(strides, int) else strides
    for i, analyzer in enumerate(analyzers):
        analyzer.stride = strides[i % len(strides)]
    return analyzers


def held(value, stride):
    """Every stride-th entry of the last axis, repeated until the next."""
    value = np.asarray(value)
    return value[..., (np.arange(value.shape[-1]) // stride) * stride]


def traced_name(name):
    return f"{name}_trace"


def names_of(analyzer):
    return [name for name in analyzer.variables if name != "gain_bound" and not name.startswith("lambda2")]


def assert_held(found, exact, analyzers, tolerance=1e-5):
    """Every trace of `found` is that of `exact`, held; every other variable is the same."""
    strides = {traced_name(name): analyzer.stride for analyzer in analyzers for name in names_of(analyzer)}
    expected = exact.copy(deep=True)
    assert set(found.data_vars) == set(exact.data_vars)
    for name, stride in strides.items():
        if name in expected:
            # NaN at the end is where a shorter sequence is over
            for i in range(exact.sizes["sequence"]):
                steps = int(exact.length[i] - exact.prompt_length[i]) + 1
                value = exact[name].values[i].copy()
                value[..., :steps] = held(value[..., :steps], stride)
                expected[name].values[i] = value
    changed = [name for name in strides if name in exact and not np.array_equal(expected[name], exact[name], True)]
    assert changed or all(stride == 1 for stride in strides.values()), "holding would change nothing"
    for i in range(exact.sizes["sequence"]):
        assert_sequence(found, i, expected.isel(sequence=[i]), tolerance)


def run(model, call, analyzers, prompt_lengths=None, **settings):
    probe = ap.Probe(analyzers, **settings)
    with probe.attach(model, prompt_lengths=prompt_lengths), torch.no_grad():
        output = call(model)
    return probe.results(), output


def generating(model, prompts, new):
    """A padded generate on either host."""
    ids, mask = padded(prompts, "left")
    free = FREE if hasattr(model, "hook_dict") else HF_FREE
    return lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=new, **free)


# -- against the definition --------------------------------------------------------------------------------


class Reach(ap.Analyzer):
    """Mean distance looked back; the trace is the general one of the base class."""

    variables = {"reach": {"long_name": "mean distance", "units": "tokens"}}  # noqa: RUF012

    def update(self, rows):
        key = torch.arange(rows.n_key)
        distance = (rows.position[:, :, None] - key).clamp_min(0)
        self.accumulate(reach=(rows.pattern * distance[:, None]).sum((-1, -2)), rows=rows.count[:, None])

    def compute(self):
        return {"reach": self.total["reach"] / self.total["rows"]}


@pytest.mark.parametrize("stride", [2, 3, 7, 50])
@pytest.mark.parametrize("host", HOSTS)
def test_the_dense_value_of_the_prefix_at_every_kth_step(host, stride):
    model = HOSTS[host]()
    (prompt,) = tokens(5)
    new = 9
    capture = Capture()
    analyzers = strided(
        [
            ap.IntrinsicTDO(trace=True),
            ap.TransportCapacity(trace=True),
            ap.Asymmetry(trace=True),
            ap.IntrinsicTDO(scope="generation", lambda2=False, trace=True),
            Reach(trace=True),
        ],
        stride,
    )
    ds, output = run(model, generating(model, [prompt], new), [*analyzers, capture])
    assert output.shape == (1, 5 + new)
    assert ds.sizes["step"] == new
    for layer, chunks in enumerate(capture.sites(0, 3)):
        pattern = whole(chunks)[0].double()
        pattern = pattern / pattern.sum(-1, keepdim=True)
        for t in range(new):
            n = 5 + (t // stride) * stride
            prefix = pattern[:, :n, :n]
            lag = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0)
            expected = {
                "participation_ratio": ap.functional.participation_ratio(prefix),
                "phi": ap.functional.prefix_capacity(prefix).phi,
                "asymmetry": ap.functional.asymmetry(prefix),
                "reach": (prefix * lag).sum((-1, -2)) / n,
                "participation_ratio_generation": torch.full((4,), torch.nan)
                if n == 5
                else ap.functional.participation_ratio(prefix[:, 5:, 5:], rows="renormalize"),
            }
            for name, value in expected.items():
                found = ds[traced_name(name)].sel(layer=layer).values[0, :, t]
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5, err_msg=f"{name}, step {t + 1}")


# -- every analyzer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", [1, 2, 5, [1, 2, 3], [4, 1]], ids=str)
def test_every_analyzer_and_mixed_strides(strides):
    prompts = tokens(7, 3)
    call = generating(plain(), prompts, 9)
    exact, output = run(plain(), call, everything())
    analyzers = strided(everything(), strides)
    found, again = run(plain(), call, analyzers)
    assert torch.equal(output, again)
    assert_held(found, exact, analyzers)


@pytest.mark.parametrize("host", ["bridge", "mistral"])
def test_a_padded_batch_is_what_each_sequence_is_alone(host):
    model = HOSTS[host]()
    prompts = tokens(9, 3, 6)
    call = generating(model, prompts, 8)
    ds, output = run(model, call, strided(everything(), [3, 2]))
    for i, prompt in enumerate(prompts):
        finished = torch.cat([prompt, output[i, 9:-1]])
        one = alone(model, finished, len(prompt), strided(everything(), [3, 2]))
        assert_sequence(ds, i, one, 2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_with_prompts_of_different_lengths_in_one_forward(side):
    model, sequences, prompts = plain(), tokens(14, 9, 11), [10, 4, 11]
    ids, mask = padded(sequences, side)

    def read(m):
        m(ids, attention_mask=mask)

    exact, _ = run(model, read, everything(), prompts)
    analyzers = strided(everything(), 3)
    found, _ = run(model, read, analyzers, prompts)
    assert_held(found, exact, analyzers)
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert_sequence(found, i, alone(model, sequence, prompt, strided(everything(), 3)), 2e-5)


def test_sequences_that_end_at_different_steps():
    model = plain()
    for seed in range(100):
        prompts = tokens(6, 4, seed=seed)
        ids, mask = padded(prompts, "left")
        settings = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        free = model.generate(ids, **{**settings, "eos_token_id": None})[:, 6:]
        stop = int(free[0, 3])
        if stop not in free[0, :3].tolist() and stop not in free[1].tolist():
            break
    ds, output = run(model, lambda m: m.generate(ids, eos_token_id=stop, **settings), strided(everything(), 2))
    assert ds.length.values.tolist() == [9, 12]
    for i, n in enumerate((3, 8)):
        finished = torch.cat([prompts[i], output[i, 6 : 6 + n]])
        one = alone(model, finished, len(prompts[i]), strided(everything(), 2))
        assert_sequence(ds, i, one, 2e-5)


# -- in pieces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[3], [1, 2, 7], [8, 9, 10, 13]])
def test_a_text_in_cached_chunks(cuts):
    (sequence,) = tokens(14)

    def chunked(model):
        cache = None
        for low, high in zip([0, *cuts], [*cuts, 14], strict=True):
            cache = model(sequence[None, low:high], past_key_values=cache, use_cache=True).past_key_values

    ds, _ = run(plain(), chunked, strided(everything(), 3), 6)
    assert_sequence(ds, 0, alone(plain(), sequence, 6, strided(everything(), 3)), 2e-5)


def test_a_prompt_in_chunks_and_one_that_grows():
    model = plain()
    (prompt,), (more,) = tokens(9), tokens(4, seed=3)

    def talk(m):
        first = m.generate(
            prompt[None], max_new_tokens=5, prefill_chunk_size=4, return_dict_in_generate=True, **HF_FREE
        )
        longer = torch.cat([first.sequences, more[None]], 1)
        return m.generate(longer, past_key_values=first.past_key_values, max_new_tokens=7, **HF_FREE)

    ds, output = run(model, talk, strided(everything(), 2))
    assert ds.prompt_length.values.tolist() == [18]
    assert_sequence(ds, 0, alone(model, output[0, :-1], 18, strided(everything(), 2)), 2e-5)


def test_long_generation_crosses_every_buffer():
    """The count of steps goes on across the rows that wait for one another."""
    model = plain()
    (prompt,) = tokens(10)
    analyzers = [ap.TransportCapacity(trace=True), ap.IntrinsicTDO(lambda2=False, trace=True), Reach(trace=True)]
    call = generating(model, [prompt], 80)
    exact, _ = run(model, call, analyzers)
    for stride in (7, 64):
        found, _ = run(model, call, strided(analyzers, stride))
        assert_held(found, exact, analyzers, 1e-4)


def test_results_may_be_read_between_two_strides():
    """Reading lets the waiting rows go on, and must not start the count anew."""
    model = plain()
    (prompt,) = tokens(12)
    expected = {n: alone(model, prompt[:n], 5, strided(everything(), 3)) for n in (7, 8, 11, 12)}
    probe = ap.Probe(strided(everything(), 3))
    with probe.attach(model), torch.no_grad():
        cache = model(prompt[None, :5], use_cache=True).past_key_values
        for i in range(5, 12):
            model(prompt[None, i : i + 1], past_key_values=cache, use_cache=True)
            if i + 1 in expected:
                assert_sequence(probe.results(), 0, expected[i + 1], 2e-5)


# -- what is held ------------------------------------------------------------------------------------------


class Odd(ap.Analyzer):
    """How many rows there were; no number where they are an odd number."""

    variables = {"rows": {}}  # noqa: RUF012

    def update(self, rows):
        self.accumulate(rows=rows.count[:, None].expand(-1, rows.n_head))

    def compute(self):
        rows = self.total["rows"]
        return {"rows": torch.where(rows % 2 == 1, torch.nan, rows.double())}


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_step_that_has_no_number_has_none(stride):
    """An older value must not stand for it: with a prompt of 4, the values are 4, nan, 6, nan, 8, ..."""
    (prompt,) = tokens(4)
    exact, _ = run(plain(), generating(plain(), [prompt], 8), [Odd(trace=True)])
    assert exact["rows_trace"].values[0, 0, 0].tolist()[::2] == [4, 6, 8, 10]
    found, _ = run(plain(), generating(plain(), [prompt], 8), strided([Odd(trace=True)], stride))
    np.testing.assert_array_equal(found["rows_trace"], held(exact["rows_trace"], stride))


class Counted(Reach):
    """Says how often it was asked."""

    asked = 0

    def trace_rows(self, rows):
        type(self).asked += rows.n_query
        return super().trace_rows(rows)


def test_a_strided_trace_is_asked_less_often():
    (prompt,) = tokens(6)
    counts = []
    for stride in (1, 4):
        Counted.asked = 0
        run(plain(), generating(plain(), [prompt], 20), strided([Counted(trace=True)], stride), layers=[1])
        counts.append(Counted.asked)
    assert counts == [20, 5]


def test_final_values_do_not_depend_on_the_stride():
    (prompt,) = tokens(20)
    datasets = []
    for stride in (1, 4, 1000):
        analyzers = strided([ap.IntrinsicTDO(trace=True), ap.MeanRoutingSplit(trace=True), ap.Asymmetry()], stride)
        datasets.append(run(plain(), generating(plain(), [prompt], 12), analyzers)[0])
    for ds in datasets[1:]:
        for name in ("participation_ratio", "lambda2", "routed_fraction", "gain_bound", "asymmetry"):
            np.testing.assert_allclose(ds[name], datasets[0][name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_trace_without_a_single_step():
    """A prompt that is all there is: one step, and with a stride as well."""
    (prompt,) = tokens(6)
    exact, _ = run(plain(), lambda m: m(prompt[None]), everything())
    found, _ = run(plain(), lambda m: m(prompt[None]), strided(everything(), 4))
    assert found.sizes["step"] == 1
    assert_sequence(found, 0, exact)


def test_sequences_of_several_calls_count_their_own_steps():
    model = plain()
    prompts = tokens(5, 8)
    probe = ap.Probe(strided(everything(), 3))
    with probe.attach(model), torch.no_grad():
        outputs = [
            model.generate(prompt[None], max_new_tokens=new, **HF_FREE)
            for prompt, new in zip(prompts, (4, 6), strict=True)
        ]
    ds = probe.results()
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert_sequence(ds, i, alone(model, output[0, :-1], len(prompt), strided(everything(), 3)), 2e-5)


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [0, -1, 1.5, True, "2", None])
def test_a_stride_that_is_no_number_of_steps(stride):
    with pytest.raises(ValueError, match=r"stride=.*a whole number of steps, at least 1"):
        Reach(trace=True, stride=stride)


def test_the_stride_of_a_custom_analyzer_is_an_argument():
    analyzer = Reach(trace=True, stride=np.int64(3))
    assert (analyzer.trace, analyzer.stride) == (True, 3)
    assert "stride=3" in repr(analyzer)
    assert analyzer.start().stride == 3
    (prompt,) = tokens(5)
    exact, _ = run(plain(), generating(plain(), [prompt], 7), [Reach(trace=True)])
    found, _ = run(plain(), generating(plain(), [prompt], 7), [analyzer])
    assert_held(found, exact, [analyzer])


# -- scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [2, 3])
def test_a_strided_sauq_is_the_same_on_every_host(stride):
    prompts = [prompt.tolist() for prompt in tokens(9, 4)]
    method = ap.SAUQ(stride=stride, layers="all")
    scores = {
        host: ap.score(HOSTS[host](), prompts, methods=method, max_new_tokens=8) for host in ("bridge", "sdpa", "eager")
    }
    exact = ap.score(bridge(), prompts, methods=ap.SAUQ(layers="all"), max_new_tokens=8)
    for i in range(2):
        for host in ("sdpa", "eager"):
            one, other = scores[host][i], scores["bridge"][i]
            assert one.token_ids == other.token_ids
            assert one.uncertainty[method.name] == pytest.approx(other.uncertainty[method.name], abs=1e-4)
        ours, theirs = scores["bridge"][i].assessments[method.name].layers, exact[i].assessments["SAUQ"].layers
        for a, b in zip(ours, theirs, strict=True):
            assert (a.layer, a.head) == (b.layer, b.head)
            np.testing.assert_allclose(a.signal[1:], held(b.signal, stride)[1:], rtol=0, atol=1e-5)
            assert not np.allclose(a.signal[1:], b.signal[1:], rtol=0, atol=1e-5)
