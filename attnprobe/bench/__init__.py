"""Benchmarks of uncertainty scores: a configuration file, its tasks, and what counts as a good answer.

Needs the packages of `pip install "attnprobe[bench]"`; they are loaded when they are used.
"""
