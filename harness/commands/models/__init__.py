"""The ledger in every model: each entry proven with other targets and drafts than its own, or why it cannot be.

survey.py proves what is not known yet; results.py keeps the answers; reasons.py says why a bug does not show
where it does not; report.py makes a page of all that.
"""
