"""One kernel to target code: loop IR, schedules, renderers, linking."""
