"""ONNX importer: a model file to a Graph."""
