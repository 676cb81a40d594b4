"""A scheduled kernel in a target's language."""
