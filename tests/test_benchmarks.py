"""The benchmark suite runs on a tiny model: every variant does the work, and the results have the promised form."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import tiny_model
from typer.testing import CliRunner

import attnprobe as ap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine, peak_memory, scaling, synchronisation
from benchmarks.measure import Figures, check_tokens
from benchmarks.run import Plan, app, run, workloads
from benchmarks.state_size import state_bytes, tensor_bytes
from benchmarks.variants import Subject, variants_of
from benchmarks.workload import HOSTS, Workload, as_host, load, never_ending, prompt_ids


def tiny(host: str, **changes: int) -> Workload:
    return Workload(**{"host": host, "model": "tiny", "prompt": 16, "new_tokens": 4, **changes})


def load_tiny(workload: Workload):
    return as_host(tiny_model("llama", attention="sdpa"), workload.host)


def results_of(*listed: Workload, **settings):
    plan = Plan(list(listed), **{"variants": None, "repeats": 2, "memory": False, **settings})
    *_, results = run(plan, Console(file=io.StringIO()), load_tiny)
    return results


@pytest.mark.parametrize("host", HOSTS)
def test_every_variant_generates_as_many_tokens_and_is_compared_with_the_bare_host(host):
    results = json.loads(json.dumps(results_of(tiny(host))))
    (point,) = results["points"]
    assert point["workload"]["host"] == host
    assert [row["variant"] for row in point["rows"]] == [variant.name for variant in variants_of(host)]
    for row in point["rows"]:
        if row["variant"] == "lm-polygraph-rauq" and row["status"] == "not installed":
            continue
        assert row["status"] == "ok", row
        assert row["same_tokens_as_bare"] is True, row["variant"]
        assert len(row["ratio"]["rounds"]) == 2
        assert min(row["ratio"]["rounds"]) > 0
        assert (row["state_bytes"] is not None) == (row["variant"] in PROBED), row["variant"]
        assert (row["own_ratio"] is not None) == (row["variant"] in PROBED | {"score-sauq"}), row["variant"]
        assert row["own_ratio"] is None or min(row["own_ratio"]["rounds"]) > 1
    assert point["rows"][0]["variant"] == "bare"
    assert point["rows"][0]["ratio"]["rounds"] == [1.0, 1.0]
    assert results["machine"]["threads"] == 1
    assert results["machine"]["versions"]["torch"]


PROBED = {"five", "five-sketch", "without-tdo"} | {v.name for v in variants_of("transformers") if v.scaled}


@pytest.mark.parametrize("host", HOSTS)
def test_a_batch_and_fewer_heads_are_measured_too(host):
    results = results_of(tiny(host, batch=2), tiny(host, heads=1), variants=["without-tdo", "score-sauq"], repeats=1)
    assert [point["workload"]["batch"] for point in results["points"]] == [2, 1]
    assert {row["status"] for point in results["points"] for row in point["rows"]} == {"ok"}
    states = [point["rows"][1]["state_bytes"] for point in results["points"]]
    assert states[0] > states[1]


@pytest.mark.parametrize("host", HOSTS)
def test_the_end_of_text_token_ends_no_generation(host):
    workload = tiny(host, new_tokens=8)
    model = load_tiny(workload)
    ids = prompt_ids(model, workload)
    (bare, *_) = variants_of(host, ["bare"])
    run_bare = bare.make(Subject(model, ids, workload))
    first = int(run_bare()[0, 1])
    original = getattr(model, "original_model", model)
    original.generation_config.eos_token_id = original.config.eos_token_id = first
    if host == "transformers":
        with pytest.raises(RuntimeError, match="ended early"):
            check_tokens(run_bare(), workload)
    never_ending(model)
    check_tokens(run_bare(), workload)
    (answer,) = ap.score(model, ids.tolist(), max_new_tokens=8)
    assert len(answer.token_ids) == 8


def test_what_is_not_installed_or_fails_has_a_row_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_polygraph", None)
    (point,) = results_of(tiny("transformers"), variants=["lm-polygraph-rauq"], repeats=1)["points"]
    assert [row["status"] for row in point["rows"]] == ["ok", "not installed"]
    assert "lm-polygraph is not installed" in point["rows"][1]["reason"]
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1000)
    (point,) = results_of(tiny("transformers"), variants=["attentions"], repeats=1)["points"]
    assert [row["status"] for row in point["rows"]] == ["ok", "out of memory"]
    assert "GB are free" in point["rows"][1]["reason"]
    monkeypatch.setattr(ap, "score", lambda *args, **options: [])
    (point,) = results_of(tiny("transformers"), variants=["score-sauq"], repeats=1)["points"]
    assert [row["status"] for row in point["rows"]] == ["ok", "failed"]


def test_the_slope_is_the_exponent():
    n = [128, 256, 512, 1024]
    assert scaling.slope(n, [float(x) ** 2 for x in n]) == pytest.approx(2.0, abs=1e-12)
    assert scaling.slope([*n, 2048], [None, *(3.0 * x for x in n[1:]), 3.0 * 2048]) == pytest.approx(1.0, abs=1e-12)
    assert scaling.slope(n, [None, None, 1.0, 2.0]) is None


def test_growth_leaves_out_what_is_not_above_noise():
    points = []
    for prompt in (96, 192, 384, 768):
        row = Figures(tiny("transformers", prompt=prompt, new_tokens=1), "tdo", peak_mb=1000.0, bare_peak_mb=999.0)
        row.bare_seconds = [1.0] * 4
        row.seconds = [1.0 + (prompt + 1) / 1e4] * 4 if prompt > 96 else [0.9, 1.1, 0.9, 1.1]
        row.state_bytes = (prompt + 1) ** 2
        points.append([row])
    (one,) = scaling.growth(points, ["tdo", "absent"])
    assert one.n == [97, 193, 385, 769]
    assert one.seconds[0] is None
    slopes = one.slopes()
    assert slopes["seconds"] == pytest.approx(1.0, abs=1e-6)
    assert slopes["state_bytes"] == pytest.approx(2.0, abs=1e-9)
    assert slopes["peak_mb"] is None


def test_the_state_of_an_exact_tdo_grows_with_the_square_and_that_of_the_others_does_not():
    results = results_of(
        *(tiny("transformers", prompt=prompt) for prompt in (28, 60, 124)),
        variants=["tdo", "transport"],
        repeats=1,
        scaling=True,
    )
    grown = {one["variant"]: one for one in results["scaling"]}
    assert grown["tdo"]["n"] == [32, 64, 128]
    assert grown["transport"]["slopes"]["state_bytes"] < 1.1
    assert grown["tdo"]["state_bytes"][-1] > 4 * grown["transport"]["state_bytes"][-1]


def test_a_storage_is_counted_once_and_a_model_not_at_all():
    whole = torch.zeros(8, dtype=torch.float64)
    assert tensor_bytes({"a": [whole, whole[2:]], "b": (torch.zeros(2),)}) == 8 * 8 + 2 * 4
    workload = tiny("transformers")
    model = load_tiny(workload)
    probe = ap.Probe([ap.TransportCapacity()])
    with probe.attach(model):
        model(prompt_ids(model, workload))
    held = state_bytes(probe)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert 0 < held < weights


def test_waits_of_a_decode_step_are_counted(monkeypatch):
    monkeypatch.setattr(synchronisation, "SHORT", 1)
    monkeypatch.setattr(synchronisation, "STEPS", 2)
    waits = results_of(tiny("transformers"), variants=["bare"], repeats=0, waits=True)["waits"]["transformers"]
    assert waits["events_per_decode_step"]["bare"]["aten::_local_scalar_dense"] >= 0
    assert set(waits["added_by_the_probe"]) == {"five", "five-traced", "without-tdo"}


def test_a_repeated_option_is_an_axis():
    listed = workloads("tiny", {"host": ["transformers"], "prompt": ["16", "32"]}, axis="batch")
    assert [(one.prompt, one.batch) for one in listed] == [(16, 1), (32, 1), (16, 2), (32, 2), (16, 4), (32, 4)]
    assert {one.heads for one in workloads("tiny", {}, axis="heads")} == {1, 4, None}
    assert {one.host for one in workloads("tiny", {})} == set(HOSTS)
    with pytest.raises(ValueError, match="unknown axis"):
        workloads("tiny", {}, axis="colour")
    with pytest.raises(ValueError, match="whole numbers"):
        workloads("tiny", {"prompt": ["many"]})
    with pytest.raises(ValueError, match="unknown dtype"):
        workloads("tiny", {"dtype": ["floating"]})
    with pytest.raises(ValueError, match="at least 1"):
        workloads("tiny", {"prompt": ["0"]})


def test_the_peak_of_a_process_is_told(monkeypatch, capsys):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read where Linux shows it")
    described = json.dumps({"host": "transformers", "model": "random-llama-tiny", "prompt": 16, "new_tokens": 4})
    monkeypatch.setattr(sys, "argv", ["peak_memory.py", described, "bare"])
    peak_memory.main()
    assert 0 <= float(capsys.readouterr().out) < 50


def test_random_weights_need_no_tokenizer_and_attend_unevenly():
    workload = Workload(host="transformers", model="random-llama-tiny", prompt=16, new_tokens=4, batch=2)
    model = load(workload)
    ids = prompt_ids(model, workload)
    assert ids.shape == (2, 16)
    assert ids[0].tolist() != ids[1].tolist()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        pattern = model(ids, output_attentions=True).attentions[1]
    assert pattern[:, :, -1].amax() > 3 / 16


def test_the_command_writes_what_it_measured(tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--model", "random-llama-tiny", "--host", "transformers", "--prompt", "16", "--new-tokens", "4"]
    arguments += ["--variants", "eager,transport", "--repeats", "1", "--no-memory", "--output", str(output)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    written = json.loads(output.read_text())
    assert written["schema"] == 1
    assert [row["variant"] for row in written["points"][0]["rows"]] == ["bare", "eager", "transport"]
    refused = CliRunner().invoke(app, ["--variants", "unheard-of", "--model", "random-llama-tiny"])
    assert refused.exit_code == 2
    assert "unknown variants" in refused.output
