"""Doctests of modules whose optional package is not installed are left out: these modules say so when imported."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("lm_polygraph") else ["attnprobe/integrations/lm_polygraph"]
