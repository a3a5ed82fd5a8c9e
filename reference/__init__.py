"""The slow, obvious truth: what each number of the EAGLE draft chain should have been.

Takes tensors and owns no files. There is no KV cache, no page and no chunk here, and a batch is a mask: every quantity is a
function of one request's committed tokens, recomputed with full-sequence forwards in float64. Imports torch alone.

Letters in shape comments: T tokens of a request, R rows of a draft forward, H hidden size, V vocabulary, L layers,
N query heads, G key/value heads, D head size.
"""
