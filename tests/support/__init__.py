"""Real parts that tests stand on: servers, ranks, saved checkpoints, golden data."""
