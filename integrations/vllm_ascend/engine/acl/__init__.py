"""Stands in for CANN's Python module, which no index has. vllm-ascend imports it for sleep mode."""
