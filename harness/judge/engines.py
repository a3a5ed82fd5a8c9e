"""Where engines mean different things by the same words: conventions, each with its source in docs/explanation/conventions.md.

A rule asks the view of the engine that left the trace, and is the same for all else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine's conventions.

    trees       verify is given a tree: links and a mask come with its nodes. Else it is a chain by construction
    spare_slot  draft() lays out a slot for each of num_steps steps, the last of which does not run
    draft_ids   the first proposal is handed on as an id of the draft's vocabulary, where that is its own; else as the target's
    counts_all  a round of no drafts is counted as a round; else a last chunk that is padded to the rows of a round is
    pairs       keys of the prefix cache are pairs of tokens, of which n tokens have n - 1; else a key covers a block and the
                token after it, so that all rows but that of the last token can be found
    early       a block is in the prefix cache when the step that writes it is scheduled, and a request of that step may have
                it: each layer writes its rows before it attends
    keeps_last  the prefix cache is given the rows that the last round of a request committed
    skips       no drafts are proposed in a step after which no request of the batch can use any
    """

    trees: bool = True
    spare_slot: bool = True
    draft_ids: bool = True
    counts_all: bool = True
    pairs: bool = True
    early: bool = False
    keeps_last: bool = True
    skips: bool = False


_VIEWS = {
    "vllm": EngineView(
        trees=False, spare_slot=False, draft_ids=False, counts_all=False, pairs=False, early=True, keeps_last=False, skips=True
    )
}
_USUAL = EngineView()


def view_of_engine(name: str) -> EngineView:
    """The conventions of an engine, by its name in a trace."""
    return _VIEWS.get(name, _USUAL)
