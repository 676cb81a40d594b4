"""Measurements against onnxruntime, random graphs, and long runs."""
