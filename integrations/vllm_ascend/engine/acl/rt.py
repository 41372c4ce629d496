"""The one name that vllm-ascend looks up."""


def memcpy(*arguments: object) -> None:
    raise NotImplementedError("acl.rt.memcpy is not simulated")
