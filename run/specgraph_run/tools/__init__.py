"""Measures proposes and whole rounds in every lowering, and compares lowerings."""
