"""SGLang drafts EAGLE-3 decode rounds through specgraph. See docs/integrations/sglang.md."""
