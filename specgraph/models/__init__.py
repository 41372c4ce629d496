"""Targets and drafters as plain tensor code, read from Hugging Face folders."""
