"""The command line, on a stand-in for the library's `score`; no model is loaded here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

import attnprobe as ap
from attnprobe.cli import main as cli
from attnprobe.cli import render

NAN = float("nan")
ROOT = str(Path(ap.__file__).parents[1])


@dataclass
class FakeScore:
    prompt: str
    text: str = " Paris.\x1b[31m[bold]red[/bold]"
    uncertainty: dict[str, float] = field(default_factory=lambda: {"SAUQ": 0.25})
    tokens: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(
            {
                "step": [0, 1, 2, 3],
                "token": [" Paris", ".\n", "\x1b[31m[bold]", "!"],
                "token_id": [7, 8, 9, 5],
                "probability": [0.9, 0.5, 0.125, 0.75],
                "log_probability": [-0.105, -0.693, -2.079, -0.288],
                "entropy": [0.3, 1.25, float("inf"), 0.5],
                "confidence": [0.95, NAN, 0.0625, 0.5],
            }
        )
    )


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for load_model and score; the calls they got."""
    seen: dict[str, list] = {"load": [], "score": []}

    def load_model(*args, **kwargs):
        seen["load"].append((args, kwargs))
        return "the model"

    def score(model, prompts, **kwargs):
        assert model == "the model"
        seen["score"].append((list(prompts), kwargs))
        return [FakeScore(prompt) for prompt in prompts]

    monkeypatch.setattr(ap, "load_model", load_model, raising=False)
    monkeypatch.setattr(ap, "score", score, raising=False)
    return seen


def run(*arguments: str, stdin: str | bytes | None = None):
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


# --- score: what goes in ----------------------------------------------------------------------------------


def test_the_arguments_reach_the_library(calls):
    result = run(
        "score", "Hello", "-m", "SAUQ", "--method", "Perplexity", "--max-new-tokens", "5", "--chat",
        "--model", "some/name", "--device", "cpu", "--dtype", "bfloat16", "--batch-size", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert calls["load"] == [(("some/name",), {"device": "cpu", "dtype": "bfloat16"})]
    options = {"methods": ("SAUQ", "Perplexity"), "max_new_tokens": 5, "chat": True, "batch_size": 3}
    assert calls["score"] == [(["Hello"], options)]


def test_the_defaults(calls):
    assert run("score", "Hello").exit_code == 0
    assert calls["load"] == [((None,), {"device": None, "dtype": None})]
    options = {"methods": ("SAUQ",), "max_new_tokens": 20, "chat": False, "batch_size": 8}
    assert calls["score"] == [(["Hello"], options)]


@pytest.mark.parametrize("arguments", [["score", "-"], ["score"]])
def test_standard_input_is_one_prompt(calls, arguments):
    assert run(*arguments, stdin="two\nlines\n").exit_code == 0
    assert calls["score"][0][0] == ["two\nlines"]


@pytest.mark.parametrize("where", ["file", "stdin"])
def test_prompts_one_a_line_in_batches(calls, tmp_path, where):
    text = "\ufeffone\r\n\n  \ntwo\u2028still two\nthrée"
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    name, stdin = (str(file), None) if where == "file" else ("-", text.encode())
    result = run("score", "--file", name, "--batch-size", "2", "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    assert [prompts for prompts, _ in calls["score"]] == [["one", "two\u2028still two"], ["thrée"]]
    assert len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["score", ""], None, "prompt is empty"),
        (["score", " \n"], None, "prompt is empty"),
        (["score"], "", "prompt is empty"),
        (["score", "-f", "-"], "\n\n", "prompt is empty"),
        (["score", "-f", "nowhere.txt"], None, "cannot read 'nowhere.txt'"),
        (["score", "-f", "."], None, "cannot read '.'"),
        (["score", "hello", "-f", "nowhere.txt"], None, "not both"),
        (["score", "-"], b"\xff\xfe", "standard input is not UTF-8"),
        (["score", "hello", "--max-new-tokens", "0"], None, "max-new-tokens"),
        (["score", "hello", "--batch-size", "x"], None, "batch-size"),
        (["score", "hello", "--nonsense"], None, "nonsense"),
        (["sing"], None, "sing"),
    ],
)
def test_usage_mistakes_leave_with_2(calls, arguments, stdin, sentence):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert calls["load"] == []  # found out before a model is loaded


def test_no_prompt_at_a_terminal_is_a_mistake(calls, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(cli.sys, "stdin", Terminal())
    with pytest.raises(cli.typer.BadParameter, match="give a prompt, --file, or text on standard input"):
        cli._prompts(None, None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("unknown method 'SAUCE';\n known are SAUQ"), 2),
        (TypeError("a method is a name"), 2),
        (FileNotFoundError("there is no folder './x'"), 2),
        (RuntimeError("it broke \x1b[2J"), 1),
        (ConnectionError("no network"), 1),
        (OSError(28, "No space left on device"), 1),
        (ImportError("pip install accelerate"), 1),
        (RuntimeError(), 1),
    ],
)
@pytest.mark.parametrize("place", ["load_model", "score"])
def test_failures_are_one_sentence(calls, monkeypatch, error, status, place):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(ap, place, fail)
    result = run("score", "hello")
    assert result.exit_code == status
    said = " ".join(str(error).split()).replace("\x1b", "\\x1b") or "RuntimeError"
    assert result.stderr.splitlines() == [f"error: {said}"]
    assert result.stdout == ""

    result = run("score", "hello", "--debug")
    assert result.exit_code == status
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == f"error: {said}"


def test_a_fault_of_attnprobe_keeps_its_traceback(calls, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("bug")

    monkeypatch.setattr(ap, "score", fail)
    assert isinstance(run("score", "hello").exception, KeyError)


def test_an_interrupt_is_quiet(calls, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ap, "score", interrupt)
    result = run("score", "hello")
    assert result.exit_code == 130
    assert result.output.strip() == ""


# --- score: what comes out --------------------------------------------------------------------------------


def test_json_is_strict_and_one_object_a_line(calls):
    result = run("score", "hello", "--json")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.isascii()
    assert "\x1b" not in line

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(line, parse_constant=refuse)
    assert list(found) == ["text", "uncertainty", "tokens"]
    assert found["text"] == FakeScore("").text
    assert found["uncertainty"] == {"SAUQ": 0.25}
    assert found["tokens"][0] == {
        "step": 0,
        "token": " Paris",
        "token_id": 7,
        "probability": 0.9,
        "log_probability": -0.105,
        "entropy": 0.3,
        "confidence": 0.95,
    }
    assert found["tokens"][1]["confidence"] is None
    assert found["tokens"][2]["entropy"] is None


def test_json_escapes_what_could_steer_a_terminal(calls, monkeypatch):
    text = "a\x1b[2J\x9b31m\u202eb\ud800 é"
    monkeypatch.setattr(ap, "score", lambda *args, **kwargs: [FakeScore("hello", text=text)])
    result = run("score", "hello", "--json")
    assert result.stdout.rstrip("\n").isprintable()
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["text"] == text


def test_people_get_answer_uncertainty_strip_and_table(calls):
    result = run("score", "hello")
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == r" Paris.\x1b[31m[bold]red[/bold]"
    assert "uncertainty SAUQ  0.250" in lines
    # a bar behind every token stands for the colour; a token without confidence has none
    assert r" Paris█.\n\x1b[31m[bold]▂!█" in lines  # the scale ends at the largest after the first step
    table = [line.split() for line in lines[-5:]]
    assert table[0] == ["step", "token", "probability", "entropy", "confidence"]
    assert table[1] == ["0", "Paris", "0.900", "0.300", "0.950"]
    assert table[2] == ["1", r".\n", "0.500", "1.250", "-"]
    assert table[3] == ["2", r"\x1b[31m[bold]", "0.125", "inf", "0.062"]
    assert "\x1b" not in result.output
    assert result.stderr == ""


def test_a_long_answer_is_not_broken_in_a_pipe(calls, monkeypatch):
    monkeypatch.setattr(ap, "score", lambda *args, **kwargs: [FakeScore("hello", text="word " * 100)])
    assert run("score", "hello").stdout.splitlines()[0] == "word " * 100


def test_several_prompts_are_told_apart(calls, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("first\n" + "second " * 30)
    lines = run("score", "-f", str(file)).stdout.splitlines()
    rules = [line for line in lines if "─" in line]
    assert " first " in rules[0]
    assert "…" in rules[1]


def test_a_terminal_gets_colours_and_no_escape_of_the_model():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=100, markup=False)
    render.print_score(console, FakeScore("hello"))
    printed = out.getvalue()
    assert "\x1b[38;2;0;0;0;48;2;255;234;70m Paris" in printed  # sure: black on yellow
    assert "\x1b[38;2;255;255;255;48;2;0;32;77m\\x1b[31m[bold]" in printed  # unsure: white on dark blue
    assert "\x1b[31m" not in printed
    assert "█" not in printed


def test_without_confidence_the_probability_is_shown():
    out = io.StringIO()
    answer = FakeScore("hello", uncertainty={"Perplexity": NAN})
    answer.tokens = answer.tokens.drop(columns=["confidence"])
    render.print_score(Console(file=out, width=100), answer)
    assert "probability: 0" in out.getvalue()
    assert "uncertainty Perplexity  -" in out.getvalue()


def test_an_empty_answer():
    out = io.StringIO()
    answer = FakeScore("hello", text="", uncertainty={"SAUQ": 0.5})
    answer.tokens = answer.tokens.iloc[:0]
    render.print_score(Console(file=out, width=100), answer)
    assert [line.strip() for line in out.getvalue().splitlines() if line.strip()] == [
        "(no text)",
        "uncertainty SAUQ  0.500",
    ]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_ramp_rises_in_brightness_and_text_on_it_is_legible():
    brightness = [luminance(colour) for colour in render._RAMP]
    assert brightness == sorted(brightness)
    for level, value in enumerate(brightness):
        style = render._style((level + 0.5) / len(brightness))
        text = luminance(style.color.name)
        assert (max(text, value) + 0.05) / (min(text, value) + 0.05) > 4.5


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x08", r"a\rb\x08"),
        ("abc\u202edef", r"abc\u202edef"),
        ("\u2066x\u2028", r"\u2066x\u2028"),
        ("\ud800", r"\ud800"),
        ("a\u200db na\u00efve 日本 👩‍🔬", "a\u200db na\u00efve 日本 👩‍🔬"),
    ],
)
def test_control_characters_are_spelt_out(text, shown):
    assert render.visible(text) == shown


# --- the other commands -----------------------------------------------------------------------------------


def test_models_lists_the_cache(monkeypatch, tmp_path):
    folder = tmp_path / ("deep" * 30)
    monkeypatch.setenv("ATTNPROBE_CACHE", str(folder))
    result = run("models")
    assert result.exit_code == 0
    assert "Nothing is cached yet" in result.stdout
    assert str(folder) in result.stdout

    for name in ("Tiny", ".partial-x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"x" * 2_000_000)
    (folder / "Tiny" / "attnprobe.json").write_text('{"files": {"model.safetensors": 2000000}}')
    result = run("models")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["SmolLM2-135M-Instruct", "unfinished", "2", "MB", str(folder / ".partial-x")]
    assert lines[2].split() == ["Tiny", "ready", "2", "MB", str(folder / "Tiny")]


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("attnprobe ")
    assert result.stdout.split()[1][0].isdigit()


@pytest.mark.parametrize("arguments", [["--help"], ["score", "--help"], ["models"], ["score", "--file", "nowhere"]])
def test_light_commands_import_no_model_code(arguments, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from attnprobe.cli.main import main\n"
        f"sys.argv = ['attnprobe', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'numpy', 'pandas', 'xarray'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    environment = {**os.environ, "ATTNPROBE_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, encoding="utf-8"
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


def test_a_narrow_encoding_does_not_break_the_output(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from types import SimpleNamespace as N\n"
        "import pandas as pd, attnprobe as ap\n"
        "tokens = pd.DataFrame({'token': ['日'], 'probability': [0.5]})\n"
        "ap.load_model = lambda *a, **k: None\n"
        "ap.score = lambda m, p, **k: [N(prompt=p[0], text='日', uncertainty={'SAUQ': 1.0}, tokens=tokens)]\n"
        "from attnprobe.cli.main import main\n"
        "sys.argv = ['attnprobe', 'score', 'hello']\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == r"\u65e5"
