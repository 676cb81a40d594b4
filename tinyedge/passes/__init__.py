"""Graph to graph: each module is a list of small named rules."""
