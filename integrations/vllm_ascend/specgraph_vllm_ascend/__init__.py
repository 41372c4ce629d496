"""vLLM on Ascend NPUs drafts through specgraph: see `specgraph_vllm_ascend.plugin`, and
docs/integrations/vllm-ascend.md."""
