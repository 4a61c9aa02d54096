"""Transport polarity: do capacity and direction of attention point one way on hallucinated answers, on any data set?

`polarity_study` reads labelled answers and writes tables; `attnprobe polarity` is its command. The parts by themselves:
`answers_of(source_of(...))`, `features_of`, `polarity_of`, `Reversal`.
"""

from attnprobe.polarity.answers import LabelledAnswer, answers_of, chosen
from attnprobe.polarity.features import Features, features_of, stored_features
from attnprobe.polarity.recipes import Recipe, recipe_names, recipe_of
from attnprobe.polarity.report import PolarityStudy
from attnprobe.polarity.reversal import Reversal
from attnprobe.polarity.run import polarity_study, study_of
from attnprobe.polarity.sources import Source, SourceSettings, source_of
from attnprobe.polarity.study import Polarity, StudySettings, polarity_of

__all__ = [
    "Features",
    "LabelledAnswer",
    "Polarity",
    "PolarityStudy",
    "Recipe",
    "Reversal",
    "Source",
    "SourceSettings",
    "StudySettings",
    "answers_of",
    "chosen",
    "features_of",
    "polarity_of",
    "polarity_study",
    "recipe_names",
    "recipe_of",
    "source_of",
    "stored_features",
    "study_of",
]
