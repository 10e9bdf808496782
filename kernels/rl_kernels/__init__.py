"""Fast operations of vocabulary size: log-probabilities, sampling, quantisation."""
