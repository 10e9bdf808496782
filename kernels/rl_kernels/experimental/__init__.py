"""Kernels that no device has run yet, and adapters to other libraries: on request only, never chosen.

Each moves up into its operation's folder, or is removed, under a condition that a GPU of its kind decides. Times are
those of ``kernels/benchmarks`` at N = 8192, H = 4096, V = 128256 in bfloat16; "agrees" means the tests of
``tests/kernels`` pass there.

``gluon/``
    Moves up for an architecture where it agrees and its forward takes at most 0.95 of the time of ``triton``. Removed
    when it is slower than ``triton`` on Hopper, Blackwell and CDNA4, or when a release of Triton no longer compiles it.
``triton_matmul/``
    Moves up when it agrees and its forward takes less time than ``triton`` on a GPU, or when a caller needs results
    of a token that do not depend on the other tokens. Removed when it is slower on an H100, an H200 and an MI300X.
``pallas_gpu/``
    Moves up when it agrees and takes less time than XLA does for rl_fn's formula, on an NVIDIA or AMD GPU. Removed when
    it does not, or when JAX takes Pallas's dialect for Triton away.
``liger``
    Stays an adapter. Removed when ``triton`` is as fast on Hopper, or when Liger's signature changes.
``flashinfer``, ``aiter``
    Stay adapters. Removed when the ``triton`` sampler is as fast on their GPUs, or when their signatures change.

``on_chip_forward`` is the loop that ``gluon/`` and ``triton_matmul/`` share, ``sampler_adapter`` what the two samplers
share.
"""
