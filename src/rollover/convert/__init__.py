"""Configurations of other systems, converted: one module a system with its mapping, read by `rollover convert`.

The tables of docs/coming-from.md are made from the same mappings (`table.py`).
"""
