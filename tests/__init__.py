"""Tests; `tests.models` gives the real networks that they run."""
