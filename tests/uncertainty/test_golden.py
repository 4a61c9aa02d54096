"""RAUQ and the token scores against LM-Polygraph's own numbers.

The numbers were computed by LM-Polygraph 0.7.0 (estimators RAUQ, Perplexity, MeanTokenEntropy) on small
random inputs. `self_attention` [layer, head, step] is the attention of the position that chose token t to
itself, cut from the same attention tensor.
"""

from __future__ import annotations

import numpy as np
import pytest

import attnprobe as ap
from attnprobe.uncertainty import Evidence

# fmt: off
CASES = {
    'five tokens': {
        "vocabulary": 7,
        "log_probability": [
            -0.9191040957473194, -1.0630186785569542, -0.9947011062787781, -0.5337165504828725,
            -0.8432793565170088,
        ],
        "entropy": [
            1.4402706837179007, 1.6237214756157086, 1.3365563020054914, 1.1865089913381415,
            1.2071858874291859,
        ],
        "self_attention": [
            [
                [
                    0.3191936942651881, 0.039937555088040366, 0.44800259348804916, 0.007747562280251235,
                    0.05375749548184845,
                ],
                [
                    0.001084634844764257, 0.2169941938610261, 0.07445265001745938, 0.20420838365965752,
                    0.0324957143288565,
                ],
            ],
            [
                [
                    0.05147825734041698, 0.0034827395894629527, 0.5388779144235684, 0.06518155992575653,
                    0.12666128751278638,
                ],
                [
                    0.012023494580870903, 0.5492026650121787, 0.09077138865215686, 0.04307415233266654,
                    0.005192257423154827,
                ],
            ],
            [
                [
                    0.018028400866971547, 0.024565816150472004, 0.13913770163154796, 0.042841993490541685,
                    0.0527005392326633,
                ],
                [
                    0.4938778589837636, 0.48109177507185347, 0.2803152229764505, 0.056156094902357775,
                    0.6386084186096225,
                ],
            ],
        ],
        "scores": {
            'RAUQ': 3.0504784807207335,
            'RAUQ 0': 8.32349190941692,
            'RAUQ instruct': 2.3573753421327144,
            'RAUQ 1': 1.8707639575165866,
            'RAUQ entropy': 1.7373380507623435,
            'RAUQ entropy instruct': 1.6524628774077088,
            'Perplexity': 0.8707639575165865,
            'MeanTokenEntropy': 1.3588486680212857,
        },
        "layers": {
            1: {
                "head": 0, "score": 3.0504784807207335,
                "confidence": [
                    0.39887623597051297, 0.07019365535520711, 0.10422744229825327, 0.12271925575857337,
                    0.09849444505386175,
                ],
            },
            2: {
                "head": 1, "score": 2.702337134792134,
                "confidence": [
                    0.39887623597051297, 0.22259917082618563, 0.12388514277900085, 0.1228498146056276,
                    0.1488217625696964,
                ],
            },
        },
    },
    'one of a ragged batch, four layers': {
        "vocabulary": 9,
        "log_probability": [
            -0.6619556847308664, -0.4452775004409638, -0.6086411149867001, -0.1813447724855726,
        ],
        "entropy": [
            1.060905349721461, 1.1215864955698345, 1.1853294883970773, 0.6420297098927311,
        ],
        "self_attention": [
            [
                [
                    0.011069037395309385, 0.0017188092555755208, 0.029834585293564832, 0.07595458948797015,
                ],
                [
                    0.1820893078484988, 0.12274221493720709, 0.047127121322564074, 0.2550702072981441,
                ],
                [
                    0.2908322548148295, 0.36249394241354704, 0.03552038955573856, 0.04527810617784928,
                ],
            ],
            [
                [
                    0.20081010613730393, 0.04225022839835516, 0.07893702453223032, 0.37166950304313456,
                ],
                [
                    0.27107166291251666, 0.02606306624244877, 0.24234751834611118, 0.006448622704681827,
                ],
                [
                    0.01722164410076262, 0.4591955757547331, 0.02529073126832018, 0.26321182539249627,
                ],
            ],
            [
                [
                    0.14120450593004447, 0.5362029786359348, 0.3851551142993835, 0.2965194686334638,
                ],
                [
                    0.7971425546131646, 0.04417403316334334, 0.9036473634597244, 0.07145133704162496,
                ],
                [
                    0.05350882622690564, 0.3135816076932926, 0.5717793249295692, 0.10278000458269172,
                ],
            ],
            [
                [
                    0.009992268185901033, 0.025065841671669038, 0.06847366401500099, 0.5293225210200206,
                ],
                [
                    0.002460459110102529, 0.1810235535949369, 0.01434992434870233, 0.09778164334811135,
                ],
                [
                    0.6968497372986373, 0.1898598930560719, 0.13812296261308174, 0.34373715211875006,
                ],
            ],
        ],
        "scores": {
            'RAUQ': 2.465414426850823,
            'RAUQ 0': 4.418022675769549,
            'RAUQ instruct': 1.9072830431572756,
            'RAUQ 1': 1.4743047681610257,
            'RAUQ entropy': 0.9727301282748944,
            'RAUQ entropy instruct': 0.9006402935132907,
            'Perplexity': 0.47430476816102574,
            'MeanTokenEntropy': 1.0024627608952759,
        },
        "layers": {
            1: {
                "head": 2, "score": 2.406127635445448,
                "confidence": [
                    0.5158415239860514, 0.31762701082091366, 0.11524435996379642, 0.19109648626806508,
                ],
            },
            2: {
                "head": 0, "score": 2.191542299755888,
                "confidence": [
                    0.5158415239860514, 0.34940590366927127, 0.2164783210761052, 0.21818157297517732,
                ],
            },
            3: {
                "head": 2, "score": 2.465414426850823,
                "confidence": [
                    0.5158415239860514, 0.2064793875992329, 0.13163358025140387, 0.20302742518530648,
                ],
            },
        },
    },
    'a token suppressed to -inf': {
        "vocabulary": 6,
        "log_probability": [
            -0.6870380516682258, -0.8906931731928704, -0.21169754171074212, -0.11616178162380464,
        ],
        "entropy": [
            1.0631674897851253, 1.294462742392501, 0.7106583088813818, 0.4967634750676084,
        ],
        "self_attention": [
            [
                [
                    0.21345471278545744, 0.5116576508169811, 0.0068228293648541875, 0.09379763308390492,
                ],
                [
                    0.02628690713884967, 0.1984795186246397, 0.14288648941425586, 0.0992594075082446,
                ],
            ],
            [
                [
                    0.09032080870120401, 0.13863718725153046, 0.34254218513458756, 0.031145410768887757,
                ],
                [
                    0.0052579041270582345, 0.34335433182618924, 0.009070693317780952, 0.05773078281138669,
                ],
            ],
            [
                [
                    0.24794344491266448, 0.18266646103741754, 0.014400323653551012, 0.08019426226660636,
                ],
                [
                    0.05581660698560096, 0.03316300083102174, 0.014152433199765736, 0.002224544501090933,
                ],
            ],
        ],
        "scores": {
            'RAUQ': 2.506503962850462,
            'RAUQ 0': 5.713186232201753,
            'RAUQ instruct': 1.9356391409778027,
            'RAUQ 1': 1.4763976370489107,
            'RAUQ entropy': 1.317164379208551,
            'RAUQ entropy instruct': 1.2395355132062487,
            'Perplexity': 0.4763976370489108,
            'MeanTokenEntropy': 0.8912630040316541,
        },
        "layers": {
            1: {
                "head": 0, "score": 2.4944666213198188,
                "confidence": [
                    0.5030639138389997, 0.13786893198351802, 0.19962262270928152, 0.18304009735095386,
                ],
            },
            2: {
                "head": 0, "score": 2.506503962850462,
                "confidence": [
                    0.5030639138389997, 0.1555885630188918, 0.16363430306164703, 0.1885642602569505,
                ],
            },
        },
    },
    'a single token': {
        "vocabulary": 5,
        "log_probability": [
            -0.3213962233038985,
        ],
        "entropy": [
            0.833745095587887,
        ],
        "self_attention": [
            [
                [
                    0.17621821386941844,
                ],
                [
                    0.19640644712028196,
                ],
            ],
            [
                [
                    0.1677611750433716,
                ],
                [
                    0.18341415442889125,
                ],
            ],
            [
                [
                    0.3671342202347988,
                ],
                [
                    0.18282014418012074,
                ],
            ],
        ],
        "scores": {
            'RAUQ': 1.3213962233038985,
            'RAUQ 0': 1.3213962233038985,
            'RAUQ instruct': 1.3213962233038985,
            'RAUQ 1': 1.3213962233038985,
            'RAUQ entropy': 1.2539986916207306,
            'RAUQ entropy instruct': 1.2539986916207306,
            'Perplexity': 0.3213962233038985,
            'MeanTokenEntropy': 0.833745095587887,
        },
        "layers": {
            1: {
                "head": 0, "score": 1.3213962233038985,
                "confidence": [
                    0.7251358783285414,
                ],
            },
            2: {
                "head": 0, "score": 1.3213962233038985,
                "confidence": [
                    0.7251358783285414,
                ],
            },
        },
    },
}
# fmt: on

METHODS = {
    "RAUQ": ap.RAUQ(),
    "RAUQ 0": ap.RAUQ(alpha=0.0),
    "RAUQ instruct": ap.RAUQ(alpha=0.5),
    "RAUQ 1": ap.RAUQ(alpha=1.0),
    "RAUQ entropy": ap.RAUQ(entropy=True),
    "RAUQ entropy instruct": ap.RAUQ(alpha=0.9, entropy=True),
    "Perplexity": ap.Perplexity(),
    "MeanTokenEntropy": ap.MeanTokenEntropy(),
}


def evidence(case) -> Evidence:
    attention = np.array(case["self_attention"])
    n_layers, n_heads = attention.shape[:2]
    return Evidence(
        log_probability=np.array(case["log_probability"]),
        entropy=np.array(case["entropy"]),
        traces={"self_attention": attention},
        layers=tuple(range(n_layers)),
        heads=tuple(range(n_heads)),
        n_layers=n_layers,
        vocabulary=case["vocabulary"],
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_lm_polygraph(case, name):
    assessment = METHODS[name].assess(evidence(CASES[case]))
    assert assessment.uncertainty == pytest.approx(CASES[case]["scores"][name], abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_layers_heads_and_confidences_are_those_of_lm_polygraph(case):
    expected = CASES[case]["layers"]
    assessment = ap.RAUQ().assess(evidence(CASES[case]))
    assert [trace.layer for trace in assessment.layers] == list(expected)
    for trace in assessment.layers:
        theirs = expected[trace.layer]
        assert trace.head == theirs["head"]
        assert trace.uncertainty == pytest.approx(theirs["score"], abs=1e-9)
        np.testing.assert_allclose(trace.confidence, theirs["confidence"], atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_signal_is_the_attention_of_the_position_that_chose_the_token(case):
    attention = np.array(CASES[case]["self_attention"])
    for trace in ap.RAUQ(layers="all").assess(evidence(CASES[case])).layers:
        np.testing.assert_array_equal(trace.signal, attention[trace.layer, trace.head])
