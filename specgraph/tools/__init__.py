"""Measures proposes and whole rounds in every lowering, tunes tiles, records timelines, compares lowerings."""
