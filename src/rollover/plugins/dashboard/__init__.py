"""The dashboard: runs as pages of a browser, live from a server, or as one file that opens without a network.

    IndexedRun ──▶ RunData, RunComparison: queries answered as JSON ──▶ app (HTTP) or report (one file) ──▶ page/

The page sends the same queries to both. run_data: all queries of one run. compare: those of several runs. metrics:
curves, accounts, warnings. run_statistics: ledger and staleness. rollout_query: lists of rollouts. rollout_detail: one
rollout. lanes: the trace as slots over time. eval_answers: answers of evaluations.
"""
