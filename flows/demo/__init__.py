"""The demo: a real training run, good and broken steps, and the whole lifecycle on one machine."""
