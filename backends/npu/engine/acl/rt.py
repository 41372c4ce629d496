"""The one call that vllm-ascend imports, for its sleep mode."""


def memcpy(*arguments: object) -> None:
    raise NotImplementedError("acl.rt.memcpy: sleep mode copies with it, which is not simulated")
