"""AlignScore on a RoBERTa of a few thousand weights: loading, chunks, and that a checkpoint runs nothing."""

import os
import pickle
import sys

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from attnprobe.bench import alignscore
from attnprobe.bench.alignscore import AlignScore, load_alignscore
from attnprobe.bench.config import RunConfig
from attnprobe.bench.example import Example

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "red", "blue", "car", "bike", "is", "here", "."]


def sentences(text):
    return [part.strip() + "." for part in text.split(".") if part.strip()]


@pytest.fixture(autouse=True)
def without_cache_or_data(monkeypatch):
    """Sentences without NLTK's data, which no test fetches."""
    load_alignscore.cache_clear()
    monkeypatch.setattr("nltk.tokenize.sent_tokenize", sentences)
    yield
    load_alignscore.cache_clear()


@pytest.fixture
def roberta(tmp_path):
    """A folder with configuration and tokenizer, and the weights of a checkpoint beside it."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "roberta")
    config = RobertaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=26,
        type_vocab_size=1,
        pad_token_id=1,
    )
    config.save_pretrained(tmp_path / "roberta")
    torch.manual_seed(0)
    weights = {f"base_model.{name}": weight for name, weight in RobertaModel(config).state_dict().items()}
    weights |= {
        "tri_layer.weight": torch.randn(3, 16),
        "tri_layer.bias": torch.randn(3),
        "bin_layer.bias": torch.zeros(2),
    }
    weights["base_model.embeddings.position_ids"] = torch.arange(26)[None]
    return tmp_path / "roberta", weights


def saved(folder, content):
    path = folder.parent / "align.ckpt"
    torch.save(content, path)
    return path


def probability(folder, weights, context, claim):
    """P(aligned) of one pair, written out."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = RobertaModel(RobertaConfig.from_pretrained(folder)).eval()
    model.load_state_dict(
        {
            k.removeprefix("base_model."): v
            for k, v in weights.items()
            if "position_ids" not in k and k.startswith("base_model.")
        }
    )
    with torch.no_grad():
        pooled = model(**tokenizer(context, claim, return_tensors="pt")).pooler_output
        logits = pooled @ weights["tri_layer.weight"].T + weights["tri_layer.bias"]
    return float(logits.softmax(-1)[0, 0])


def test_a_checkpoint_gives_the_probability_of_aligned(roberta):
    folder, weights = roberta
    path = saved(folder, {"state_dict": weights, "epoch": 3})
    scorer = load_alignscore(path, str(folder))
    (score,) = scorer(["red car."], ["blue bike is here."])
    assert score == pytest.approx(probability(folder, weights, "blue bike is here.", "red car."), abs=1e-6)
    assert load_alignscore(path, str(folder)) is scorer


def test_weights_alone_and_safetensors(roberta):
    folder, weights = roberta
    expected = load_alignscore(saved(folder, {"state_dict": weights}), str(folder))(["red."], ["blue."])
    assert load_alignscore(saved(folder, weights), str(folder))(["red."], ["blue."]) == expected
    path = folder.parent / "align.safetensors"
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)
    assert load_alignscore(path, str(folder))(["red."], ["blue."]) == expected


def test_the_best_chunk_for_every_sentence_and_the_mean_of_sentences(roberta):
    folder, weights = roberta
    claims, chunks = ["red car.", "blue bike."], ["red " * 200 + ".", "car is here.", "blue " * 200 + "."]
    context = " ".join(chunks)
    scorer = load_alignscore(saved(folder, weights), str(folder), batch_size=4)
    # 403 words make 2 chunks, which of 3 sentences are chunks of 1; each is cut to what the model reads
    assert scorer._chunks(context) == [" ".join(sentences(chunk)) for chunk in chunks]
    cut = ["red " * 17, "car is here.", "blue " * 17]
    table = torch.tensor([[probability(folder, weights, text, claim) for claim in claims] for text in cut])
    (score,) = scorer([" ".join(claims)], [context])
    assert score == pytest.approx(float(table.amax(0).mean()), abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_size_changes_nothing(roberta, batch_size):
    folder, weights = roberta
    load = saved(folder, weights)
    claims, contexts = ["red. blue car.", "bike", "is " * 60], ["blue. red is here. car.", "", "here " * 400]
    expected = load_alignscore(load, str(folder))(claims, contexts)
    assert load_alignscore(load, str(folder), batch_size=batch_size)(claims, contexts) == pytest.approx(
        expected, abs=1e-6
    )
    assert all(0 < score < 1 for score in expected)


def test_chunks_have_about_350_words():
    scorer = AlignScore(torch.nn.Identity(), torch.nn.Linear(1, 3), None, sentences)
    context = " ".join(["one two three four five six seven."] * 150)
    chunks = scorer._chunks(context)
    assert [len(chunk.split()) for chunk in chunks] == [259] * 4 + [14]  # 4 and what is left, as published
    assert " ".join(chunks) == context


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_nothing(roberta, tmp_path):
    folder, weights = roberta
    path = saved(folder, {"state_dict": weights, "callbacks": Payload(tmp_path / "ran")})
    with pytest.raises(ValueError, match="cannot be read as weights alone"):
        load_alignscore(path, str(folder))
    path.write_bytes(pickle.dumps(Payload(tmp_path / "ran"), protocol=2))
    with pytest.raises(ValueError, match="cannot be read as weights alone"):
        load_alignscore(path, str(folder))
    assert not (tmp_path / "ran").exists()


BROKEN = {
    "text": (b"no checkpoint at all", "cannot be read as weights alone"),
    "empty": (b"", "cannot be read as weights alone"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_checkpoint(roberta, name):
    content, expected = BROKEN[name]
    path = roberta[0].parent / "align.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        load_alignscore(path, str(roberta[0]))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_something_else(roberta):
    folder, weights = roberta
    for content in ([1, 2], {"state_dict": 3}, {"state_dict": {"a": "b"}}):
        with pytest.raises(ValueError, match="holds no state_dict of tensors"):
            load_alignscore(saved(folder, content), str(folder))
        load_alignscore.cache_clear()
    lacking = {name: weight for name, weight in weights.items() if not name.startswith("tri_layer")}
    with pytest.raises(ValueError, match=r"is no AlignScore checkpoint of a .*roberta.*Missing key"):
        load_alignscore(saved(folder, lacking), str(folder))
    other = {**weights, "base_model.pooler.dense.weight": torch.zeros(8, 8)}
    with pytest.raises(ValueError, match="is no AlignScore checkpoint"):
        load_alignscore(saved(folder, other), str(folder))


def test_a_model_that_cannot_be_had_or_is_no_roberta(roberta, tmp_path, monkeypatch):
    folder, weights = roberta
    path = saved(folder, weights)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"needs configuration and tokenizer of '.*nowhere'"):
        load_alignscore(path, str(tmp_path / "nowhere"))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"model_type": "roberta"', '"model_type": "bert"'))
    with pytest.raises(ValueError, match="is a bert"):
        load_alignscore(path, str(folder))


def test_a_device_that_is_not_there(roberta):
    folder, weights = roberta
    with pytest.raises(ValueError, match="cannot be put on the device 'nowhere'"):
        load_alignscore(saved(folder, weights), str(folder), device="nowhere")


def test_sentences_without_their_data(roberta, monkeypatch):
    folder, weights = roberta

    def lacking(text):
        raise LookupError("punkt_tab not found\nand so on")

    monkeypatch.setattr("nltk.tokenize.sent_tokenize", lacking)
    with pytest.raises(ImportError, match=r"python -m nltk\.downloader punkt_tab"):
        load_alignscore(saved(folder, weights), str(folder))
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(ImportError, match=r'pip install "attnprobe\[bench\]"'):
        alignscore._sentence_splitter()


def test_a_run_measures_by_it(roberta):
    folder, weights = roberta
    tasks = [
        {"task": "Mine", "data": "rows.csv", "template": "{question}", "quality": name, "label": name}
        for name in ("alignscore", "alignscore_source")
    ]
    settings = {"checkpoint": saved(folder, weights), "model": str(folder)}
    config = RunConfig(methods=["SAUQ"], tasks=tasks, output="out", alignscore=settings)
    example = Example("1", "p", ("red", "car"), source="blue bike")
    answers, summaries = (config.quality_of(task)(example, "is here") for task in config.tasks)
    expected = max(probability(folder, weights, "is here.", claim) for claim in ("red.", "car."))
    assert answers == pytest.approx(expected, abs=1e-6)
    assert summaries == pytest.approx(probability(folder, weights, "blue bike.", "is here."), abs=1e-6)
