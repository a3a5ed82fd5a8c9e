"""The ledger in every model: each entry proven with other targets and drafts than its own, or why it cannot be.

survey.py proves what is not known yet; results.py keeps the answers, a file a model; reasons.py says why a bug does not show
where it does not; report.py makes docs/records/models.md of all that.
"""
