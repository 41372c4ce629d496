"""CANN's Python module, as far as vllm-ascend imports it: no package index has it, so this stands in without CANN."""
