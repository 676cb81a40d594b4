"""tinyedge: a compact tensor compiler and runtime."""
