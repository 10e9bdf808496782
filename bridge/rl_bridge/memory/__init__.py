"""Memory while a run goes on: a token budget that keeps to what there is, and garbage collected between phases."""
