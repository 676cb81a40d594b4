"""The tinyedge command, one module a command."""
