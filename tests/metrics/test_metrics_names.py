"""The public names of `attnprobe.metrics`."""

import subprocess
import sys

import pytest
from sklearn.exceptions import UndefinedMetricWarning

import attnprobe as ap


def test_reachable_from_the_package():
    assert "metrics" in dir(ap)
    assert ap.metrics.auroc([1, 2], [0, 1]) == 1


def test_every_public_name_is_documented_with_an_example():
    assert ap.metrics.__all__ == sorted(ap.metrics.__all__)
    for name in ap.metrics.__all__:
        public = getattr(ap.metrics, name)
        assert public.__doc__, name
        if not isinstance(public, type):
            assert ">>>" in public.__doc__, name
            assert "Source:" in public.__doc__, name


def test_torch_is_not_needed():
    code = """
import sys
from attnprobe import metrics
metrics.bootstrap(metrics.auroc, [1, 2, 3], [0, 1, 1], resamples=5)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def test_a_warning_points_at_the_line_of_the_caller():
    for call in (
        lambda: ap.metrics.auroc([1, 2], [1, 1]),
        lambda: ap.metrics.compare({"a": [1, 2]}, [1, 1], metric=ap.metrics.auroc),
    ):
        with pytest.warns(UndefinedMetricWarning) as warned:
            call()
        assert {warning.filename for warning in warned} == {__file__}
