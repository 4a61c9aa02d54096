"""What the results look like: labels, attributes, files, and analyzers of one's own."""

from importlib.metadata import version

import numpy as np
import pytest
import torch
import xarray as xr
from probe.support import FREE, bridge, everything, padded, tokens

import attnprobe as ap

FIVE = (ap.IntrinsicTDO, ap.MeanRoutingSplit, ap.SpectralEntropyBound, ap.TransportCapacity, ap.Asymmetry)


@pytest.fixture(scope="module")
def ds():
    model = bridge("llama")
    a, b = tokens(7, 5)
    probe = ap.Probe([kind(trace=True) for kind in FIVE], layers="middle", logits=True)
    with probe.attach(model):
        model.generate(a[None], max_new_tokens=4, **FREE)
        model.generate(torch.stack([b, b]), max_new_tokens=6, **FREE)
    return probe.results()


def test_dimensions_and_coordinates(ds):
    assert dict(ds.sizes) == {"sequence": 3, "layer": 2, "head": 4, "step": 6}
    assert ds.sequence.values.tolist() == [0, 1, 2]
    assert ds.layer.values.tolist() == [1, 2]
    assert ds["head"].values.tolist() == [0, 1, 2, 3]
    assert ds.step.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert ds.call.values.tolist() == [0, 1, 1]
    assert ds.length.values.tolist() == [10, 10, 10]
    assert ds.prompt_length.values.tolist() == [7, 5, 5]
    assert ds.attrs["n_layers"] == 3


def test_final_values_and_traces(ds):
    expected = {
        "participation_ratio",
        "lambda2",
        "mean_energy",
        "routed_energy",
        "routed_fraction",
        "value_energy",
        "gain",
        "gain_bound",
        "entropy",
        "centered_entropy",
        "entropy_lower",
        "entropy_upper",
        "phi",
        "cut",
        "asymmetry",
        "asymmetry_gradient",
        "asymmetry_curl",
    }
    traces = {f"{name}_trace" for name in expected - {"lambda2", "gain_bound"}}
    assert set(ds.data_vars) == expected | traces | {"token_log_probability", "token_entropy"}
    for name in expected:
        assert ds[name].dims == ("sequence", "layer", "head")
        assert not ds[name].isnull().any(), name
    for name in traces:
        assert ds[name].dims == ("sequence", "layer", "head", "step")
        assert ds[name].isel(sequence=0, step=slice(4, None)).isnull().all(), name
        assert not ds[name].isel(sequence=1).isnull().any(), name
        last = ds[name].isel(sequence=1, step=5)
        np.testing.assert_allclose(last, ds[name.removesuffix("_trace")].isel(sequence=1), rtol=1e-4, atol=1e-5)


def test_selection_by_label(ds):
    value = ds.participation_ratio.sel(layer=2, head=3, sequence=1)
    assert float(value) == float(ds.participation_ratio.values[1, 1, 3])
    with pytest.raises(KeyError):
        ds.sel(layer=0)
    traced = ds.phi_trace.sel(layer=1, head=0, step=2)
    assert traced.values.tolist() == ds.phi_trace.values[:, 0, 0, 1].tolist()


def test_units_and_sources(ds):
    for name in ds.data_vars:
        assert ds[name].attrs.get("units"), name
        assert ds[name].attrs.get("long_name"), name
    assert ds.entropy.attrs["units"] == "nats"
    assert ds.token_log_probability.attrs["units"] == "nats"
    assert "2610.06012" in ds.participation_ratio.attrs["source"]
    assert "2605.04893" in ds.phi.attrs["source"]
    assert ds.participation_ratio.attrs["measure"] == "intrinsic"
    assert "step" in ds.phi_trace.attrs
    assert ds.length.attrs["units"] == "tokens"


def test_saved_and_loaded_without_pickle(ds, tmp_path, monkeypatch):
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    path = tmp_path / "results.nc"
    ds.to_netcdf(path)
    again = xr.load_dataset(path)
    xr.testing.assert_identical(again, ds)
    assert again.sel(layer=1, head=2).phi.dims == ("sequence",)


def test_the_engine_that_is_declared_as_a_dependency_can_write(ds, tmp_path):
    """A clean installation has h5netcdf and no netCDF4: it must be able to save."""
    ds.to_netcdf(tmp_path / "results.nc", engine="h5netcdf")
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "results.nc", engine="h5netcdf"), ds)


@pytest.mark.skipif(version("transformer_lens").startswith("3."), reason="the T5 bridge of 3.9 does not run")
def test_results_of_stacks_by_name_can_be_saved(tmp_path):
    model = bridge("t5")
    probe = ap.Probe([ap.IntrinsicTDO()], pattern="*.hook_pattern")
    with probe.attach(model), torch.no_grad():
        model(tokens(6)[0][None], decoder_input_ids=tokens(4)[0][None])
    ds = probe.results()
    assert ds.sizes["layer"] == 6
    ds.to_netcdf(tmp_path / "t5.nc")
    again = xr.load_dataset(tmp_path / "t5.nc")
    assert again.layer.values.tolist() == ds.layer.values.tolist()
    np.testing.assert_array_equal(again.participation_ratio, ds.participation_ratio)


def test_reading_results_twice_changes_nothing():
    model = bridge("llama")
    (a,) = tokens(7)
    probe = ap.Probe(everything())
    with probe.attach(model):
        model.generate(a[None], max_new_tokens=4, **FREE)
        first = probe.results()
        xr.testing.assert_identical(first, probe.results())
    xr.testing.assert_identical(first, probe.results())


class SinkMass(ap.Analyzer):
    """Mean attention to the first token."""

    variables = {"sink_mass": {"long_name": "attention to the first token", "units": "1"}}  # noqa: RUF012

    def update(self, rows):
        self.accumulate(mass=rows.pattern[..., 0].sum(-1), rows=rows.count[:, None])

    def compute(self):
        return {"sink_mass": self.total["mass"] / self.total["rows"]}


class Everything(ap.Analyzer):
    """Uses every part a row can carry, and reports a vector over positions."""

    needs = ("pattern", "z", "v", "q", "k", "scores", "tokens")

    def update(self, rows):
        norms = torch.where(rows.valid[..., None], rows.z.square().sum(-1), 0.0).sum(1)
        assert rows.scores.shape == rows.pattern.shape
        assert rows.q.shape == rows.z.shape
        assert rows.k.shape == rows.v.shape
        assert rows.tokens.shape == (rows.pattern.shape[0], rows.pattern.shape[-1])
        self.accumulate(norms=norms, received=rows.pattern.sum(-2), rows=rows.count[:, None])

    def compute(self):
        return {"output": self.total["norms"] / self.total["rows"], "received": self.total["received"]}


@pytest.mark.parametrize("trace", [False, True])
def test_an_analyzer_of_ones_own_in_a_probe(trace):
    model = bridge("llama")
    a, b = tokens(7, 4)
    from probe.support import padded

    ids, mask = padded([a, b], "left")
    probe = ap.Probe([SinkMass(trace=trace), Everything(trace=trace), ap.IntrinsicTDO()])
    with probe.attach(model):
        output = model.generate(ids, attention_mask=mask, max_new_tokens=12, **FREE)
    ds = probe.results()
    assert ds.sink_mass.attrs["units"] == "1"
    assert ds.received.dims == ("sequence", "layer", "head", "position")
    assert ("sink_mass_trace" in ds) == trace
    for i, prompt in enumerate((a, b)):
        finished = torch.cat([prompt, output[i, 7:-1]])
        _, cache = model.run_with_cache(finished[None])
        n = len(finished)
        for layer in range(3):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
            one = ds.sel(layer=layer).isel(sequence=i)
            np.testing.assert_allclose(one.sink_mass, pattern[..., 0].mean(-1), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(one.received[:, :n], pattern.sum(-2), rtol=1e-5, atol=1e-5)
            assert not one.received[:, n:].fillna(0).any()
            z = cache[f"blocks.{layer}.attn.hook_z"][0]
            np.testing.assert_allclose(one.output, z.square().sum(-1).mean(0), rtol=1e-4, atol=1e-5)
            if trace:
                steps = [pattern[:, : len(prompt) + t, 0].mean(-1) for t in range(12)]
                np.testing.assert_allclose(one.sink_mass_trace, torch.stack(steps, -1), rtol=1e-5, atol=1e-5)


def test_the_landscape_of_sequences_of_different_length():
    model = bridge("llama")
    a, b = tokens(9, 5)
    probe = ap.Probe([ap.TransportCapacity(landscape=True)])
    with probe.attach(model), torch.no_grad():
        model(a[None])
        model(b[None])
    ds = probe.results()
    assert ds.landscape.dims == ("sequence", "layer", "head", "position")
    for i, sequence in enumerate((a, b)):
        _, cache = model.run_with_cache(sequence[None])
        expected = ap.functional.prefix_landscape(cache["blocks.1.attn.hook_pattern"][0].double())
        n = len(sequence) - 1
        np.testing.assert_allclose(ds.landscape.sel(layer=1)[i, :, :n], expected, rtol=1e-5, atol=1e-5)
        assert ds.landscape.sel(layer=1)[i, :, n:].isnull().all()


class Softmax(ap.Analyzer):
    """How far the softmax of the scores is from the pattern."""

    needs = ("pattern", "scores")

    def update(self, rows):
        causal = torch.arange(rows.n_key) <= rows.position.clamp_min(0)[:, None, :, None]
        scores = torch.where(causal, rows.scores, -torch.inf)
        real = rows.valid[:, None, :, None]
        off = torch.where(real, (scores.softmax(-1) - rows.pattern).abs(), 0.0).amax((-2, -1))
        self.accumulate(off=off)

    def compute(self):
        return {"off": self.total["off"]}


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_before_the_softmax_in_a_padded_batch(name, side):
    model = bridge(name)
    ids, mask = padded(tokens(9, 5), side)
    probe = ap.Probe([Softmax()])
    with probe.attach(model), torch.no_grad():
        model(ids, attention_mask=mask)
        if side == "left":
            model.generate(tokens(6)[0][None], max_new_tokens=40, **FREE)
    off = probe.results().off.values
    assert off.shape[0] == (3 if side == "left" else 2)
    np.testing.assert_allclose(off, 0.0, atol=2e-5)


@pytest.mark.parametrize("measure", ["zipf", "unembedding"])
def test_measures_over_tokens_in_a_padded_batch(measure):
    from probe.support import alone, assert_sequence, padded

    model = bridge("llama")
    a, b = tokens(8, 5)
    ids, mask = padded([a, b], "left")
    analyzers = [ap.TDO(measure, trace=True), ap.TDO(measure, scope="generation", trace=True)]
    probe = ap.Probe(analyzers)
    with probe.attach(model):
        output = model.generate(ids, attention_mask=mask, max_new_tokens=5, **FREE)
    ds = probe.results()
    for i, prompt in enumerate((a, b)):
        finished = torch.cat([prompt, output[i, 8:-1]])
        assert_sequence(ds, i, alone(model, finished, len(prompt), analyzers))
    finished = torch.cat([a, output[0, 8:-1]])
    _, cache = model.run_with_cache(finished[None])
    pattern = cache["blocks.2.attn.hook_pattern"][0].double()
    if measure == "zipf":
        mu = ap.functional.zipf_measure(finished)
    else:
        unembedding = model.original_model.get_output_embeddings().weight.detach()
        mu = ap.functional.unembedding_measure(finished, ap.functional.leverage_scores(unembedding))
    expected = ap.functional.participation_ratio(pattern, mu)
    np.testing.assert_allclose(ds[f"participation_ratio_{measure}"].sel(layer=2)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_probe_says_what_it_is():
    probe = ap.Probe([ap.IntrinsicTDO(), ap.Asymmetry()], layers=[1], heads=[0, 2])
    assert repr(probe) == "Probe([IntrinsicTDO, Asymmetry], layers=(1,), heads=[0, 2])"
