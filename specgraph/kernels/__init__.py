"""Triton implementations of the draft ops, for every device that Triton compiles for.

A backend imports this package only if its device can run Triton kernels: it needs `triton`, the core does not.
"""
