"""The forward of ``linear_logprobs`` in one Triton kernel, its matrix product included; run in the interpreter only."""
