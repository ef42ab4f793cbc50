"""The dashboard: a run, or several, as pages of a browser; live by a server, or as one file that opens without a
network.

    IndexedRun ──▶ RunData, compare: questions answered as JSON ──▶ app (HTTP) or report (one file) ──▶ page/

The page asks the same questions of both. run_data (what one run answers, and which question is whose), series
(metrics), found (filters, order, pages, search), lanes (the trace as slots over time), told (one rollout), balance
(the ledger), stale (staleness over steps), episodes (the contexts of one), answered (answers of evaluations), compare
(several runs), numbers (JSON that is short).
"""
