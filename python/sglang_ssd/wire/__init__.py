"""What verifier and draft say to each other: typed messages over ZeroMQ. Knows no model and no torch."""
