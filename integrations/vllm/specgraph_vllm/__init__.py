"""vLLM drafts through specgraph: see `specgraph_vllm.plugin`, and docs/integrations/vllm.md."""
