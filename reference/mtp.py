"""Multi-layer EAGLE (MTP): one head a step, and which token and hidden state each row of each layer consumes (DESIGN 3.7).

Layer k = 0, 1, .. has a head of its own and proposes d[k+1]. There is no draft decode: all layers run over the same rows, those
of a prefill chunk or of the tokens that verify has just committed. Row i of layer k consumes x[i+1+k] and proposes the token
after it. Its hidden state is the target's h[i] at every layer; in a *chained* model, what the layer below computed for it.

The last rows look ahead of what is committed, to x[M+1] and on: they consume the drafts so far, and are *provisional*. A row
that is provisional when it is written and is not written again keeps the draft, whatever verify says of it. So there are two
views of a stored row: `committed` is what follows from x alone; `last_fed` what follows from the tokens that it was fed. The
first is draft_extend over all rows, the second draft_extend over the new ones behind rows that are there already.

Source: DeepSeek-V3 (arXiv 2412.19437) §2.2 for the chained form; which state a chained layer hands on, before its final norm or
behind it, the paper leaves open (draft_heads.py). That provisional rows stay is SGLang's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .eagle import DraftRows, Head, draft_rows


def layer_tokens(tokens: Tensor, proposals: Sequence[int], layer: int, rows: range) -> Tensor:
    """Token of each row of a layer [R]: x[i+1+layer], and past what is known the draft of it.

    tokens: x[0..M], all that is known when the rows are written; rows end at K <= M. proposals[n]: what row K-1 of layer n
    proposes for x[K+1+n]; those of the layers below are asked for. K = M after verify and after a prompt's last chunk; behind a
    chunk in between, M is the end of the prompt, and there is something to look up as long as K + layer <= M.
    """
    ahead = range(len(tokens) - 1 - rows.stop, layer)  # proposals that stand in for tokens
    sequence = torch.cat([tokens, torch.tensor([proposals[n] for n in ahead], dtype=tokens.dtype)])
    return sequence[rows.start + 1 + layer : rows.stop + 1 + layer]


def is_provisional(row: int, layer: int, known: int) -> bool:
    """Whether the token of a layer's row was not committed yet when x[0..known] was."""
    return row + 1 + layer > known


def draft_extend(
    heads: Sequence[Head],
    chained: bool,
    tokens: Tensor,
    target_hidden: Tensor,
    rows: range,
    before: Sequence[DraftRows | None],
    proposals: Sequence[int] | None = None,
) -> list[DraftRows]:
    """Rows of every layer, by layer. The last row's logits are what the layer proposes from.

    tokens         x[0..M], M >= rows.stop
    target_hidden  [>= rows.stop, ..] h[0..]
    before         of each layer: its stored rows 0..rows.start-1; None: there are none
    proposals      what each layer proposed, chosen by somebody else; the logits and rows are still the reference's
    """
    positions, hidden = torch.arange(rows.start, rows.stop), target_hidden[rows.start : rows.stop]  # [R], [R, H]
    sees = torch.arange(rows.stop)[None, :] <= positions[:, None]  # [R, rows.start + R]
    found: list[DraftRows] = []
    chosen: list[int] = []
    for layer, head in enumerate(heads):
        ids = layer_tokens(tokens, chosen, layer, rows)  # [R]
        found.append(draft_rows(head, ids, head.feed(hidden), positions, sees, before[layer]))
        chosen.append(int(found[-1].logits[-1].argmax()) if proposals is None else int(proposals[layer]))
        if chained:
            hidden = found[-1].hidden  # [R, H]
    return found


def draft_extends(
    heads: Sequence[Head],
    chained: bool,
    tokens: Tensor,
    target_hidden: Tensor,
    rows: range,
    known: Tensor,
    ends: Tensor,
    before: Sequence[DraftRows | None],
) -> list[DraftRows]:
    """What draft_extend makes of one extend after the other, all at once: `rows` of every layer, by layer.

    tokens  x[0..n-1], what is committed later included
    known   [R] M of the extend that writes each row: x[0..M] is known to it
    ends    [R] K of that extend: K-1 is its last row, and may stand behind `rows`. K = M, but for a chunk whose prompt goes on
    """
    positions = torch.arange(rows.start, rows.stop, device=known.device)
    sees = torch.arange(rows.stop, device=known.device)[None, :] <= positions[:, None]  # [R, rows.start + R]
    last = (ends - 1 - rows.start).clamp(max=len(rows) - 1)  # [R] the row that each row's extend proposes from
    found: list[DraftRows] = []
    drafts: list[Tensor] = []  # what each layer proposes in the extend of each row [R]
    hidden = target_hidden[rows.start : rows.stop]
    for layer, head in enumerate(heads):
        at = positions + 1 + layer
        ids = tokens[at.clamp(max=len(tokens) - 1)]
        for ahead, draft in enumerate(drafts, 1):  # provisional: x[K + ahead] is not known
            ids = torch.where((at - ends == ahead) & (at > known), draft, ids)
        found.append(draft_rows(head, ids, head.feed(hidden), positions, sees, before[layer]))
        drafts.append(found[-1].logits.argmax(-1)[last])
        if chained:
            hidden = found[-1].hidden
    return found
