"""LM-Polygraph's estimators of sampled answers as methods of `score`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("lm_polygraph", reason='needs LM-Polygraph: pip install "attnprobe[lm-polygraph]"')

from integrations.polygraph_models import words
from lm_polygraph import estimators as theirs
from lm_polygraph.stat_calculators import SemanticClassesCalculator, SemanticMatrixCalculator
from scipy.linalg import expm
from tiny import tiny_model
from uncertainty.sampled import FixedNLI, RuleNLI

import attnprobe as ap
from attnprobe.integrations.lm_polygraph import PolygraphMethod
from attnprobe.integrations.lm_polygraph.statistics import KNOWN, statistics
from attnprobe.uncertainty import Sample, Samples

TEXTS = ["w5 w6", "w5 w7 w8", "w9", "w5 w6", "w9 w6 w5", "w10 w11"]
N = len(TEXTS)

# Every estimator that docs/lm_polygraph.md lists as tested.
TESTED = [
    lambda: theirs.LexicalSimilarity("rouge1"),
    lambda: theirs.LexicalSimilarity("rouge2"),
    lambda: theirs.LexicalSimilarity("rougeL"),
    theirs.NumSemSets,
    theirs.DegMat,
    lambda: theirs.DegMat(affinity="contra"),
    lambda: theirs.DegMat("Jaccard_score"),
    theirs.EigValLaplacian,
    lambda: theirs.EigValLaplacian(affinity="contra"),
    lambda: theirs.EigValLaplacian("Jaccard_score"),
    theirs.Eccentricity,
    lambda: theirs.Eccentricity(affinity="contra"),
    lambda: theirs.Eccentricity("Jaccard_score"),
    theirs.KernelLanguageEntropy,
    theirs.LabelProb,
    theirs.SemanticEntropy,
    lambda: theirs.SemanticEntropy(entropy_estimation="direct"),
    lambda: theirs.SemanticEntropy(class_probability_estimation="frequency"),
    lambda: theirs.SemanticEntropy(use_unique_responses=True),
    theirs.LUQ,
    theirs.MonteCarloSequenceEntropy,
    theirs.MonteCarloNormalizedSequenceEntropy,
]


def table_of_logits() -> torch.Tensor:
    """Random logits, equal where both texts are, and a text entails itself."""
    torch.manual_seed(1)
    first = [TEXTS.index(text) for text in TEXTS]
    logits = 2 * torch.randn(N, N, 3, dtype=torch.float64)
    logits.diagonal()[0] = 5.0
    return logits[first][:, first]


NLI_LOGITS = table_of_logits()


def answers(texts=TEXTS) -> Samples:
    rng = np.random.default_rng(0)
    log_probability = {text: float(-rng.exponential(3)) for text in texts}
    return Samples([Sample(text, [*range(len(text.split())), 2], log_probability[text], "eos") for text in texts])


def number(estimator, samples=None, nli=None) -> float:
    method = PolygraphMethod(estimator, nli=FixedNLI(NLI_LOGITS) if nli is None else nli)
    return method.assess_samples(answers() if samples is None else samples).uncertainty


class _Encoded(dict):
    def to(self, device):
        return self


def lm_polygraphs_own_statistics() -> dict:
    """What LM-Polygraph's own calculators make of the same answers and the same NLI logits."""
    order = [2, 1, 0]  # their checkpoint numbers contradiction, neutral, entailment

    def model(pairs):
        rows = (
            torch.tensor([TEXTS.index(one) for one, _ in pairs]),
            torch.tensor([TEXTS.index(two) for _, two in pairs]),
        )
        return SimpleNamespace(logits=NLI_LOGITS[rows][:, order])

    model.config = SimpleNamespace(label2id={"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2})
    nli = SimpleNamespace(
        batch_size=7, device="cpu", deberta=model, deberta_tokenizer=lambda pairs, **_: _Encoded(pairs=pairs)
    )
    samples = answers()
    stats = {
        "sample_texts": [TEXTS],
        "sample_tokens": [[sample.token_ids for sample in samples.samples]],
        "sample_log_probs": [samples.log_probability.tolist()],
    }
    stats |= SemanticMatrixCalculator(nli)(stats, ["prompt"], None)
    return stats | SemanticClassesCalculator()(stats, ["prompt"], None)


@pytest.mark.parametrize("make", TESTED, ids=lambda make: str(make()))
def test_the_estimator_has_the_number_of_lm_polygraphs_own_statistics(make):
    expected = float(np.asarray(make()(lm_polygraphs_own_statistics()))[0])
    assert number(make()) == pytest.approx(expected, abs=1e-9)


def test_the_statistics_are_those_of_lm_polygraph_but_for_the_numbers_of_labels():
    own = lm_polygraphs_own_statistics()
    ours = statistics(list(KNOWN), answers(), lambda: FixedNLI(NLI_LOGITS))
    assert set(ours) == set(own) == set(KNOWN)
    for name in KNOWN:
        if name.startswith("semantic_matrix") and not name.endswith("classes"):
            np.testing.assert_allclose(ours[name], own[name], atol=1e-12)
    entailed = [given["semantic_matrix_classes"] == given["entailment_id"] for given in (ours, own)]
    np.testing.assert_array_equal(*entailed)
    assert ours["semantic_classes_entail"]["sample_to_class"] == own["semantic_classes_entail"]["sample_to_class"]
    assert ours["semantic_classes_entail"]["class_to_sample"] == dict(own["semantic_classes_entail"]["class_to_sample"])


# --- the definitions, written out -------------------------------------------------------------------------


def test_estimators_are_what_they_say():
    samples = answers()
    p = NLI_LOGITS.softmax(-1).numpy()
    entail, contra = p[..., 0], p[..., 2]
    w = (entail + entail.T) / 2
    assert number(theirs.DegMat()) == pytest.approx(1 - w.mean())
    d = np.diag(w.sum(1) ** -0.5)
    values, vectors = np.linalg.eigh(np.eye(N) - d @ w @ d)
    assert number(theirs.EigValLaplacian()) == pytest.approx(np.maximum(0, 1 - values).sum())
    kept = vectors[:, values < 0.9]
    assert number(theirs.Eccentricity()) == pytest.approx(np.linalg.norm(kept - kept.mean(0)))
    graph = 1 + (entail + entail.T - contra - contra.T) / 2
    heat = expm(-0.3 * (np.diag(graph.sum(0)) - graph))
    kernel = heat / np.sqrt(np.outer(np.diag(heat), np.diag(heat))) / N
    density = np.linalg.eigvalsh(kernel)
    assert number(theirs.KernelLanguageEntropy()) == pytest.approx(-(density * np.log(density)).sum() / np.log(N))
    log_p = samples.log_probability.numpy()
    lengths = [len(sample.token_ids) for sample in samples.samples]
    assert number(theirs.MonteCarloSequenceEntropy()) == pytest.approx(-log_p.mean())
    assert number(theirs.MonteCarloNormalizedSequenceEntropy()) == pytest.approx(-(log_p / lengths).mean())


def test_sets_and_labels_are_counted():
    nli = RuleNLI()  # answers that begin alike entail one another: w5 (three), w9 (two), w10
    assert number(theirs.NumSemSets(), nli=nli) == 3.0
    assert number(theirs.LabelProb(), nli=nli) == pytest.approx(1 - 3 / 6)


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (theirs.LUQ, ap.LUQ),
        (theirs.SemanticEntropy, ap.SemanticEntropy),
        (
            lambda: theirs.SemanticEntropy(class_probability_estimation="frequency"),
            lambda **nli: ap.SemanticEntropy(class_probability="frequency", **nli),
        ),
    ],
)
def test_estimators_that_we_have_too_agree_with_ours(make, ours):
    expected = ours(nli=FixedNLI(NLI_LOGITS)).assess_samples(answers()).uncertainty
    assert number(make()) == pytest.approx(expected, abs=1e-9)


# --- under score ------------------------------------------------------------------------------------------


def test_score_takes_them_beside_its_own_and_draws_once():
    nli = RuleNLI()
    methods = [
        "SAUQ",
        ap.SemanticEntropy(nli=nli),
        PolygraphMethod(theirs.NumSemSets(), nli=nli),
        PolygraphMethod(theirs.SemanticEntropy(), nli=nli, name="theirs"),
        PolygraphMethod(theirs.LexicalSimilarity()),
    ]
    prompts = [[5, 6, 7], [8, 9]]
    out = ap.score(
        tiny_model("llama", attention="sdpa"), prompts, methods=methods, tokenizer=words(), seed=0, max_new_tokens=3
    )
    assert len(nli.asked) == len(prompts)  # one comparison a prompt, for three methods
    for one in out:
        assert list(one.uncertainty) == ["SAUQ", "SemanticEntropy", "NumSemSets", "theirs", "LexicalSimilarity_rougeL"]
        assert one.uncertainty["theirs"] == pytest.approx(one.uncertainty["SemanticEntropy"], abs=1e-9)
        starts = {sample.text.split()[0] if sample.text.split() else "" for sample in one.samples}
        assert one.uncertainty["NumSemSets"] == len(starts)


def test_no_nli_model_is_loaded_for_estimators_that_read_none():
    method = PolygraphMethod(theirs.LexicalSimilarity(), nli="no/such/model")
    method.prepare()
    assert method.assess_samples(answers()).uncertainty < 0
    with pytest.raises(OSError, match="no/such/model"):
        PolygraphMethod(theirs.NumSemSets(), nli="no/such/model").prepare()


# --- refusals, and what is not sound ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (theirs.RAUQ, "attention_all, greedy_log_likelihoods"),
        (theirs.EigenScore, "sample_embeddings"),
        (theirs.SentenceSAR, "sample_sentence_similarity"),
        (theirs.SAR, "sample_sentence_similarity, sample_log_likelihoods, sample_token_similarity"),
        (theirs.PTrueEmpirical, "input_texts, greedy_texts"),
    ],
)
def test_estimators_of_other_statistics_are_refused_by_name(make, missing):
    with pytest.raises(ValueError, match=f"needs {missing}, which sampled answers do not give"):
        PolygraphMethod(make())


@pytest.mark.parametrize("given", [theirs.NumSemSets, "NumSemSets", ap.LUQ(nli=RuleNLI())])
def test_only_estimator_objects_are_wrapped(given):
    with pytest.raises(TypeError, match="wraps an estimator object"):
        PolygraphMethod(given)


def test_two_labels_serve_what_reads_entailment_alone():
    two = RuleNLI(n_labels=2)
    assert number(theirs.DegMat(), nli=two) > 0
    with pytest.raises(ValueError, match="NumSemSets needs an NLI model that tells contradiction"):
        number(theirs.NumSemSets(), nli=two)


@pytest.mark.parametrize("make", [theirs.LexicalSimilarity, theirs.LUQ, theirs.KernelLanguageEntropy])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_number_is_an_error(make):
    with pytest.raises(ValueError, match=r"of LM-Polygraph gives (nan|-inf) for these 1 answers"):
        number(make(), answers(["w5"]), RuleNLI())


def test_lexical_estimators_take_equal_answers_for_unlike_where_they_see_no_words():
    """Why docs/lm_polygraph.md calls them unsound for such answers."""
    russian, empty = answers(["да"] * 4), answers([""] * 4)
    assert number(theirs.LexicalSimilarity(), answers(["yes"] * 4)) == -1.0
    assert number(theirs.LexicalSimilarity(), russian) == 0.0
    assert number(theirs.LexicalSimilarity(), empty) == 0.0
    assert number(theirs.DegMat("Jaccard_score"), russian) == pytest.approx(0.0)
    assert number(theirs.DegMat("Jaccard_score"), empty) == pytest.approx(0.75)


def test_bleu_depends_on_the_order_of_answers():
    one, other = ["a b c d e", "a b c d e f g"], ["a b c d e f g", "a b c d e"]
    found = [number(theirs.LexicalSimilarity("BLEU"), answers(texts)) for texts in (one, other)]
    assert abs(found[0] - found[1]) > 0.01
