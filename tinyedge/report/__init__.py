"""Reports for people: what a plan holds and costs."""
