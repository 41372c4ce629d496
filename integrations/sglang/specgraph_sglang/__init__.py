"""SGLang drafts through specgraph. See docs/integrations/sglang.md."""
