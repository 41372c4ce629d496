"""Measures proposes and whole rounds in every lowering, records timelines, compares lowerings."""
