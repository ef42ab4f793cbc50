"""Configurations of other systems, converted: a folder a system (rows.py: what its options are here), read by
`rollover convert`.

The tables of docs/coming-from.md are made from the same mappings (scripts/docs_conversions.py).
"""
