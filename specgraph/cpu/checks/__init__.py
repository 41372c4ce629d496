"""Checks that the `cpu` platform makes and a device does not: order between streams, moved inputs, host reads."""
