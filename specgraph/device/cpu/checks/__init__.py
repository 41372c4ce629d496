"""What the `cpu` platform checks and a device does not: order between streams, inputs that moved, host reads."""
