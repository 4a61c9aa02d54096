"""What is said where the package that an integration needs is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attnprobe as ap


def test_one_sentence_names_the_extra():
    code = "import sys; sys.modules['lm_polygraph'] = None; import attnprobe as ap; ap.integrations.lm_polygraph"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: attnprobe.integrations.lm_polygraph needs the package 'lm_polygraph': "
        'pip install "attnprobe[lm-polygraph]"'
    )


def test_an_unknown_integration_is_an_attribute_error():
    with pytest.raises(AttributeError, match="offers lm_polygraph"):
        _ = ap.integrations.polygraph
