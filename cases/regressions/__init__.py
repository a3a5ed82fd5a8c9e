"""The ledger: one file per known bug. LEDGER maps the id of an entry to it."""

from eagletwin.cases.entry import Entry

from . import pr_25015, pr_26329

LEDGER: dict[str, Entry] = {entry.id: entry for entry in (pr_25015.ENTRY, pr_26329.ENTRY)}
