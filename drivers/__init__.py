"""User-space drivers, one folder a device family."""
