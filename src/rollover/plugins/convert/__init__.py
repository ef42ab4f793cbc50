"""`rollover convert`: configurations of other systems. A module or folder per system has its options as rows.

scripts/docs_conversions.py writes the tables of docs/coming-from.md from the same rows.
"""
