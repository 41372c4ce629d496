"""Triton implementations of the draft ops, for every device that Triton compiles for.

Imported only by a backend whose device can run them: this package needs `triton`, the core does not.
"""
