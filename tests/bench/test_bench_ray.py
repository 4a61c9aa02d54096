"""The Ray engine on a local Ray of two workers: the rows of the local engine, and workers that die."""

from __future__ import annotations

import os
import signal
import threading
import time

import pandas as pd
import pytest

pytest.importorskip("pyarrow", reason="the benchmark's packages are not installed")
pytest.importorskip("pydantic", reason="the benchmark's packages are not installed")
pytest.importorskip("yaml", reason="the benchmark's packages are not installed")
pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.data", reason="Ray Data is not installed")

import ray
from bench.small_run import comparable, save_model, save_rows, task, write_config

from attnprobe.bench import engine_ray
from attnprobe.bench.config import load_config
from attnprobe.bench.runner import results, run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_the_rows_are_those_of_the_local_engine_though_a_worker_is_killed(tmp_path, model, monkeypatch):
    pids = tmp_path / "pids"
    # a module of its own, which says which process measures and takes its time
    (tmp_path / "slow_quality.py").write_text(
        "import os, time\n"
        "def slow(example, text):\n"
        f"    with open({str(pids)!r}, 'a') as file:\n"
        "        file.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(0.15)\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = save_rows(tmp_path / "rows.jsonl", 24)
    tasks = [task(data, "T", quality="slow_quality:slow")]
    path = write_config(tmp_path, model, engine="ray", workers=2, batch_size=2, tasks=tasks)
    killed = []

    def kill():
        for _ in range(600):
            time.sleep(0.05)
            if pids.exists() and len(set(pids.read_text().split())) == 2 and len(pids.read_text().split()) > 8:
                killed.append(int(pids.read_text().split()[-1]))
                os.kill(killed[0], signal.SIGKILL)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(path)
    killer.join()
    assert killed
    assert killed[0] != os.getpid()
    assert len(set(pids.read_text().split())) >= 3  # another took its place
    assert (found.rows, found.new, found.failed) == (24, 24, 0)
    everything = pd.read_parquet(found.output / "rows")
    assert sorted(everything["id"]) == sorted(f"q{i}" for i in range(24))
    assert run(path).new == 0
    local = run(write_config(tmp_path, model, batch_size=2, tasks=tasks, output=str(tmp_path / "local")))
    pd.testing.assert_frame_equal(comparable(found.frame), comparable(local.frame))


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path, model, capfd):
    settings = load_config(write_config(tmp_path, model, engine="ray", workers=1))
    settings = settings.model_copy(update={"model": str(tmp_path / "nowhere")})
    with pytest.raises(FileNotFoundError, match="there is no folder") as caught:
        run(settings)
    assert "\n" not in str(caught.value)
    assert results(settings.output).rows == 0
    assert "Traceback" not in "".join(capfd.readouterr())


def test_without_ray_it_says_how_to_get_it(tmp_path, model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "attnprobe\[ray\]"'):
        engine_ray._ray()
