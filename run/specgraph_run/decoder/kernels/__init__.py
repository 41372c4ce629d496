"""Triton kernels of the ops of the decoder. They need `triton`, which the decoder does not."""
