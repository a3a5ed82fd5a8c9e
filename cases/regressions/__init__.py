"""The ledger: one file per known bug. LEDGER maps the id of an entry to it, PROBES that of a bug which one call shows."""

from ..entry import Entry, Probe
from . import (
    boundary_kv,
    chain_hidden,
    context_end,
    deterministic_window,
    draft_window,
    greedy_drafts,
    indices_overflow,
    multi_layer_chunk_tail,
    multi_layer_plan,
    multi_layer_pp,
    multi_layer_topk,
    pr_8409,
    pr_10846,
    pr_22088,
    pr_22832,
    pr_22954,
    pr_25015,
    pr_26239,
    pr_26329,
    pr_26972,
    pr_26997,
    pr_33758,
    retracted_chunk_tail,
    row_overflow,
    small_tree,
    standalone,
    tree_window,
    verify_asks,
)

LEDGER: dict[str, Entry] = {
    entry.id: entry
    for entry in (
        pr_10846.ENTRY,
        pr_22088.ENTRY,
        pr_25015.ENTRY,
        pr_26329.ENTRY,
        pr_26972.ENTRY,
        *pr_26997.ENTRIES,
        pr_33758.ENTRY,
        pr_8409.ENTRY,
        *pr_22954.ENTRIES,
        row_overflow.ENTRY,
        indices_overflow.ENTRY,
        small_tree.ENTRY,
        chain_hidden.ENTRY,
        *multi_layer_plan.ENTRIES,
        multi_layer_pp.ENTRY,
        *multi_layer_chunk_tail.ENTRIES,
        *multi_layer_topk.ENTRIES,
        tree_window.ENTRY,
        verify_asks.PROCESSOR,
        verify_asks.MIN_P,
        boundary_kv.ENTRY,
        *greedy_drafts.ENTRIES,
        retracted_chunk_tail.ENTRY,
        *context_end.ENTRIES,
        *standalone.ENTRIES,
        draft_window.ENTRY,
        deterministic_window.ENTRY,
    )
}

PROBES: dict[str, Probe] = {probe.id: probe for probe in (pr_26239.PROBE, pr_22832.PROBE)}
