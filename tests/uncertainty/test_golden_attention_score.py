"""AttentionScore and MaximumSequenceProbability against LM-Polygraph's own numbers.

The numbers were computed by LM-Polygraph 0.7.0 on small random inputs. `diagonal` is that of the attention over prompt
and generation, the last token's row included, by layer: [head, position]. Of `gen_only=True` LM-Polygraph counts the
generated tokens but the last.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnprobe as ap
from attnprobe.uncertainty import Evidence

# fmt: off
CASES = {
    'five tokens': {
        "n_layers": 3,
        "n_prompt": 4,
        "log_probability": [
            -0.9191040957473194, -1.0630186785569542, -0.9947011062787781, -0.5337165504828725, -0.8432793565170088,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.5668584304406025, 0.7975389766139724, 0.3191936942651881, 0.039937555088040366,
                    0.44800259348804916, 0.007747562280251235, 0.05375749548184845, 0.1257371894267303,
                ],
                [
                    1.0, 0.6005401072243047, 0.16509105917265068, 0.001084634844764257, 0.2169941938610261,
                    0.07445265001745938, 0.20420838365965752, 0.0324957143288565, 0.05733086821014139,
                ],
            ],
            1: [
                [
                    1.0, 0.12481445441377563, 0.08131606883495726, 0.05147825734041698, 0.0034827395894629527,
                    0.5388779144235684, 0.06518155992575653, 0.12666128751278638, 0.049969829452301585,
                ],
                [
                    1.0, 0.9203704999996436, 0.024019718042011782, 0.012023494580870903, 0.5492026650121787,
                    0.09077138865215686, 0.04307415233266654, 0.005192257423154827, 0.009246156247466473,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 22.974353495244905,
            'AttentionScore layer 0': 18.476891155758647,
            'AttentionScore generation': 11.239568771981103,
            'MaximumSequenceProbability': 4.353819787582933,
        },
    },
    'six tokens, one of a ragged batch': {
        "n_layers": 4,
        "n_prompt": 5,
        "log_probability": [
            -0.767626983691585, -0.036637075125470264, -0.21332097378436235, -1.0109775504822684,
            -0.9064930545847124, -0.20769596361257556,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.9391566118597316, 0.15539697418198758, 0.3091540233733577, 0.0374429764982489,
                    0.01725921560096724, 0.019394680753959424, 0.23379783422510314, 0.042877805550063666,
                    0.011445915803711473, 0.07201328425159982,
                ],
                [
                    1.0, 0.434348097723501, 0.5234179259519197, 0.009594204218691288, 0.033867622745011684,
                    0.057608582067966894, 0.10575554785038045, 0.9426370930877412, 0.4595578851848773,
                    0.1260854666381373, 0.005680253198230738,
                ],
                [
                    1.0, 0.5091010656280542, 0.03612390865716154, 0.3916455860593405, 0.010334557070005428,
                    0.13643060206737104, 0.08315493069092228, 0.0455277934375968, 0.19625638214628585,
                    0.025095789586053723, 0.22800002473885997,
                ],
            ],
            2: [
                [
                    1.0, 0.01661703396037855, 0.4097236660657398, 0.0010542033495945144, 0.03094265374202911,
                    0.018786391768819334, 0.07950700213528657, 0.0035949885950657605, 0.012123104202001753,
                    0.006546115702802652, 0.04656732501170392,
                ],
                [
                    1.0, 0.05275940980510607, 0.01404814802603188, 0.04304945418520603, 0.14499059998471822,
                    0.41365523005904353, 0.004200869994456172, 0.09890781733573971, 0.018440153581204825,
                    0.6645562944652642, 0.043113779508908344,
                ],
                [
                    1.0, 0.8079992204790302, 0.37880243186188334, 0.3052068040681065, 0.1892098597237124,
                    0.6223956295045985, 0.16807003940457726, 0.39666858178978903, 0.08765003176410276,
                    0.0034806334599073196, 0.005476236612020262,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 29.660567389549545,
            'AttentionScore layer 0': 24.215693710736485,
            'AttentionScore generation': 15.308012840580906,
            'MaximumSequenceProbability': 3.1427516012809744,
        },
    },
    'two tokens, one of a ragged batch': {
        "n_layers": 4,
        "n_prompt": 3,
        "log_probability": [
            -1.4601361969915967, -0.9319484803896001,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.16404808038730925, 0.2964300845796841, 0.04582101114363235, 0.07835415932910693,
                ],
                [
                    1.0, 0.2014609792262083, 0.05773572657314735, 0.15847813928909288, 0.25079955787402997,
                ],
                [
                    1.0, 0.055474321259427944, 0.07456351172655716, 0.07237655648071212, 0.09705723588935332,
                ],
            ],
            2: [
                [
                    1.0, 0.12882359294584078, 0.14885015650050498, 0.46298753336179643, 0.017390744647091134,
                ],
                [
                    1.0, 0.5483479403982505, 0.19674966659792728, 0.035979044305921026, 0.010048207062743997,
                ],
                [
                    1.0, 0.04328878447344339, 0.04590778949676986, 0.03496084862196152, 0.08581406203180793,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 10.319309256689822,
            'AttentionScore layer 0': 8.92620440527119,
            'AttentionScore generation': 2.482800072672329,
            'MaximumSequenceProbability': 2.392084677381197,
        },
    },
    'one of a ragged batch, four layers': {
        "n_layers": 4,
        "n_prompt": 4,
        "log_probability": [
            -0.6619556847308664, -0.4452775004409638, -0.6086411149867001, -0.1813447724855726,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.49867290914897117, 0.6120356894568749, 0.011069037395309385, 0.0017188092555755208,
                    0.029834585293564832, 0.07595458948797015, 0.005995974045563431,
                ],
                [
                    1.0, 0.643582654618575, 0.007413074229277687, 0.1820893078484988, 0.12274221493720709,
                    0.047127121322564074, 0.2550702072981441, 0.06753549146140025,
                ],
                [
                    1.0, 0.4178692654344908, 0.10875424351945734, 0.2908322548148295, 0.36249394241354704,
                    0.03552038955573856, 0.04527810617784928, 0.3239923473929423,
                ],
            ],
            2: [
                [
                    1.0, 0.4478819770917746, 0.11389073946486965, 0.14120450593004447, 0.5362029786359348,
                    0.3851551142993835, 0.2965194686334638, 0.009193876335461686,
                ],
                [
                    1.0, 0.23664132134763685, 0.5090699057739214, 0.7971425546131646, 0.04417403316334334,
                    0.9036473634597244, 0.07145133704162496, 0.09483136829311145,
                ],
                [
                    1.0, 0.8678557519391703, 0.5347102170515918, 0.05350882622690564, 0.3135816076932926,
                    0.5717793249295692, 0.10278000458269172, 0.05590388166372473,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 11.18252690642857,
            'AttentionScore layer 0': 17.475286648200367,
            'AttentionScore generation': 4.2155097237065435,
            'MaximumSequenceProbability': 1.897219072644103,
        },
    },
    'a token suppressed to -inf': {
        "n_layers": 3,
        "n_prompt": 3,
        "log_probability": [
            -0.6870380516682258, -0.8906931731928704, -0.21169754171074212, -0.11616178162380464,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.7638480690856336, 0.21345471278545744, 0.5116576508169811, 0.0068228293648541875,
                    0.09379763308390492, 0.0365701130381731,
                ],
                [
                    1.0, 0.7076819897342999, 0.02628690713884967, 0.1984795186246397, 0.14288648941425586,
                    0.0992594075082446, 0.05673206687892387,
                ],
            ],
            1: [
                [
                    1.0, 0.027399548455949118, 0.09032080870120401, 0.13863718725153046, 0.34254218513458756,
                    0.031145410768887757, 0.06569305102750742,
                ],
                [
                    1.0, 0.8767178359452286, 0.0052579041270582345, 0.34335433182618924, 0.009070693317780952,
                    0.05773078281138669, 0.28062597520391375,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 15.257355547311493,
            'AttentionScore layer 0': 12.93654511812515,
            'AttentionScore generation': 7.570003704279909,
            'MaximumSequenceProbability': 1.9055905481956432,
        },
    },
    'a single token': {
        "n_layers": 3,
        "n_prompt": 3,
        "log_probability": [
            -0.3213962233038985,
        ],
        "diagonal": {
            0: [
                [
                    1.0, 0.7152843915738671, 0.17621821386941844, 0.9388379690336583,
                ],
                [
                    1.0, 0.5489015632435655, 0.19640644712028196, 0.012108963504160226,
                ],
            ],
            1: [
                [
                    1.0, 0.1225420925974539, 0.1677611750433716, 0.015293552052954061,
                ],
                [
                    1.0, 0.1471318859669039, 0.18341415442889125, 0.1533685097503891,
                ],
            ],
        },
        "scores": {
            'AttentionScore': 6.776092352555713,
            'AttentionScore layer 0': 4.387717082284289,
            'AttentionScore generation': -0.0,
            'MaximumSequenceProbability': 0.3213962233038985,
        },
    },
}
# fmt: on

METHODS = {
    "AttentionScore": ap.AttentionScore(),
    "AttentionScore layer 0": ap.AttentionScore(layer=0),
    "AttentionScore generation": ap.AttentionScore(generation_only=True),
    "MaximumSequenceProbability": ap.MaximumSequenceProbability(),
}


def streamed(diagonal, n_prompt: int) -> dict[str, np.ndarray]:
    """The traces of patterns with this diagonal [layer, head, position], rows fed as a host would."""
    diagonal = torch.tensor(diagonal, dtype=torch.float64)
    pattern = torch.diag_embed(diagonal)
    pattern[..., 1:, 0] += 1 - diagonal[..., 1:]  # what else a row has may be anywhere
    analyzer = ap.LogDeterminant(1e-12, trace=True)
    analyzer.update(ap.Rows.from_pattern(pattern[..., : n_prompt - 1, :n_prompt], start=0))
    rows = ap.Rows.from_pattern(pattern[..., n_prompt - 1 :, :], start=n_prompt - 1)
    return {name: value.numpy() for name, value in analyzer.trace_rows(rows).items()}


def evidence(case) -> Evidence:
    log_probability = np.array(case["log_probability"])
    layers = tuple(case["diagonal"])
    return Evidence(
        log_probability=log_probability,
        entropy=np.ones_like(log_probability),
        traces=streamed([case["diagonal"][layer] for layer in layers], case["n_prompt"]),
        layers=layers,
        heads=tuple(range(len(case["diagonal"][0]))),
        n_layers=case["n_layers"],
        vocabulary=9,
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_lm_polygraph(case, name):
    assessment = METHODS[name].assess(evidence(CASES[case]))
    assert assessment.uncertainty == pytest.approx(CASES[case]["scores"][name], abs=1e-9)
    assert assessment.layers == ()


@pytest.mark.parametrize("case", CASES)
def test_which_rows_count(case):
    """All of prompt and generation, the last token's own included; of the generation, all but the last."""
    case = CASES[case]
    middle = np.log(np.array(case["diagonal"][case["n_layers"] // 2]) + 1e-12)
    assert -middle.sum(-1).mean() == pytest.approx(case["scores"]["AttentionScore"], abs=1e-9)
    generated = middle[:, case["n_prompt"] : -1].sum(-1)
    assert -generated.mean() == pytest.approx(case["scores"]["AttentionScore generation"], abs=1e-9)
    assert abs(middle[:, -1]).min() > 1e-3  # so that the last row tells
