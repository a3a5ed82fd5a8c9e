"""Stages of a pipeline: a process each, with some of the target's layers; the last one also has the draft.

SGLang's pipelines run EAGLE where SGLANG_ENABLE_PP_SPEC is set (0.5.21 and later). When a round is over the last stage drafts
the tree of the next one, which goes round with what the round decided, so that every stage verifies the same tree. What a
request is verified with in its first round was never drafted: the token of its prefill, and zeros.
"""

from eagletwin.harness.core.mode import Mode

from ..not_driven import NotDriven

_VARIABLE = "SGLANG_ENABLE_PP_SPEC"


def stage_of(mode: Mode, rank: int) -> int:
    """The stage that is this process of ours: the first is the last stage, whose trace is judged."""
    return mode.pp - 1 - rank


def refuse() -> None:
    """Raises NotDriven where this release has no such stages."""
    from sglang.srt.environ import envs

    if not hasattr(envs, _VARIABLE):
        why = f"this release has no {_VARIABLE}, by which its stages run EAGLE (0.5.21 and later have it)"
        raise NotDriven(f"a pipeline: {why}")
