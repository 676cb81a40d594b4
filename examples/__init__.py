"""Programs that show tinyedge at work on trained models of other people."""
