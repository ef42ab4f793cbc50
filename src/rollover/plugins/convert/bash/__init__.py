"""Evaluates bash as far as launch scripts need it, from the syntax tree of tree-sitter. Runs nothing."""
