"""Triton kernels of the ops of models. They need `triton`, which models do not."""
