"""The branches that SGLang takes for tensors on a GPU, taken for those of a CPU."""


def take_cuda_branches(shims: list[str]) -> None:
    raise NotImplementedError
