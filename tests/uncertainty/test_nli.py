"""NLI models: labels, pairs, lengths, loading; on tiny random checkpoints and without a network."""

from __future__ import annotations

import functools
import json
import warnings

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import attnprobe as ap
from attnprobe.uncertainty.nli import EntailmentModel, shared_nli

LABELS = {"entailment": 2, "neutral": 1, "contradiction": 0}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghij"]
TEXTS = ["a b c", "d", "a b c", "e f g h", ""]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words are letters; a pair is [CLS] premise [SEP] hypothesis [SEP], with types 0 and 1."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


@functools.cache
def classifier(kind: str, labels: tuple[str, ...] = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")):
    """A random model in float64; its DeBERTa has relative positions only, as the default checkpoint has."""
    sizes = dict(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        pad_token_id=0,
        initializer_range=0.5,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    if kind == "deberta":
        relative = dict(relative_attention=True, position_biased_input=False, pos_att_type="c2p|p2c")
        config = transformers.DebertaConfig(**sizes, **relative, type_vocab_size=0)
    elif kind == "roberta":
        config = transformers.RobertaConfig(**sizes, type_vocab_size=2)
    else:
        config = transformers.BertConfig(**sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config).double().eval()


def nli(kind: str = "deberta", **options) -> ap.NLI:
    return ap.NLI(classifier(kind), tokenizer=tokenizer(), **options)


def by_hand(kind: str, premise: str, hypothesis: str, labels=(2, 1, 0)) -> torch.Tensor:
    """One pair alone, without padding: ids by hand, logits in the order entailment, neutral, contradiction."""
    one, other = ([WORDS.index(word) for word in text.split()] for text in (premise, hypothesis))
    ids = torch.tensor([[1, *one, 2, *other, 2]])
    types = torch.tensor([[0] * (len(one) + 2) + [1] * (len(other) + 1)])
    given = {"input_ids": ids, "token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return classifier(kind)(**given).logits[0, list(labels)]


@pytest.fixture
def passes(monkeypatch):
    """How many pairs each forward of the tiny DeBERTa had."""
    model, counted = classifier("deberta"), []
    forward = model.forward

    def counting(*args, **kwargs):
        counted.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    return counted


# --- logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deberta", "bert"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_each_pair_has_the_logits_it_has_alone(kind, batch_size):
    premises, hypotheses = ["a b c d e", "f", ""], ["g", "h i j a", "b"]
    logits = nli(kind, batch_size=batch_size).logits(premises, hypotheses)
    expected = torch.stack([by_hand(kind, *pair) for pair in zip(premises, hypotheses, strict=True)])
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    assert logits.dtype == torch.float64
    assert not torch.allclose(logits, logits.flip(0), atol=1e-3)


@pytest.mark.parametrize("kind", ["deberta", "bert"])
def test_the_matrix_has_premises_in_rows(kind):
    matrix = nli(kind).matrix(TEXTS)
    assert matrix.shape == (5, 5, 3)
    for i, premise in enumerate(TEXTS):
        for j, hypothesis in enumerate(TEXTS):
            torch.testing.assert_close(matrix[i, j], by_hand(kind, premise, hypothesis), atol=1e-9, rtol=0)
    assert (matrix - matrix.transpose(0, 1)).abs().max() > 1e-3


def test_each_distinct_pair_is_computed_once(passes):
    nli(batch_size=5).matrix(TEXTS)  # four distinct texts
    assert passes == [5, 5, 5, 1]
    passes.clear()
    nli().matrix(["a"] * 10)
    assert passes == [1]


def test_half_precision_is_returned_in_float32():
    model = classifier("bert").to(torch.bfloat16)
    try:
        assert ap.NLI(model, tokenizer=tokenizer()).logits(["a"], ["b"]).dtype == torch.float32
    finally:
        classifier.cache_clear()


# --- labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "columns"),
    [
        (("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), (2, 1, 0)),
        (("entailment", "neutral", "contradiction"), (0, 1, 2)),
        (("Neutral", " Contradiction", "Entailment"), (2, 0, 1)),
        (("not_entailment", "entailment"), (1, 0)),
        (("Entailment", "Not entailment"), (0, 1)),
    ],
)
def test_columns_are_found_by_the_names_of_labels(labels, columns):
    model = classifier("bert", labels)
    found = ap.NLI(model, tokenizer=tokenizer())
    encoded = tokenizer()(["a b"], ["c"], return_tensors="pt")
    with torch.no_grad():
        raw = model(**encoded).logits[:, list(columns)]
    torch.testing.assert_close(found.logits(["a b"], ["c"]), raw, atol=1e-12, rtol=0)
    assert found.label_names[0] == "entailment"
    assert len(found.label_names) == len(labels)


def test_labels_that_say_nothing_are_named_by_the_user():
    model = classifier("bert", ("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(ValueError, match=r'LABEL_0, LABEL_1, LABEL_2, which do not say .*pass labels={"entailment": 2'):
        ap.NLI(model, tokenizer=tokenizer()).logits(["a"], ["b"])
    named = ap.NLI(model, tokenizer=tokenizer(), labels=LABELS).logits(["a"], ["b"])
    other = ap.NLI(model, tokenizer=tokenizer(), labels={"entailment": 0, "neutral": 1, "contradiction": 2})
    assert torch.equal(named.flip(-1), other.logits(["a"], ["b"]))


# --- lengths ----------------------------------------------------------------------------------------------


def test_what_is_cut_is_said_and_counted():
    long = " ".join("abcdefghij" * 4)  # 40 words; BERT here reads 32 tokens
    with pytest.warns(UserWarning, match="3 of 4 pairs of answers have more than 32 tokens and were cut"):
        matrix = nli("bert").matrix(["a", long])
    cut = by_hand("bert", "a", " ".join(long.split()[:28]))
    torch.testing.assert_close(matrix[0, 1], cut, atol=1e-9, rtol=0)
    with pytest.warns(UserWarning, match="1 of 1 pairs of answers have more than 6 tokens"):
        shorter = nli("bert", max_length=6).logits(["a b c"], ["d e f"])
    torch.testing.assert_close(shorter[0], by_hand("bert", "a", "d e"), atol=1e-9, rtol=0)


def test_relative_positions_read_any_length():
    long = " ".join("abcdefghij" * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = nli("deberta").logits([long], ["a"])
    torch.testing.assert_close(logits[0], by_hand("deberta", long, "a"), atol=1e-9, rtol=0)


def test_roberta_counts_positions_from_behind_the_padding():
    fits, long = " ".join("abcdefghij" * 2 + "abcdefg"), " ".join("abcdefghij" * 3)
    found = nli("roberta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = found.logits([fits], ["a"])  # 31 tokens, positions 1 to 31
    torch.testing.assert_close(logits[0], by_hand("roberta", fits, "a"), atol=1e-9, rtol=0)
    with pytest.warns(UserWarning, match="1 of 1 pairs of answers have more than 31 tokens"):
        assert found.logits([long], ["a"]).isfinite().all()


# --- loading ----------------------------------------------------------------------------------------------


def test_a_local_folder(tmp_path, passes):
    classifier("deberta").float().save_pretrained(tmp_path)
    classifier.cache_clear()
    tokenizer().save_pretrained(tmp_path)
    from_folder = ap.NLI(str(tmp_path), device="cpu")
    torch.testing.assert_close(from_folder.matrix(TEXTS).double(), nli().matrix(TEXTS), atol=1e-4, rtol=0)
    method = ap.SemanticEntropy(nli=str(tmp_path))
    assert method.nli is shared_nli(str(tmp_path))
    assert method.nli is ap.LUQ(nli=str(tmp_path)).nli


def test_nothing_is_loaded_before_it_is_used(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lazy = ap.NLI("nobody/no-such-model")
    assert ap.LUQ().nli is ap.SemanticEntropy().nli
    sentence = (
        r"the NLI model 'nobody/no-such-model' was not found on this machine and could not be fetched .*: pass nli="
    )
    with pytest.raises(OSError, match=sentence):
        lazy.load()
    with pytest.raises(OSError, match=sentence) as raised:
        lazy.matrix(["a", "b"])
    assert "\n" not in str(raised.value)


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('this was run')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not an NLI model that transformers reads by itself") as raised:
        ap.NLI(str(tmp_path)).matrix(["a", "b"])
    assert "\n" not in str(raised.value)


def test_an_object_of_ones_own_is_an_entailment_model():
    class Mine:
        def matrix(self, texts):
            return torch.zeros(len(texts), len(texts), 3)

    assert isinstance(Mine(), EntailmentModel)
    assert isinstance(nli(), EntailmentModel)
    assert not isinstance(tokenizer(), EntailmentModel)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: ap.NLI(""), ValueError, "the name of the NLI model is empty"),
        (lambda: ap.NLI(7), TypeError, "a hub name, a folder or a loaded transformers model, not int"),
        (lambda: ap.NLI(classifier("deberta")), ValueError, "a loaded NLI model needs its tokenizer"),
        (lambda: nli(device="cpu"), ValueError, "stays where it is"),
        (lambda: nli(batch_size=0), ValueError, "batch_size=0: use a whole number"),
        (lambda: nli(max_length=0), ValueError, "max_length=0: use a whole number"),
        (lambda: nli(max_length=True), ValueError, "max_length=True: use a whole number"),
        (lambda: nli().logits(["a"], ["b", "c"]), ValueError, "1 premises for 2 hypotheses"),
        (lambda: nli().logits([], []), ValueError, "no pair of texts"),
        (lambda: nli().matrix([]), ValueError, "no text to compare"),
        (lambda: nli(labels={"entailment": 0}).matrix(["a"]), ValueError, "are entailment, which do not say"),
        (
            lambda: nli(labels={**LABELS, "neutral": 2}).matrix(["a"]),
            ValueError,
            "do not number the 3 outputs of .*: give each its own",
        ),
        (
            lambda: nli(labels={"entailment": 1, "not_entailment": 0}).matrix(["a"]),
            ValueError,
            "do not number the 3 outputs",
        ),
    ],
)
def test_errors_are_one_sentence(make, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        make()
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_a_model_in_training_mode_is_refused():
    model = transformers.BertForSequenceClassification(classifier("bert").config)
    with pytest.raises(ValueError, match="in training mode, where dropout changes its answers"):
        ap.NLI(model.train(), tokenizer=tokenizer())
